"""Every exception that mlxlite raises on purpose (floor 0: imports nothing of ours).

The lowest layer that knows a cause raises one of these; `http/routing.py` catches it once and each
API surface renders it in its own JSON shape. The command line prints the message on one line and
exits with 1. Anything else that escapes is a bug and becomes a 500 whose stack goes to the log.

Messages say what was given, what is allowed and what to do.
"""

from __future__ import annotations


class MlxliteError(Exception):
    """An error with an HTTP status, for a client or an operator to read.

    status: HTTP status code. code: short machine-readable cause, or None. param: the request field
    at fault, or None. retry_after_s: seconds after which a repeat makes sense, or None.
    """

    status = 500
    code: str | None = None
    param: str | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if param is not None:
            self.param = param
        if code is not None:
            self.code = code


class BadRequest(MlxliteError):
    """The request is wrong; repeating it cannot help."""

    status = 400


class TooLong(BadRequest):
    """The prompt leaves no room in the context. Code as OpenAI's clients expect it."""

    code = "context_length_exceeded"


class Unauthorized(MlxliteError):
    """The key is missing or wrong."""

    status = 401
    code = "invalid_api_key"


class Forbidden(MlxliteError):
    """A host or an origin that this server does not serve (decision D13)."""

    status = 403


class NotFound(MlxliteError):
    """No such path, model, response or file."""

    status = 404


class MethodNotAllowed(MlxliteError):
    """The path exists, the method does not; `allow` lists what does."""

    status = 405

    def __init__(self, message: str, allow: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allow = allow


class Conflict(MlxliteError):
    """What is asked for is under way already, or does not fit what is there."""

    status = 409


class TooLarge(MlxliteError):
    """The body is over the limit."""

    status = 413


class UnsupportedCoding(MlxliteError):
    """The body is compressed; it is taken only as it is."""

    status = 415


class Busy(MlxliteError):
    """The queue is full; try again soon."""

    status = 429
    code = "queue_full"
    retry_after_s = 1


class EngineFault(MlxliteError):
    """A step failed inside the engine; the row it served is lost, its neighbours are not."""

    status = 500
    code = "engine_fault"


class EngineDown(MlxliteError):
    """The engine is not there: still loading, stopping, or dead."""

    status = 503
    code = "engine_down"
    retry_after_s = 1


class Cancelled(MlxliteError):
    """The row was given up: its client left or the server stops. Nobody reads the answer."""

    status = 499
    code = "cancelled"


class HubFault(MlxliteError):
    """The hub did not answer, or not with what was asked for."""

    status = 502
    code = "hub_fault"


class DiskFull(MlxliteError):
    """There is no room on the disk for what is sent; what is there is kept."""

    status = 507
    code = "disk_full"


class BackendMissing(MlxliteError):
    """No MLX backend is installed; the message names the extra to install."""


class ModelError(MlxliteError):
    """A model that cannot be found, read or built; the message names the file and the reason."""


class DownloadError(ModelError):
    """A download that did not arrive whole; what is there can be resumed."""
