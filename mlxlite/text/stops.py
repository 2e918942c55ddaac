"""Stop strings: finding them in a stream of text (floor 1, column "text"; spec 10 section 9).

A pure splitter between the detokenizer and the client: text goes in as the model writes it, and
comes out up to the first stop string. No fragment of a stop string is ever let through (F29): the
matcher holds back the longest end of the text that could still grow into one, and nothing more.

Which stop wins is decided character by character, so it does not depend on how the text was cut:
the first one to be *completed*; of several completed by the same character, the one that began
first. (Waiting for a longer, still unfinished stop would run the model past a finished one.)

Method: Knuth, Morris and Pratt, one automaton a stop string. Each character is looked at once; in
the common state, with no stop begun, the search for a first character runs at C speed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from mlxlite.errors import BadRequest
from mlxlite.types import JSON

# OpenAI allows 4. Agents send more (one a role name), and a stop string is never longer than a
# short paragraph; the product bounds the memory of a matcher to a few MB.
MAX_STOPS = 64
MAX_STOP_CHARS = 4096


def normalise_stops(value: JSON, param: str = "stop") -> tuple[str, ...]:
    """The field `stop` as a tuple of non-empty, distinct strings.

    Null is (), a string is one stop, empty strings are dropped. Any other type, or more than the
    limits above, is a BadRequest naming the field (D12 overrides spec 10 section 4).
    """
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple):
        raise BadRequest(f"{param} must be a string or a list of strings", param=param)
    for n, item in enumerate(values):
        if not isinstance(item, str):
            raise BadRequest(f"{param}[{n}] must be of type string", param=f"{param}[{n}]")
        if len(item) > MAX_STOP_CHARS:
            raise BadRequest(
                f"{param}: a stop string may have at most {MAX_STOP_CHARS} characters, "
                f"this one has {len(item)}",
                param=param,
            )
    stops = tuple(dict.fromkeys(item for item in values if item))
    if len(stops) > MAX_STOPS:
        raise BadRequest(
            f"{param}: at most {MAX_STOPS} stop strings, {len(stops)} given", param=param
        )
    return stops


class _Automaton:
    """One stop string and how much of it the text ends with."""

    __slots__ = ("fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters of `stop` that the text so far ends with
        # fallback[k]: length of the longest proper prefix of stop[:k] that is also its suffix.
        fallback = array("H", [0, 0])
        k = 0
        for char in stop[1:]:
            while k and stop[k] != char:
                k = fallback[k]
            if stop[k] == char:
                k += 1
            fallback.append(k)
        self.fallback = fallback

    def feed(self, text: str) -> int | None:
        """Reads on; returns the index in `text` just after the stop string, or None."""
        stop, fallback, k = self.stop, self.fallback, self.matched
        at, end = 0, len(text)
        while at < end:
            if k == 0:
                at = text.find(stop[0], at)
                if at < 0:
                    break
                k, at = 1, at + 1
            else:
                char = text[at]
                while k and stop[k] != char:
                    k = fallback[k]
                if stop[k] == char:
                    k += 1
                at += 1
            if k == len(stop):
                return at
        self.matched = k
        return None


class StopMatcher:
    """Cuts one text at its first stop string. Without stops it passes everything through."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._automata = [_Automaton(stop) for stop in stops if stop]
        self._held = ""
        self.matched: str | None = None  # the stop string found, once there is one

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next text; returns what may be shown, and the stop string once one is found.

        After a match all further text is discarded.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._automata:
            return text, None
        best: tuple[int, int, str] | None = None  # end, -length, stop
        for automaton in self._automata:
            end = automaton.feed(text if best is None else text[: best[0]])
            if end is not None:
                found = (end, -len(automaton.stop), automaton.stop)
                best = found if best is None or found < best else best
        pending = self._held + text
        if best is not None:
            end, minus_length, self.matched = best
            shown = pending[: len(self._held) + end + minus_length]
            self._held = ""
            return shown, self.matched
        keep = len(pending) - max(automaton.matched for automaton in self._automata)
        self._held = pending[keep:]
        return pending[:keep], None

    def flush(self) -> str:
        """Ends the text: releases what was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        for automaton in self._automata:
            automaton.matched = 0
        return held
