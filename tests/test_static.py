"""static: the table of spec 70 section 11, conditional and compressed answers, containment."""

from __future__ import annotations

import gzip
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxlite import app, service
from mlxlite.http import static
from mlxlite.http.routing import Request, Response
from mlxlite.http.static import POLICY, Asset, has_it, takes_gzip
from mlxlite.http.wire import Headers
from tests.live import ROOT, LiveApp, Reply, connect, read_until

JS = "text/javascript; charset=utf-8"
HOUR = "public, max-age=3600"
LONG = "let a = 1;\n" * 100
FILES = {
    "index.html": '<!doctype html><script src="/assets/app.js?{{version}}"></script>' * 9,
    "app.js": LONG,
    "tiny.js": "1;",
    "app.css": ":root { color: red }" * 40,
    "icon.svg": "<svg/>",
    "manifest.webmanifest": "{}",
    "sw.js": 'const version = "{{version}}";',
    "curves.html": "<p>curves",
    "notes.txt": "not for the public",
}


def make_folder(path: Path) -> Path:
    web = path / "web"
    web.mkdir()
    for name, text in FILES.items():
        (web / name).write_text(text)
    (path / "secret.js").write_text("secret")
    (web / "link.js").symlink_to(path / "secret.js")
    (web / "deeper.js").mkdir()
    return web


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[LiveApp]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "WEB", make_folder(tmp_path_factory.mktemp("site")))
        running = LiveApp(tiny_folder, api_key="secret")
    with running:
        yield running


# --------------------------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("path", "content_type", "cache"),
    [
        ("/", "text/html; charset=utf-8", None),
        ("/assets/app.js", JS, HOUR),
        ("/assets/v-0123456789ab/app.js", JS, HOUR),
        ("/assets/app.css", "text/css; charset=utf-8", HOUR),
        ("/assets/hljs.css", "text/css; charset=utf-8", HOUR),
        ("/assets/icon.svg", "image/svg+xml; charset=utf-8", HOUR),
        ("/manifest.webmanifest", "application/manifest+json; charset=utf-8", HOUR),
        ("/sw.js", JS, "no-store"),
        ("/curves", "text/html", "no-store"),
        ("/curves/?a=b", "text/html", "no-store"),
    ],
)
def test_the_table(server: LiveApp, path: str, content_type: str, cache: str | None) -> None:
    """Without a key, though the server has one."""
    for method in ("GET", "HEAD"):
        reply = server.ask(method, path)
        assert reply.status == 200
        assert reply.headers["content-type"] == content_type
        assert reply.headers.get("cache-control") == cache
        assert {name: reply.headers[name] for name in POLICY} == POLICY
        assert "content-encoding" not in reply.headers
        if method == "GET":
            length = reply.headers["content-length"]
            assert len(reply.body) == int(length) > 0
        else:
            assert reply.body == b"" and reply.headers["content-length"] == length
    refused = server.ask("POST", path, {})
    assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD, OPTIONS")


@pytest.mark.parametrize("view", ["status", "chat", "models", "sessions"])
def test_views_moved(server: LiveApp, view: str) -> None:
    reply = server.ask("GET", f"/{view}")
    assert (reply.status, reply.headers["location"]) == (302, f"/#/{view}")


@pytest.mark.parametrize("page", ["/dag", "/curve-terrain"])
def test_a_missing_artefact(server: LiveApp, page: str) -> None:
    reply = server.ask("GET", page)
    assert reply.status == 404
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    assert reply.body.decode() == f"{page[1:]}.html is not part of this installation\n"


def test_an_artefact_is_read_each_time(
    folder: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "WEB", folder)
    with LiveApp(tiny_folder) as server:
        assert server.ask("GET", "/curves").body == b"<p>curves"
        (folder / "curves.html").write_text("<p>edited")
        assert server.ask("GET", "/curves").body == b"<p>edited"
        (folder / "curves.html").write_text("<p>long" * 99)
        packed = ask(server, "/curves", accept_encoding="gzip")
        assert gzip.decompress(packed.body) == b"<p>long" * 99
        etag = packed.headers["etag"]
        assert ask(server, "/curves", accept_encoding="gzip", if_none_match=etag).status == 304
        (folder / "dag.html").write_text("<p>new")
        assert server.ask("GET", "/dag").body == b"<p>new"
        (folder / "curves.html").unlink()
        assert server.ask("GET", "/curves").body == b"<p>curves"


