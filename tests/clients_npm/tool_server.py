"""A tool server over stdin and stdout (MCP), with one tool that tells the server's name and its
argument back: `tool_server.py NAME`."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "look_up",
    "description": "Looks a word up",
    "inputSchema": {"type": "object", "properties": {"word": {"type": "string"}}},
}


def result(name: str, method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        about = {"serverInfo": {"name": name, "version": "1"}, "capabilities": {"tools": {}}}
        return {"protocolVersion": params["protocolVersion"], **about}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        text = f"{name} knows {params['arguments']['word']}"
        return {"content": [{"type": "text", "text": text}]}
    return {}


def main() -> None:
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            found = result(sys.argv[1], message["method"], message.get("params", {}))
            answer = {"jsonrpc": "2.0", "id": message["id"], "result": found}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
