"""Files of the web page, held in memory: ETag, 304, gzip, a strict policy (spec 70 section 11).

`load` reads a folder once; what it took is all that can ever be served, by its exact name, so no
path of a request reaches the file system. Each file is compressed once, and has a strong ETag of
its content for either form (RFC 9110 section 8.8.3.3: a coding makes another representation).

    /assets/app.js -> assets["app.js"].respond(request) -> 200 | 304

In pages and in `sw.js` the text `{{version}}` becomes a hash of everything in the folder, so
that a worker that caches changes whenever anything does. `{{part.html}}` in a page becomes that
file, which other pages have, too; a link to the page itself is marked as such.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxlite.http.routing import Request, Response

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml; charset=utf-8",
    ".png": "image/png",
    ".webmanifest": "application/manifest+json; charset=utf-8",
}
AN_HOUR = "public, max-age=3600"
NEVER = "no-store"
# Scripts and styles are files of ours, never text inside a page: what a model writes cannot run,
# whatever becomes of it. `data:` and `blob:` are for images that the page makes itself.
POLICY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "connect-src 'self'; manifest-src 'self'; worker-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
VERSION = b"{{version}}"
_PART = re.compile(rb"\{\{([a-z-]+\.html)\}\}\n?")
_FEWEST_BYTES = 256  # a smaller file gains nothing from gzip


@dataclass(frozen=True, slots=True)
class Asset:
    """One file. cache: its Cache-Control, or None for no such field."""

    body: bytes
    content_type: str
    cache: str | None
    etag: str
    packed: bytes | None  # gzip's, if it is smaller

    @classmethod
    def of(cls, body: bytes, content_type: str, cache: str | None = None) -> Asset:
        packed = gzip.compress(body, mtime=0) if len(body) >= _FEWEST_BYTES else body
        return cls(
            body=body,
            content_type=content_type,
            cache=cache,
            etag=hashlib.sha256(body).hexdigest()[:20],
            packed=packed if len(packed) < len(body) else None,
        )

    def respond(self, request: Request) -> Response:
        """200, or 304 if the client has it. HEAD is the server's to shorten."""
        body, etag = self.body, f'"{self.etag}"'
        fields = {"content-type": self.content_type, **POLICY}
        if self.cache is not None:
            fields["cache-control"] = self.cache
        if self.packed is not None:
            fields["vary"] = "accept-encoding"
            if takes_gzip(request.headers.get("accept-encoding", "")):
                body, etag = self.packed, f'"{self.etag}-gzip"'
                fields["content-encoding"] = "gzip"
        fields["etag"] = etag
        if has_it(request.headers.get("if-none-match", ""), etag):
            fields.pop("content-encoding", None)  # it describes a body, and there is none
            return Response(304, b"", fields)
        return Response(200, body, fields)


@dataclass(frozen=True, slots=True)
class Site:
    """What `load` took. assets: by name, as `/assets/<name>` has it. pages: HTML, by name, and
    what is not served below `/assets`. folder: where pages are read anew. version: of all of it."""

    folder: Path
    assets: Mapping[str, Asset]
    pages: Mapping[str, Asset]
    version: bytes


def load(folder: Path, made: Mapping[str, str] | None = None) -> Site:
    """Read every file of a kind in TYPES. made: further assets, name -> text.

    Links that leave the folder are not followed. A folder that is not there is an empty site.
    """
    found: dict[str, bytes] = {name: text.encode() for name, text in (made or {}).items()}
    for path in sorted(folder.glob("*")):
        inside = path.resolve().is_relative_to(folder.resolve())
        if path.suffix in TYPES and path.is_file() and inside:
            found[path.name] = path.read_bytes()
    whole = hashlib.sha256()
    for name in sorted(found):
        whole.update(name.encode() + b"\0" + hashlib.sha256(found[name]).digest())
    version = whole.hexdigest()[:12].encode()
    assets: dict[str, Asset] = {}
    pages: dict[str, Asset] = {}
    for name, body in found.items():
        kind = TYPES[Path(name).suffix]
        if name.endswith(".html"):
            body = filled(name, body, lambda part: found.get(part, b""), version)
        if name == "sw.js":
            body = body.replace(VERSION, version)
        if name == "sw.js":  # below /assets it would serve nothing but /assets
            pages[name] = Asset.of(body, kind, NEVER)
        elif name.endswith(".html"):
            pages[name] = Asset.of(body, kind)
        else:
            assets[name] = Asset.of(body, kind, AN_HOUR)
    return Site(folder, assets, pages, version)


def filled(name: str, body: bytes, read: Callable[[str], bytes], version: bytes) -> bytes:
    """A page with its parts and the version in it. read: gives a part; what it raises is raised."""
    body = _PART.sub(lambda found: read(found[1].decode()), body)
    itself = f'href="/{Path(name).stem}"'.encode()
    return body.replace(itself, itself + b' aria-current="page"').replace(VERSION, version)


def takes_gzip(accepted: str) -> bool:
    """Whether Accept-Encoding allows gzip (RFC 9110 section 12.5.3); no field asks for none."""
    shares: dict[str, float] = {}
    for part in accepted.lower().split(","):
        coding, *parameters = (piece.strip() for piece in part.split(";"))
        share = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip() == "q":
                try:
                    share = float(value)
                except ValueError:
                    share = 0.0
        shares[coding] = share
    return shares.get("gzip", shares.get("*", 0.0)) > 0


def has_it(given: str, etag: str) -> bool:
    """Whether If-None-Match names this representation, compared weakly (RFC 9110 13.1.2)."""
    tags = [tag.strip().removeprefix("W/") for tag in given.split(",")]
    return etag in tags or given.strip() == "*"
