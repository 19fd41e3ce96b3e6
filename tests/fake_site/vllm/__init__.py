"""A stand-in for the `vllm` package: only the command-line entry points exist."""

__version__ = "0.32.0+fake"
