"""HTTP/1.1 by hand: the column that knows sockets and bytes, and no model.

    wire     bytes <-> requests and answers, pure
    guard    which hosts, origins and keys are served, pure
    routing  Request, Response, EventStream; path -> handler; error -> answer
    server   the asyncio shell: connections, back pressure, timeouts, graceful stop

A file imports only those above it in this list, `mlxlite.errors` and the standard library.
"""
