"""`make bench`: what mlxlite costs, and what its peer does with the same weights (floor 4).

peers    mlxlite beside mlx_lm.server, each as a process of its own
tax      a decode step with and without HTTP
crowd    many streams at once, with and without HTTP
cost     from an engine's event to the socket, the event loop's CPU time for a token

python -m mlxlite.bench [--model NAME] [--only mlxlite|tax|crowd|cost]
"""