def test_parts_of_pages(folder: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put in at the start and with each edit; one that is missing leaves the page as it was."""
    (folder / "top.html").write_text('<a href="/dag"><a href="/curves">{{version}}\n')
    (folder / "curves.html").write_text("{{top.html}}\n<p>curves")
    monkeypatch.setattr(service, "WEB", folder)
    with LiveApp(tiny_folder) as server:
        first = server.ask("GET", "/curves").body
        wanted = rb'<a href="/dag"><a href="/curves" aria-current="page">[0-9a-f]{12}\n<p>curves'
        assert re.fullmatch(wanted, first)
        (folder / "top.html").write_text("<b>\n")
        assert server.ask("GET", "/curves").body == b"<b>\n<p>curves"
        (folder / "top.html").unlink()
        assert server.ask("GET", "/curves").body == first
        assert server.ask("GET", "/assets/top.html").status == 404


def test_the_rest_needs_the_key(server: LiveApp) -> None:
    for path in ("/v1/models", "/stats", "/api/sessions", "/api/requests", "/assetsx", "/x"):
        assert server.ask("GET", path).status == 401, path
    assert server.ask("POST", "/api/render", {"text": "a"}).status == 401
    assert not any(path.startswith(("/api", "/v1")) for path in app.OPEN_PATHS)


# ------------------------------------------------------------------------------- containment


@pytest.mark.parametrize(
    "path",
    [
        "/assets/",
        "/assets/nope.js",
        "/assets/notes.txt",
        "/assets/link.js",
        "/assets/deeper.js",
        "/assets/sw.js",
        "/assets/index.html",
        "/assets/curves.html",
        "/assets/APP.JS",
        "/assets/../app.py",
        "/assets/%2e%2e/app.py",
        "/assets/..%2fapp.py",
        "/assets/..%5capp.py",
        "/assets/..\\app.py",
        "/assets/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/assets//etc/passwd",
        "/assets/%2fetc%2fpasswd",
        "/assets/file:///etc/passwd",
        "/assets/./app.js",
        "/assets/.%2fapp.js",
        "/assets/x/../app.js",
        "/assets/app.js%2f..%2fsw.js",
        "/assets/app.js.",
        "/assets/app.js::$DATA",
        "/assets/%252e%252e%252fapp.py",
        "/assets/%ef%bc%8e%ef%bc%8e/app.py",
    ],
)
def test_nothing_else_is_an_asset(server: LiveApp, path: str) -> None:
    assert raw(server, path) == (404 if path != "/assets/" else 401), path


@pytest.mark.parametrize("path", ["/assets/app.js%00", "/assets/%00", "/assets/%ff", "/a%zz"])
def test_paths_that_are_none(server: LiveApp, path: str) -> None:
    assert raw(server, path) == 400


def raw(server: LiveApp, path: str) -> int:
    """The status of a GET whose path no client library has tidied up."""
    with connect(server.address) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return int(read_until(sock, b"\r\n\r\n").split()[1])


# ------------------------------------------------------------------ conditions and coding


def test_it_is_not_sent_twice(server: LiveApp) -> None:
    first = server.ask("GET", "/assets/app.js")
    assert first.body.decode() == LONG
    etag = first.headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{20}"', etag), "strong"
    for given in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        reply = ask(server, "/assets/app.js", if_none_match=given)
        assert (reply.status, reply.body) == (304, b"")
        assert reply.headers["etag"] == etag and reply.headers["cache-control"] == HOUR
        assert reply.headers["vary"] == "accept-encoding"
        assert "content-length" not in reply.headers
    assert ask(server, "/assets/app.js", if_none_match='"other"').status == 200


def test_gzip(server: LiveApp) -> None:
    plain = server.ask("GET", "/assets/app.js")
    packed = ask(server, "/assets/app.js", accept_encoding="br, gzip")
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body and len(packed.body) < len(plain.body) / 4
    assert int(packed.headers["content-length"]) == len(packed.body)
    assert packed.headers["etag"] != plain.headers["etag"], "another representation"
    assert packed.headers["vary"] == plain.headers["vary"] == "accept-encoding"
    etag = packed.headers["etag"]
    again = ask(server, "/assets/app.js", accept_encoding="gzip", if_none_match=etag)
    assert again.status == 304 and again.headers["etag"] == etag
    assert ask(server, "/assets/app.js", if_none_match=etag).status == 200
    small = ask(server, "/assets/tiny.js", accept_encoding="gzip")
    assert small.body == b"1;" and "vary" not in small.headers


def ask(server: LiveApp, path: str, **fields: str) -> Reply:
    return server.ask("GET", path, headers={k.replace("_", "-"): v for k, v in fields.items()})


@pytest.mark.parametrize(
    ("accepted", "is_taken"),
    [
        ("gzip", True),
        ("GZIP", True),
        ("br;q=1.0, gzip;q=0.8, *;q=0.1", True),
        ("*", True),
        ("gzip; q=0.001", True),
        ("", False),
        ("identity", False),
        ("br", False),
        ("gzip;q=0", False),
        ("gzip;q=0, *", False),
        ("*;q=0", False),
        ("gzip;q=x", False),
        ("xgzip", False),
    ],
)
def test_accept_encoding(accepted: str, is_taken: bool) -> None:
    assert takes_gzip(accepted) is is_taken


@pytest.mark.parametrize(
    ("given", "is_known"),
    [('"a"', True), ('W/"a"', True), ('"b" , "a"', True), ("*", True), ("a", False),
     ('"A"', False), ("", False), ('"b"', False)],
)  # fmt: skip
def test_if_none_match(given: str, is_known: bool) -> None:
    assert has_it(given, '"a"') is is_known


# ----------------------------------------------------------------------------------- the files


def test_the_version_follows_every_file(folder: Path) -> None:
    def version() -> str:
        pages = static.load(folder).pages
        found = re.fullmatch(b'const version = "([0-9a-f]{12})";', pages["sw.js"].body)
        assert found and found[1] in pages["index.html"].body
        return found[1].decode()

    seen = {version(), version()}
    assert len(seen) == 1
    for name in ("app.css", "tiny.js", "index.html"):
        (folder / name).write_text("changed")
        if name == "index.html":
            break
        seen.add(version())
    assert len(seen) == 3
    (folder / "app.css").write_text(FILES["app.css"])
    assert b"{{version}}" not in static.load(folder).pages["sw.js"].body
    script = '"{{version}}"'
    (folder / "app.js").write_text(script)
    assert static.load(folder).assets["app.js"].body == script.encode(), "not replaced here"


def test_no_folder(tmp_path: Path) -> None:
    site = static.load(tmp_path / "none", {"a.css": "b"})
    assert list(site.assets) == ["a.css"] and not site.pages


def test_an_asset_that_does_not_shrink() -> None:
    noise = os.urandom(300)
    asset = Asset.of(noise, "image/png")
    reply = respond(asset, {"accept-encoding": "gzip"})
    assert asset.packed is None and reply.body == noise


def respond(asset: Asset, fields: dict[str, str]) -> Response:
    return asset.respond(Request("GET", "/", headers=Headers(fields)))


def test_our_own_page_keeps_to_its_policy() -> None:
    """No inline script, style or handler, nothing from elsewhere; all of it is packaged."""
    for path in service.WEB.glob("*.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<script(?![^>]*\bsrc=)", text), path.name
        assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", text), path.name
        for link in re.findall(r'\b(?:src|href)="([^"]*)"', text):
            assert not re.match(r"https?:|//", link) or "<a " in text, path.name
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    (pattern,) = globs["package-data"]["mlxlite"]
    packaged = set((ROOT / "mlxlite").glob(pattern))
    assert packaged >= {p for p in service.WEB.iterdir() if p.suffix in static.TYPES}
    for path in service.WEB.iterdir():
        assert path.suffix in static.TYPES, f"{path.name} would never be served"


def test_the_live_page(tiny_server: LiveApp) -> None:
    reply = ask(tiny_server, "/", accept_encoding="identity")
    assert reply.status == 200 and b"<title>" in reply.body
