"""The form that an answer must have, read out of a body (floor 2; spec 40 section 1, decision D7).

Six fields ask for one, and all surfaces share them: OpenAI's `response_format`, vLLM's `guided_*`
and `structured_outputs`. Only one is applied, by the order of `READERS`; wrong types are a 400 in
each of them, an empty string or list asks for nothing. What is inside a schema, an expression or a
grammar is the compiler's to judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxlite import fields
from mlxlite.errors import BadRequest
from mlxlite.fields import Field
from mlxlite.types import JSON, Constraint

TYPE = Field("type", str, "of the format", choices=("text", "json_object", "json_schema"))
JSON_SCHEMA = Field("json_schema", dict, "name, description, schema, strict, any_whitespace")
SCHEMA = Field("schema", dict, "the JSON schema", "refused")
NAME = Field("name", str, "of the schema", "none")
DESCRIPTION = Field("description", str, "of the schema", "none")
STRICT = Field("strict", bool, "true: kept or refused; false: objects stay open", "neither")
ANY_WHITESPACE = Field("any_whitespace", bool, "free blanks between JSON's tokens", "false")

# What vLLM's nested form may hold: one of the first, and options that say how.
_NESTED = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_NESTED_OPTIONS = (
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
    "whitespace_pattern",
)


def take_constraint(body: Mapping[str, JSON]) -> Constraint | None:
    """The form that a body asks for. Raises BadRequest naming the field."""
    found = [read(body) for read in READERS]
    return next((constraint for constraint in found if constraint is not None), None)


def _grammar(body: Mapping[str, JSON]) -> Constraint | None:
    return _guided("grammar", fields.take(body, fields.GUIDED_GRAMMAR), "guided_grammar")


def _regex(body: Mapping[str, JSON]) -> Constraint | None:
    return _guided("regex", fields.take(body, fields.GUIDED_REGEX), "guided_regex")


def _choice(body: Mapping[str, JSON]) -> Constraint | None:
    return _choices(fields.take(body, fields.GUIDED_CHOICE), "guided_choice")


def _json(body: Mapping[str, JSON]) -> Constraint | None:
    schema = fields.take(body, fields.GUIDED_JSON)
    if schema is None or schema == "":
        return None
    return Constraint("json", schema, "guided_json", "guided_json")


def _guided(kind: str, value: str | None, field: str) -> Constraint | None:
    return Constraint(kind, value, field, field) if value else None


def _choices(values: list[JSON] | None, field: str) -> Constraint | None:
    for n, value in enumerate(values or []):
        if not isinstance(value, str):
            raise BadRequest(f"{field}[{n}] must be of type string", param=f"{field}[{n}]")
    return Constraint("choice", tuple(values), field, field) if values else None


def _format(body: Mapping[str, JSON]) -> Constraint | None:
    wanted = fields.take(body, fields.RESPONSE_FORMAT)
    if wanted is None:
        return None
    kind = fields.take(wanted, TYPE, "response_format.")
    if kind is None:
        raise BadRequest("response_format.type is missing", param="response_format.type")
    if kind == "text":
        return None
    at = "response_format."
    given: Mapping[str, JSON] = wanted
    if (nested := fields.take(wanted, JSON_SCHEMA, at)) is not None and kind == "json_schema":
        given, at = nested, at + "json_schema."
    schema = fields.take(given, SCHEMA, at)
    if schema is None and kind == "json_object":
        label = "response_format json_object"
        return Constraint("json", {"type": "object"}, "response_format", label, is_closed=False)
    if schema is None:
        schema = body.get("structured_outputs")
    if not isinstance(schema, dict):
        raise BadRequest(f"{at}schema is missing", param=f"{at}schema")
    strict = fields.take(given, STRICT, at)
    return Constraint(
        "json",
        schema,
        f"{at}schema",
        "response_format json_schema",
        is_strict=strict is True,
        is_closed=strict is not False,
        any_whitespace=fields.take(given, ANY_WHITESPACE, at) is True,
        name=fields.take(given, NAME, at) or "",
        description=fields.take(given, DESCRIPTION, at) or "",
    )


def _outputs(body: Mapping[str, JSON]) -> Constraint | None:
    """A bare schema, or vLLM's nested form: an object of which all keys are vLLM's."""
    field = "structured_outputs"
    given = {k: v for k, v in (fields.take(body, fields.STRUCTURED_OUTPUTS) or {}).items()}
    if not given:
        return None
    kinds = [key for key in _NESTED if given.get(key) not in (None, False, "", [])]
    if not kinds or not set(given) <= {*_NESTED, *_NESTED_OPTIONS}:
        return Constraint("json", given, field, field)
    if len(kinds) > 1:
        raise BadRequest(f"{field} must hold one of {', '.join(kinds)}, not both", param=field)
    kind, at = kinds[0], f"{field}.{kinds[0]}"
    value = given[kind]
    if kind == "choice" and isinstance(value, list):
        return _choices(value, at)
    if kind == "json_object" and value is True:
        return Constraint("json", {"type": "object"}, at, field, is_closed=False)
    if kind == "json" and isinstance(value, str | dict):
        return Constraint("json", value, at, field)
    if kind in ("regex", "grammar") and isinstance(value, str):
        return Constraint(kind, value, at, field)
    if kind == "structural_tag":
        raise BadRequest(f"{at} is not supported", param=at)
    raise BadRequest(f"{at} must be of another type", param=at)


READERS: tuple[Callable[[Mapping[str, Any]], Constraint | None], ...] = (
    _grammar,
    _format,
    _json,
    _outputs,
    _regex,
    _choice,
)
