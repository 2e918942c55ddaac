"""Who is served: hosts, origins and keys as pure functions (decision D13).

A server on loopback is reachable by every page in the user's browser. Three checks keep them out,
in this order, all before the body is read:

    host    a page whose name was rebound to 127.0.0.1 sends its own name in Host  -> 403
    origin  a page of another site sends its Origin                               -> 403
    key     if one is configured, all but open paths and OPTIONS need it          -> 401

and one opens the door again: `cors_origins`. Without it no CORS field is ever sent. Programs send
no Origin and pass; Node sends `sec-fetch-mode: cors` without one, so that field means nothing.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from mlxlite.errors import Forbidden, MlxliteError, Unauthorized

PREFLIGHT_MAX_AGE_S = 600


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator allows.

    bound_host: the host given to bind. allow_hosts: further names that Host may hold.
    cors_origins: origins such as `https://a.test`, or `*`. api_key: None means no key is needed; an
    empty one is refused, it is a forgotten variable. open_paths: served without the key;
    one that ends in `/*` stands for all below it.
    """

    bound_host: str = "127.0.0.1"
    allow_hosts: Collection[str] = ()
    cors_origins: Collection[str] = ()
    api_key: str | None = None
    open_paths: Collection[str] = ()

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise MlxliteError("the API key is empty: give one, or none at all")
        names = frozenset(host_name(host) for host in (self.bound_host, *self.allow_hosts))
        origins = frozenset(origin.lower().rstrip("/") for origin in self.cors_origins)
        object.__setattr__(self, "allow_hosts", names)
        object.__setattr__(self, "cors_origins", origins)
        object.__setattr__(self, "open_paths", frozenset(self.open_paths))


def host_name(authority: str) -> str:
    """The host of `host:port` in lower case, without brackets and the root's dot."""
    if authority.startswith("["):
        name = authority[1:].partition("]")[0]
    elif authority.count(":") == 1:
        name = authority.partition(":")[0]
    else:
        name = authority  # no port, or an IPv6 address without brackets
    return name.lower().rstrip(".")


def _address(name: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(name.partition("%")[0])  # without the zone of fe80::1%eth0
    except ValueError:
        return None
    # A dual-stack socket shows IPv4 peers as ::ffff:192.0.2.1.
    return getattr(address, "ipv4_mapped", None) or address


def is_host_allowed(policy: Policy, host: str, local_address: str | None) -> bool:
    """Loopback, the bound host, added names, and the literal address this connection came in by.

    The last one lets `--host 0.0.0.0` be reached by address: a page cannot be rebound to a host
    that is itself an address.
    """
    name = host_name(host)
    if name == "localhost" or name in policy.allow_hosts:
        return True
    address = _address(name)
    if address is None:
        return False
    return address.is_loopback or (local_address is not None and address == _address(local_address))


def check_host(policy: Policy, host: str | None, local_address: str | None) -> None:
    """Raise Forbidden for a Host that is not ours. None (HTTP/1.0, so no browser) passes."""
    if host is not None and not is_host_allowed(policy, host, local_address):
        name = host_name(host)
        raise Forbidden(f"host {name!r} is not served here; start with --allow-host to add it")


def check_origin(policy: Policy, origin: str | None, local_address: str | None) -> None:
    """Raise Forbidden for a request that a page of another site sends."""
    if origin is None or _is_cors_origin(policy, origin):
        return
    try:
        parts = urlsplit(origin)
    except ValueError:
        parts = urlsplit("")
    is_web = parts.scheme in ("http", "https") and parts.netloc != ""  # `null` is not
    if not is_web or not is_host_allowed(policy, parts.netloc, local_address):
        raise Forbidden(f"origin {origin!r} is not allowed; start with --cors-origin to add it")


def check_key(policy: Policy, method: str, path: str, headers: Mapping[str, str]) -> None:
    """Raise Unauthorized without the key, in `Authorization: Bearer` or in `x-api-key`.

    OPTIONS needs none: a browser sends no key in a preflight (faults F82), and the answer tells no
    more than the documentation does.
    """
    if policy.api_key is None or method == "OPTIONS" or _is_open(policy, path):
        return
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", ""), token.strip() if scheme.lower() == "bearer" else ""]
    # Compared as bytes (fields are latin-1 here, a key is UTF-8) and in constant time, both always.
    expected = policy.api_key.encode()
    matches = [hmac.compare_digest(key.encode("latin-1"), expected) for key in given]
    if not any(matches):
        raise Unauthorized("missing or wrong API key; send it as Authorization: Bearer <key>")


def _is_open(policy: Policy, path: str) -> bool:
    above = path
    while "/" in above:  # `/a/b` is below `/a/*` and `/*`
        above = above.rpartition("/")[0]
        if f"{above}/*" in policy.open_paths:
            return True
    return path in policy.open_paths


# ---------------------------------------------------------------------------------------- CORS


def _is_cors_origin(policy: Policy, origin: str) -> bool:
    return "*" in policy.cors_origins or origin.lower() in policy.cors_origins


def cors_fields(policy: Policy, origin: str | None) -> list[tuple[str, str]]:
    """The CORS fields of any answer; none at all unless origins are configured (faults F86)."""
    if not policy.cors_origins:
        return []
    expose = ("access-control-expose-headers", "request-id, x-request-id, retry-after")
    if "*" in policy.cors_origins:
        return [("access-control-allow-origin", "*"), expose]
    fields = [("vary", "origin")]  # the answer differs by origin, so caches must know
    if origin is not None and _is_cors_origin(policy, origin):
        fields += [("access-control-allow-origin", origin), expose]
    return fields


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    return (
        method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers
    )


def preflight_fields(
    policy: Policy, headers: Mapping[str, str], host: str | None, methods: Collection[str]
) -> list[tuple[str, str]]:
    """The fields that answer a preflight, besides `cors_fields`; Forbidden for other origins.

    A page of this very server needs no configuration.
    """
    origin = headers["origin"]
    is_own = host is not None and origin.lower().partition("://")[2] == host.lower()
    if not is_own and not _is_cors_origin(policy, origin):
        raise Forbidden(f"origin {origin!r} is not allowed; start with --cors-origin to add it")
    # Headers are echoed: `*` would not cover Authorization (Fetch standard, CORS protocol).
    wanted = headers.get("access-control-request-headers", "")
    fields = [
        ("access-control-allow-methods", ", ".join(methods)),
        ("access-control-max-age", str(PREFLIGHT_MAX_AGE_S)),
    ]
    return fields + ([("access-control-allow-headers", wanted)] if wanted else [])
