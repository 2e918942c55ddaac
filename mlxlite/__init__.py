"""mlxlite: the LLM server for your own machine, on MLX."""

__version__ = "0.1.0"
