"""guard: hosts, origins, keys and CORS, as tables."""

from __future__ import annotations

import pytest

from mlxlite.errors import Forbidden, MlxliteError, Unauthorized
from mlxlite.http import guard
from mlxlite.http.guard import Policy

LOCAL = Policy(bound_host="127.0.0.1")
OPEN = Policy(bound_host="0.0.0.0", allow_hosts=["Box.Lan:8080", "fd00::2"])


@pytest.mark.parametrize(
    ("policy", "host", "local_address", "is_allowed"),
    [
        (LOCAL, "127.0.0.1:8080", "127.0.0.1", True),
        (LOCAL, "localhost", "127.0.0.1", True),
        (LOCAL, "LOCALHOST.:1", "127.0.0.1", True),
        (LOCAL, "127.9.9.9:9", "127.0.0.1", True),
        (LOCAL, "[::1]:8080", "127.0.0.1", True),
        (LOCAL, "[::ffff:127.0.0.1]", "127.0.0.1", True),
        (LOCAL, None, "127.0.0.1", True),  # HTTP/1.0
        (LOCAL, "", "127.0.0.1", False),
        (LOCAL, "a.test:8080", "127.0.0.1", False),  # faults F87
        (LOCAL, "localhost.a.test", "127.0.0.1", False),
        (LOCAL, "127.0.0.1.a.test", "127.0.0.1", False),
        (LOCAL, "0.0.0.0:8080", "127.0.0.1", False),
        (LOCAL, "127.1", "127.0.0.1", False),
        (LOCAL, "192.0.2.7", "127.0.0.1", False),
        (OPEN, "192.0.2.7:8080", "192.0.2.7", True),  # the address it came in by
        (OPEN, "192.0.2.7:8080", "::ffff:192.0.2.7", True),
        (OPEN, "192.0.2.8:8080", "192.0.2.7", False),
        (OPEN, "192.0.2.7", None, False),
        (OPEN, "[fe80::1]:8080", "fe80::1%eth0", True),
        (OPEN, "0.0.0.0:8080", "127.0.0.1", True),  # the bound host itself
        (OPEN, "box.lan", "192.0.2.7", True),
        (OPEN, "BOX.lan:99", "192.0.2.7", True),
        (OPEN, "[fd00::2]:1", "192.0.2.7", True),
        (OPEN, "a.test", "192.0.2.7", False),
        (Policy(bound_host="Host.Lan"), "host.lan:1", "192.0.2.7", True),
    ],
)
def test_hosts(
    policy: Policy, host: str | None, local_address: str | None, is_allowed: bool
) -> None:
    if is_allowed:
        guard.check_host(policy, host, local_address)
    else:
        with pytest.raises(Forbidden):
            guard.check_host(policy, host, local_address)


SITES = Policy(cors_origins=["https://A.test/", "app://b"])
ANY = Policy(cors_origins=["*"])


@pytest.mark.parametrize(
    ("policy", "origin", "is_allowed"),
    [
        (LOCAL, None, True),
        (LOCAL, "http://localhost:3000", True),
        (LOCAL, "http://127.0.0.1:8080", True),
        (LOCAL, "https://[::1]", True),
        (LOCAL, "null", False),
        (LOCAL, "", False),
        (LOCAL, "https://a.test", False),
        (LOCAL, "https://a.test:8080", False),
        (LOCAL, "app://localhost", False),
        (LOCAL, "http://[oops", False),
        (LOCAL, "http://localhost.a.test", False),
        (SITES, "https://a.test", True),
        (SITES, "app://b", True),
        (SITES, "http://a.test", False),
        (SITES, "https://a.test:444", False),
        (SITES, "null", False),
        (ANY, "null", True),
        (ANY, "https://c.test", True),
    ],
)
def test_origins(policy: Policy, origin: str | None, is_allowed: bool) -> None:
    if is_allowed:
        guard.check_origin(policy, origin, "127.0.0.1")
    else:
        with pytest.raises(Forbidden):
            guard.check_origin(policy, origin, "127.0.0.1")


