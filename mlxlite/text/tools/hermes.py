"""Calls as JSON envelopes: Hermes, Qwen2.5, Qwen3 and many others (spec 30 sections 5.1, 5.4).

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

The envelope is an object with `name` and `arguments` (Llama says `parameters`, F15), or with both
under `function`. Where the name comes first and is known, the arguments are passed on while they
are written; in any other order the envelope is read whole. Other families use the same envelope
between markers of their own; `generic` reads the block above.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mlxlite.text.tools.arguments import copy_value, read_string
from mlxlite.text.tools.format import Broken, Ended, Markers, Reader, Reading, Refused
from mlxlite.text.tools.repair import compact, loads, object_end, repaired
from mlxlite.text.tools.writing import Script, Slot
from mlxlite.types import JSON

_ARGUMENTS = ("arguments", "parameters")
_ENVELOPE_KEYS = ("name", "function", "type", "id", *_ARGUMENTS)


def read_envelope(r: Reader, ending: Markers | None, *, is_bare: bool = False) -> Reading[None]:
    """Reads one envelope, whose opening brace is next, and makes a call of it.

    ending: the markers at one of which the block ends if its JSON is broken. is_bare: there are no
    markers, so the first sign of an ordinary object is the end of it: Broken.
    """
    start = r.mark()
    is_sent = False
    try:
        is_sent = yield from _copy_envelope(r, ending, is_bare)
    except (Broken, Ended) as fault:
        if is_bare and r.call is None:
            raise
        body = yield from rest_of_block(r, start, ending)
        name, arguments = envelope_call(repaired(body)) or ("", None)
        r.mend(name, arguments, fault)
        return
    if is_sent:
        r.end()
        return
    text = r.since(start)
    try:
        call = envelope_call((loads(text), []), needs_arguments=is_bare)
    except ValueError:  # trailing commas and such, mended on the way
        call = envelope_call(repaired(text), needs_arguments=is_bare)
    if call is None:
        raise Refused
    r.whole(*call)


def _copy_envelope(r: Reader, ending: Markers | None, is_bare: bool) -> Reading[bool]:
    """Takes an envelope. True if its arguments were sent, False if it must be read whole."""
    name: str | None = None
    is_sent = needs_all = False
    r.take(1)
    while (yield from r.solid()) != "}":
        key = yield from read_string(r)
        if (yield from r.solid()) != ":":
            raise Broken
        r.take(1)
        char = yield from r.solid()
        if is_bare and key not in _ENVELOPE_KEYS:
            raise Broken
        if key == "name" and char == '"' and name is None:
            name = yield from read_string(r)
            if is_bare and name not in r.tools:
                raise Broken
        elif key in _ARGUMENTS and char == "{" and name in r.tools and not (needs_all or is_sent):
            assert name is not None
            r.begin(name)
            yield from copy_value(r, ending, r.send)
            is_sent = True
        else:
            needs_all |= key in ("function", *_ARGUMENTS)
            yield from copy_value(r, ending)
        if (yield from r.solid()) == ",":
            r.take(1)
        elif (yield from r.solid()) != "}":
            raise Broken
    r.take(1)
    return is_sent


def read_arguments(r: Reader, name: str, ending: Markers) -> Reading[None]:
    """Reads the arguments of a call whose name came before them, and makes the call.

    No arguments at all count as `{}`, anything but an object as broken.
    """
    start = r.mark()
    try:
        if (yield from r.solid()) != "{":
            raise Broken
        if name not in r.tools:
            yield from copy_value(r, ending)
            raise Refused
        r.begin(name)
        yield from copy_value(r, ending, r.send)
        r.end()
    except Refused:
        raise
    except (Broken, Ended) as fault:
        if name not in r.tools:
            raise
        body = yield from rest_of_block(r, start, ending)
        found = repaired(body or "{}")
        r.mend(name, compact(found[0]) if found else None, fault)


def rest_of_block(r: Reader, start: int, ending: Markers | None) -> Reading[str]:
    """The text of a broken block from a mark on, up to the first marker that may end it.

    A marker that was taken for a part of a string is the end after all (spec 30 section 5.1:
    shortest match); what came after it is unread again. Where no marker comes, the block ends with
    its object, or with the output.
    """
    is_closed = False
    if ending is None:
        yield from r.rest()
    elif ending.search(r.since(start)) is None:
        try:
            yield from r.until(ending)
            is_closed = True
        except Ended:
            pass
    body = r.since(start)
    # Looked for once more: it may have begun in what was taken before.
    found = ending.search(body) if ending is not None else None
    if found is None and is_closed:
        return body
    end = found.start() if found else object_end(body)
    return body[:end] if r.rewind(start, end) else body


def envelope_call(
    loaded: tuple[JSON, list[str]] | None, *, needs_arguments: bool = False
) -> tuple[str, str] | None:
    """Name and compact arguments of a loaded envelope, or None if it is none.

    Arguments may be an object, a JSON string of one, blank, null or missing (then `{}`).
    """
    if loaded is None or not isinstance(loaded[0], Mapping):
        return None
    envelope: Mapping[str, JSON] = loaded[0]
    inner = envelope.get("function")
    if isinstance(inner, Mapping):
        envelope = {**envelope, **inner}
        needs_arguments = False
    name = envelope.get("name")
    arguments = next((envelope[key] for key in _ARGUMENTS if envelope.get(key) is not None), None)
    if needs_arguments and not isinstance(arguments, str | Mapping):
        return None
    if isinstance(arguments, str):
        arguments = _object(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    if not isinstance(name, str) and "name" not in envelope:  # the rung name_in_args (5.4.8)
        key = next((key for key in ("name", "function") if isinstance(arguments.get(key), str)), "")
        name = arguments.get(key)
        arguments = {other: value for other, value in arguments.items() if other != key}
    if not isinstance(name, str) or not name:
        return None
    return name, compact(arguments)


def _object(text: str) -> JSON:
    """The object in a string, {} for a blank one; anything else is no arguments."""
    if not text.strip():
        return {}
    try:
        return loads(text)
    except ValueError:
        found = repaired(text)
        return [] if found is None else found[0]


_TRAIL = re.compile(r"[}\]`\s]*")
_PLAIN_TRAIL = re.compile(r"[}\]\s]*")


def read_ending(r: Reader, ending: Markers) -> Reading[None]:
    """Takes the closing marker after a call, and what models put before it: a bracket too many, the
    end of a fence.

    Without a marker the block ends where the call did (the output may have been cut there).
    """
    start = r.mark()
    yield from r.run(_PLAIN_TRAIL if ending.texts[0][0] == "`" else _TRAIL, 64)
    marker = yield from r.starts(ending)
    if not marker and r.ended and ending.begins(r.unread()):
        marker = r.unread()  # cut by the limit
    if marker:
        r.take(len(marker))
        r.spend()
    else:
        r.rewind(start, 0)


WRITING = Script(
    markers=("<tool_call>", "</tool_call>"),
    openers=("<tool_call>",),
    between="\n",
    pieces=(
        *("<tool_call>", Slot.LINE, '{"name": ', Slot.QUOTED),
        *(', "arguments": ', Slot.ARGUMENTS, "}\n</tool_call>"),
    ),
)
