"""Models on disk: the catalogue, downloads, the GGUF import and the list of what is local.

Nothing here touches a device: `mlx` is not imported at all, and numpy only by the GGUF import.
The engine's loader takes over from the folder that `library.resolve` or `library.get` names.
"""
