"""The engine: one thread that owns MLX, and the pure parts that it is made of.

It knows token ids and arrays; no text, no JSON, no HTTP. Its files in the order of their imports:
`backend`, `scheduler`, `sample`, `quantised`, `load`, `batch`, `worker`.
"""
