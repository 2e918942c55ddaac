"""A model hub on loopback: what `huggingface_hub` asks for, and no more.

Repositories are dictionaries of file contents. `hold_after` stops large answers after so many bytes
until the test lets them go on; `ranges` tells what was asked for; `tokens` which keys came with it.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

WAIT_S = 20.0
LFS_BYTES = 1000  # files from this size on are what the hub keeps as large ones


class HubStub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.hold_after: int | None = None
        self.is_held = threading.Event()  # an answer has stopped
        self.go_on = threading.Event()
        self.corrupt = False
        self.refused: set[str] = set()  # repositories that want a token
        self.ranges: list[tuple[str, str | None]] = []
        self.tokens: list[str] = []
        self.searches: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environment(self) -> dict[str, str]:
        """What makes the hub's client ask here."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def commit(self, repository: str) -> str:
        files = self.repositories[repository]
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()

    def close(self) -> None:
        self.go_on.set()
        self.shutdown()
        self.server_close()


def sibling(name: str, content: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    row: dict[str, Any] = {"rfilename": name, "path": name, "size": len(content)}
    row |= {"blobId": blob, "oid": blob, "type": "file"}
    if len(content) >= LFS_BYTES:
        sha256 = hashlib.sha256(content).hexdigest()
        row["lfs"] = {"sha256": sha256, "oid": sha256, "size": len(content), "pointerSize": 120}
    return row


class _Answer(BaseHTTPRequestHandler):
    server: HubStub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, is_head: bool) -> None:
        hub, parts = self.server, urlsplit(self.path)
        token = self.headers.get("authorization", "")
        hub.tokens.append(token)
        path = unquote(parts.path)
        if path == "/api/models":
            query = parse_qs(parts.query).get("search", [""])[0]
            hub.searches.append(query)
            return self._json([self._found(n) for n in hub.repositories if query.lower() in n])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            return self._repository(match[1], token)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+/?", path):
            files = hub.repositories[match[1]]
            return self._json([sibling(name, content) for name, content in files.items()])
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self._file(match[1], match[2], is_head)
        return self._json({"error": "not found"}, 404)

    def _found(self, name: str) -> dict[str, Any]:
        files = self.server.repositories[name]
        return {
            "id": name,
            "_id": name,
            "downloads": 7,
            "likes": 3,
            "gated": name in self.server.refused,
            "lastModified": "2026-01-02T03:04:05.000Z",
            "tags": ["license:mit", "safetensors"],
            "pipeline_tag": "text-generation",
            "safetensors": {"parameters": {"BF16": 1000}, "total": 1000},
            "siblings": [{"rfilename": file} for file in files],
        }

    def _repository(self, name: str, token: str) -> None:
        hub = self.server
        if name not in hub.repositories:
            return self._json(
                {"error": "Repository not found"}, 404, {"x-error-code": "RepoNotFound"}
            )
        if name in hub.refused and not token:
            return self._json({"error": "gated"}, 401, {"x-error-code": "GatedRepo"})
        files = [sibling(file, content) for file, content in hub.repositories[name].items()]
        self._json({"id": name, "sha": hub.commit(name), "siblings": files, "tags": []})

    def _file(self, repository: str, name: str, is_head: bool) -> None:
        hub = self.server
        content = hub.repositories[repository].get(name)
        if content is None:
            return self._json({"error": "no entry"}, 404, {"x-error-code": "EntryNotFound"})
        row = sibling(name, content)
        etag = row["lfs"]["sha256"] if "lfs" in row else row["blobId"]
        if hub.corrupt and "lfs" in row and not is_head:
            content = content[:-1] + bytes([content[-1] ^ 1])
        wanted = self.headers.get("range")
        start = 0
        if not is_head:
            hub.ranges.append((name, wanted))
            if wanted:
                start = int(wanted.removeprefix("bytes=").split("-")[0])
        fields = {"etag": f'"{etag}"', "x-repo-commit": hub.commit(repository)}
        fields |= {"x-linked-etag": f'"{etag}"', "x-linked-size": str(len(content))}
        if wanted:
            fields["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._head(206 if wanted else 200, len(content) - start, fields)
        if is_head:
            return
        if hub.hold_after is None or "lfs" not in row or hub.go_on.is_set():
            self.wfile.write(content[start:])
            return
        self.wfile.write(content[start : start + hub.hold_after])
        self.wfile.flush()
        hub.is_held.set()
        if hub.go_on.wait(WAIT_S):
            try:
                self.wfile.write(content[start + hub.hold_after :])
            except OSError:
                pass  # the client was killed meanwhile, as the test wants it

    def _json(self, value: Any, status: int = 200, fields: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self._head(status, len(body), {"content-type": "application/json", **(fields or {})})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _head(self, status: int, length: int, fields: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(length), **fields}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def model_files(folder: Any, more: bytes = b"") -> dict[str, bytes]:
    """The files of a model folder, as a repository has them."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
    return {name: (folder / name).read_bytes() for name in names} | (
        {"README.md": more} if more else {}
    )
