"""Component A/B below serving: linear layers captured from a server, replayed in a CUDA graph at the clocks of serving."""
