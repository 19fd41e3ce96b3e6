"""PQ2: ternary weights in 2 bits, the kernels that multiply by them, and the vLLM plugin that serves them.

Importing this imports neither torch, Triton nor vLLM: the plugin is looked at by processes that run no model.
"""

__version__ = "0.1.0"
