"""What runs in the server's environment, on torch: it is copied there, so it imports nothing of abharness by that name."""
