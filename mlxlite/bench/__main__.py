"""python -m mlxlite.bench: the verb `mlxlite bench`."""

from __future__ import annotations

import sys

from mlxlite import cli

if __name__ == "__main__":
    sys.exit(cli.main(["bench", *sys.argv[1:]]))
