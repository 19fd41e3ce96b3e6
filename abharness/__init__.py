"""A/B serving experiments for vLLM that you can believe."""

__version__ = "0.1.0"
