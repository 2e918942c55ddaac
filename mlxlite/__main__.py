"""`python -m mlxlite`: the same as the command `mlxlite`."""

from mlxlite.cli import entry

entry()
