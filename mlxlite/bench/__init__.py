"""`mlxlite bench`: what mlxlite costs, beside its peer with the same weights (floor 4).

Servers as processes, asked over HTTP: `servers`, `client`, `legs`, `matrix`. Figures of one
process: `inner`, `crowd`, `cost`. What they say: `figures`, `report`.
"""