KEYED = Policy(api_key="clé", open_paths=["/health", "/files/*"])
SENT = "clé".encode().decode("latin-1")  # as wire decodes it


@pytest.mark.parametrize(
    ("method", "path", "headers", "is_allowed"),
    [
        ("GET", "/v1", {"authorization": f"Bearer {SENT}"}, True),
        ("GET", "/v1", {"authorization": f"bearer  {SENT} "}, True),
        ("GET", "/v1", {"x-api-key": SENT}, True),
        ("GET", "/v1", {"x-api-key": SENT, "authorization": "Bearer other"}, True),
        ("GET", "/v1", {}, False),
        ("GET", "/v1", {"authorization": "Bearer"}, False),
        ("GET", "/v1", {"authorization": SENT}, False),
        ("GET", "/v1", {"authorization": f"Basic {SENT}"}, False),
        ("GET", "/v1", {"authorization": f"Bearer {SENT}x"}, False),
        ("GET", "/v1", {"x-api-key": ""}, False),
        ("GET", "/health", {}, True),
        ("GET", "/health/x", {}, False),
        ("GET", "/files/x", {}, True),
        ("GET", "/files/x/y", {}, True),
        ("GET", "/files", {}, False),
        ("GET", "/filesx", {}, False),
        ("OPTIONS", "/v1", {}, True),  # faults F82
    ],
)
def test_keys(method: str, path: str, headers: dict[str, str], is_allowed: bool) -> None:
    if is_allowed:
        guard.check_key(KEYED, method, path, headers)
    else:
        with pytest.raises(Unauthorized):
            guard.check_key(KEYED, method, path, headers)
    guard.check_key(LOCAL, method, path, headers)


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_a_mistake(key: str) -> None:
    with pytest.raises(MlxliteError, match="empty"):
        Policy(api_key=key)


def test_cors_fields() -> None:
    assert guard.cors_fields(LOCAL, "http://localhost:1") == []  # faults F86
    assert guard.cors_fields(SITES, None) == [("vary", "origin")]
    assert guard.cors_fields(SITES, "https://b.test") == [("vary", "origin")]
    allowed = dict(guard.cors_fields(SITES, "https://a.test"))
    assert allowed["access-control-allow-origin"] == "https://a.test"
    assert allowed["vary"] == "origin"
    assert dict(guard.cors_fields(ANY, "null"))["access-control-allow-origin"] == "*"
    exposed = "request-id, x-request-id, retry-after"  # what our answers hold and scripts need
    for policy in (SITES, ANY):
        fields = dict(guard.cors_fields(policy, "https://a.test"))
        assert fields["access-control-expose-headers"] == exposed
    names = {name for policy in (SITES, ANY) for name, _ in guard.cors_fields(policy, "app://b")}
    assert "access-control-allow-credentials" not in names


def test_preflights() -> None:
    asked = {"origin": "https://a.test", "access-control-request-method": "POST"}
    assert guard.is_preflight("OPTIONS", asked)
    assert not guard.is_preflight("POST", asked)
    assert not guard.is_preflight("OPTIONS", {"origin": "https://a.test"})
    fields = dict(guard.preflight_fields(SITES, asked, "localhost", ("POST", "OPTIONS")))
    assert fields == {
        "access-control-allow-methods": "POST, OPTIONS",
        "access-control-max-age": "600",
    }
    wanted = asked | {"access-control-request-headers": "authorization, x-b"}
    fields = dict(guard.preflight_fields(ANY, wanted, "localhost", ("POST",)))
    assert fields["access-control-allow-headers"] == "authorization, x-b"
    for policy in (LOCAL, Policy(cors_origins=["https://b.test"])):
        with pytest.raises(Forbidden):
            guard.preflight_fields(policy, asked, "localhost", ("POST",))
    own = asked | {"origin": "http://localhost:8080"}
    assert guard.preflight_fields(LOCAL, own, "localhost:8080", ("POST",))
    with pytest.raises(Forbidden):
        guard.preflight_fields(LOCAL, own, "localhost:8081", ("POST",))
