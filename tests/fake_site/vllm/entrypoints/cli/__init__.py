"""Package of the stand-in."""
