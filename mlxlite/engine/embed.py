"""Token ids -> vectors: pooled hidden states, or the logits of a few ids (a reranker's verdict)."""

from __future__ import annotations

from mlxlite.engine.jobs import Work
from mlxlite.engine.load import LoadedModel
from mlxlite.types import EmbedSpec


class Embedder:
    """Makes the jobs that embed; one a model, owned by the engine thread."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model

    def run(self, spec: EmbedSpec) -> Work:
        """The job of one spec; its result is a tuple of bytes, see `Engine.embed`."""
        yield
        return tuple(b"" for _ in spec.inputs)
