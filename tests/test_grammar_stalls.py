"""Bad and heavy forms beside a stream: answered in time, and the stream goes on (F70, decision D7).

The server is a process of its own, so that what this one does is not taken for a pause of it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests import schema_table as table
from tests import tiny
from tests.live import CHAT, Child, ask, chat_body, connect, post_bytes

pytestmark = pytest.mark.slow

BOUND_S = 5 + 2  # of a compile, and for the rest of an answer on a busy machine
QUIET_S = 1.5
LONG = {
    "messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 7000,
    "temperature": 1, "seed": 3, "logit_bias": {"0": -100, "2": -100},
}  # fmt: skip


def chain(length: int) -> dict[str, Any]:
    """References in a row."""
    parts: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(length)}
    return {"$defs": {**parts, f"d{length}": table.I}, "$ref": "#/$defs/d0"}


def rules(length: int, sign: str) -> str:
    """Rules in a row."""
    found = [f"{'root' if sign == '::=' else 'start'} {sign} r0"]
    found += [f"r{n} {sign} r{n + 1}" for n in range(length)]
    return "\n".join([*found, f'r{length} {sign} "a"'])


NAMES = [f"property_number_{n}" for n in range(12_000)]
EITHER = 0  # as fast as the machine is: compiled, or refused after the bound
# Status, and whether there is a Warning.
FORMS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "schema-malformed": ({"guided_json": {"type": "strin"}}, 400, False),
    "regex-malformed": ({"guided_regex": "("}, 400, False),
    "grammar-malformed": ({"guided_grammar": "root ::= ("}, 400, False),
    "choice-control": ({"guided_choice": ["bell\x07"]}, 200, False),
    "schema-of-1-MB": (
        {"guided_json": {"type": "object", "properties": {name: table.B for name in NAMES},
                         "required": NAMES[:9]}, "max_tokens": 1}, EITHER, False,
    ),
    "schema-too-large": ({"guided_json": {"const": "x" * 1_000_001}}, 400, False),
    "deep": ({"guided_json": table.nested(45)}, 200, False),
    "too-deep": ({"guided_json": table.nested(200)}, 400, False),
    "circle": ({"guided_json": table.MALFORMED["refers-in-a-circle"]}, 400, False),
    "recursive": ({"guided_json": table.TREE}, 200, False),
    "references-in-a-row": ({"guided_json": chain(5000)}, 400, False),
    "rules-in-a-row": ({"guided_grammar": rules(5000, "::=")}, 400, False),
    "rules-in-a-row-lark": ({"guided_grammar": rules(5000, ":")}, 400, False),
    "schema-in-a-grammar": (
        {"guided_grammar": f"start: %json {json.dumps(chain(5000))}"}, 400, False,
    ),
    "enum-of-40000": ({"guided_json": {"enum": [f"value {n}" for n in range(40_000)]}}, 200, False),
    "choices-30000": ({"guided_choice": [f"choice {n}" for n in range(30_000)]}, 400, False),
    "regex-backtracking": ({"guided_regex": "((a+)+)+$"}, 200, False),
    "regex-counted": ({"guided_regex": "(.{1,1000}){1,1000}"}, 200, False),
    "regex-many-states": ({"guided_regex": "[ab]*a[ab]{200}"}, 200, False),
    "regex-long": ({"guided_regex": "a" * 900_000}, 400, False),
    "pattern-counted": (
        {"guided_json": {"type": "string", "pattern": "^(.{0,3000}){1,3000}$"}}, 200, False,
    ),
    "unions": ({"guided_json": table.unions(6)}, 400, False),
    "unsupported": ({"guided_json": table.UNSUPPORTED["not"]}, 200, True),
}  # fmt: skip


ATTEMPTS = 3
PIECES = 5  # of a stream that is under way


class Stream:
    """A long answer, and when each piece of it came."""

    def __init__(self, address: Any) -> None:
        self._sock = connect(address)
        self._sock.sendall(post_bytes(CHAT, LONG))
        self._times: list[float] = []
        self._under_way = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with suppress(ConnectionResetError):  # `close` leaves in the middle of an answer
            while self._sock.recv(1 << 16):
                self._times.append(time.perf_counter())
                if len(self._times) >= PIECES:
                    self._under_way.set()

    def longest_gap_s(self, since: float) -> float:
        """Between pieces, the last one before `since` counted, and the time up to now."""
        times = [*self._times, time.perf_counter()]
        first = next(n for n, at in enumerate(times) if at >= since)
        times = times[max(first - 1, 0) :]
        return max(after - before for before, after in zip(times, times[1:], strict=False))

    def wait(self) -> None:
        """Until it is under way."""
        assert self._under_way.wait(BOUND_S)

    @property
    def is_going(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._sock.shutdown(2)
        self._thread.join()
        self._sock.close()


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    home = tmp_path_factory.mktemp("stalls")
    folder = tiny.make_model(home / "tiny", max_position_embeddings=8192)
    with Child(home, "serve", "--model", str(folder), "--port", "0", deadline_s=240,
               MKL_NUM_THREADS="1") as child:  # fmt: skip
        child.wait_ready()
        ask(child.address, "POST", CHAT, chat_body(guided_regex="x"))
        yield child
        assert "Traceback" not in child.errors()


@pytest.fixture(scope="module")
def quiet_gap_s(child: Child) -> float:
    return measured_quiet(child)


def measured_quiet(child: Child) -> float:
    """The longest pause of a stream that is alone."""
    stream = Stream(child.address)
    time.sleep(0.2)  # its first steps are not measured
    began = time.perf_counter()
    time.sleep(QUIET_S)  # a while of nothing else is what is measured
    gap_s = stream.longest_gap_s(began)
    assert stream.is_going
    stream.close()
    return gap_s


def varied(form: dict[str, Any], attempt: int) -> dict[str, Any]:
    """The same work for the compiler, in a form that it has not kept."""
    name, value = next(iter(form.items()))
    if not attempt:
        other = value
    elif isinstance(value, dict):
        other = {**value, "title": f"attempt {attempt}"}
    elif isinstance(value, list):
        other = [*value, f"attempt {attempt}"]
    elif name == "guided_regex":
        other = "(" * attempt + value + ")" * attempt
    else:
        other = value + "\n" * attempt
    return {**form, name: other}


@pytest.mark.parametrize("name", FORMS)
def test_a_stream_goes_on(child: Child, quiet_gap_s: float, name: str) -> None:
    """A stall of ours is there each time; one of a busy machine is not."""
    form, status, is_warned = FORMS[name]
    gaps = []
    for attempt in range(ATTEMPTS):
        asked = {"max_tokens": 4, **varied(form, attempt)}
        stream = Stream(child.address)
        stream.wait()
        began = time.perf_counter()
        reply = ask(child.address, "POST", CHAT, json.dumps(chat_body(**asked)).encode())
        taken_s = time.perf_counter() - began
        gaps.append(stream.longest_gap_s(began))
        assert stream.is_going, "it was there all the time"
        stream.close()
        assert reply.status == status or status == EITHER and reply.status in (200, 400), reply.body
        assert ("warning" in reply.headers) is is_warned
        if reply.status == 400:
            assert reply.error["param"] == next(iter(form))
        assert taken_s < BOUND_S
        if gaps[-1] <= 3 * quiet_gap_s + 0.1:
            return
        quiet_gap_s = max(quiet_gap_s, measured_quiet(child))
    raise AssertionError(gaps, quiet_gap_s)
