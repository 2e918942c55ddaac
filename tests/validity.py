"""Whether an answer is what a schema asked for: `jsonschema`, and formats and patterns as they are
meant (RFC 3339, ECMA-262), which it leaves to packages or to Python."""

from __future__ import annotations

import functools
import ipaddress
import json
import re
import uuid
from collections.abc import Iterator
from datetime import date, datetime, time
from typing import Any

import jsonschema
from jsonschema.protocols import Validator

_OFFSET = r"(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_CLOCK = r"\d\d:\d\d:\d\d(\.\d+)?"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"


def _matches(pattern: str, text: str) -> None:
    if not re.fullmatch(pattern, text, re.ASCII):
        raise ValueError(text)


def _date(text: str) -> None:
    _matches(r"\d{4}-\d\d-\d\d", text)
    date.fromisoformat(text)


def _time(text: str) -> None:
    _matches(_CLOCK + _OFFSET, text)
    time.fromisoformat(text)


def _date_time(text: str) -> None:
    _matches(rf"\d{{4}}-\d\d-\d\dT{_CLOCK}{_OFFSET}", text)
    datetime.fromisoformat(text)


def _email(text: str) -> None:
    local, _, domain = text.rpartition("@")
    _matches(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~.-]+", local)
    if not domain.startswith("["):
        _matches(rf"{_LABEL}(\.{_LABEL})*", domain)


def _uuid(text: str) -> None:
    _matches(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text)
    uuid.UUID(text)


_FORMATS = {
    "date": _date,
    "time": _time,
    "date-time": _date_time,
    "duration": functools.partial(
        _matches, r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)"
    ),
    "email": _email,
    "hostname": functools.partial(_matches, rf"{_LABEL}(\.{_LABEL})*"),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": _uuid,
    "uri": functools.partial(
        _matches,
        r"[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*",
    ),
}

CHECKS = jsonschema.FormatChecker(formats=())
for _name, _check in _FORMATS.items():

    def _holds(value: object, check: Any = _check) -> bool:
        if isinstance(value, str):
            check(value)
        return True

    CHECKS.checks(_name, raises=ValueError)(_holds)


def _pattern(
    validator: Any, pattern: str, value: object, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    """`\\w` and `\\d` are ASCII in ECMA-262, unlike in Python; spaces are Unicode's in both."""
    flags = 0 if "\\s" in pattern.lower() else re.ASCII
    if isinstance(value, str) and not re.search(pattern, value, flags):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


@functools.cache
def _extended(draft: type[Validator]) -> type[Validator]:
    made: type[Validator] = jsonschema.validators.extend(draft, {"pattern": _pattern})
    return made


def validator(schema: Any, draft: type[Validator] | None = None) -> Validator:
    """draft: of a schema that names none; else the newest."""
    newest = draft or jsonschema.Draft202012Validator
    found = jsonschema.validators.validator_for(schema, default=newest)
    return _extended(found)(schema, format_checker=CHECKS)


def validate(text: str, schema: Any, draft: type[Validator] | None = None) -> None:
    """Raises ValidationError for an answer that its schema does not allow."""
    validator(schema, draft).validate(json.loads(text))
