"""A listening socket, or one line that says why there is none.

Apart from the server because it comes first in a start: it imports next to nothing, so that a port
clash is seen before anything heavy is loaded. The address stays taken from here on.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from mlxlite.errors import MlxliteError

BACKLOG = 512


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the system choose. Raises MlxliteError, in one line.

    SO_REUSEADDR lets a restart reuse the port while old connections time out; a live listener still
    keeps it (not so on Windows, where the option means sharing and is left off).
    """
    where = f"{host}:{port}"
    if not 0 <= port <= 65535:
        raise MlxliteError(f"cannot listen on {where}: a port is a number from 0 to 65535")
    try:
        found = socket.getaddrinfo(host or "-", port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        reason = f"{host!r} is no host name or address"
        raise MlxliteError(f"cannot listen on {where}: {reason}") from None
    # `localhost` is often both; IPv4 is what most clients try first.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind, protocol)  # asyncio looks at it, see TCP_NODELAY above
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # `::` serves IPv4 too
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        reason = {
            errno.EADDRINUSE: "another program listens there; stop it or choose another port",
            errno.EADDRNOTAVAIL: f"{host!r} is not an address of this machine",
            errno.EACCES: "not permitted; choose a port above 1023",
        }.get(error.errno or 0, error.strerror or str(error))
        raise MlxliteError(f"cannot listen on {where}: {reason}") from None
    return sock


def bind_unix(path: Path) -> socket.socket:
    """A socket listening at a path. A file left behind by a killed server is replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            pass
        except ConnectionRefusedError:  # so does connecting to what is no socket at all
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise MlxliteError(f"cannot listen on {path}: a file is there") from None
            path.unlink(missing_ok=True)  # nobody listens there any more
        except OSError as error:
            raise MlxliteError(f"cannot listen on {path}: {error.strerror or error}") from None
        else:
            raise MlxliteError(f"cannot listen on {path}: another program listens there")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise MlxliteError(f"cannot listen on {path}: {error.strerror or error}") from None
    return sock
