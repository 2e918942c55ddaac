"""The benchmark's order of work, its weights, its command line, and one whole short run."""

from __future__ import annotations

import asyncio
import json
import math
import struct
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlxlite import cli, config
from mlxlite.bench import command, forms, inner, legs, weights
from mlxlite.bench.client import Base, RequestFailed
from mlxlite.bench.figures import Results
from mlxlite.bench.legs import Found, Kit, Leg
from mlxlite.bench.matrix import Matrix, run
from mlxlite.bench.servers import Server, run_once
from mlxlite.errors import ModelError
from mlxlite.models import library
from mlxlite.models.safetensors_file import check_safetensors
from mlxlite.text.tokenizer import Tokenizer
from tests.live import run as run_command

WAIT_S = 10.0


# ----------------------------------------------------------------------------- a scripted server


class Scripted(BaseHTTPRequestHandler):
    """Says `one two three …`, a word a token, as mlx_lm's server sends it: HTTP/1.0, no length."""

    def log_message(self, *_: object) -> None:
        pass

    def _begin(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_GET(self) -> None:
        self._begin()
        self.wfile.write(b'{"data": [{"id": "scripted"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked: list[dict[str, Any]] = self.server.asked  # type: ignore[attr-defined]
        asked.append(body)
        self._begin()
        for n in range(body["max_tokens"]):
            self._send({"choices": [{"delta": {"content": f"word{n} "}}]})
        words = sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": words, "completion_tokens": body["max_tokens"]}
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, value: Any) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())


class _Server(ThreadingHTTPServer):
    request_queue_size = 64  # sixteen connect at once
    asked: list[dict[str, Any]]


@pytest.fixture
def scripted() -> Iterator[_Server]:
    server = _Server(("127.0.0.1", 0), Scripted)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join(WAIT_S)
    server.server_close()


def at(scripted: _Server, name: str = "them") -> Server:
    return Server(name, Base("127.0.0.1", scripted.server_address[1]))


# ------------------------------------------------------------------------------ order and budget


def matrix(legs: list[Leg], servers: list[Server], budget_s: float = WAIT_S) -> Results:
    results = Results([server.name for server in servers])
    run(Matrix(results, legs, budget_s, lambda line: None, "salt"), [servers])
    return results


def test_rounds_alternate(scripted: _Server) -> None:
    order = []

    async def leg(server: Server, turn: int, kit: Kit) -> Found:
        order.append((server.name, turn))
        return Found({"m": [turn]}, {f"r{turn}": server.name}, ["noted"])

    results = matrix([Leg("leg", leg, 2)], [at(scripted, "a"), at(scripted, "b")])
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert results.samples == {"m": {"a": [0, 1], "b": [0, 1]}}
    assert results.texts == {"r0": {"a": "a", "b": "b"}, "r1": {"a": "a", "b": "b"}}
    assert results.notes == ["a: noted", "b: noted"] * 2


def test_a_failure_ends_that_leg_on_that_server(scripted: _Server) -> None:
    async def leg(server: Server, turn: int, kit: Kit) -> Found:
        if server.name == "a":
            raise RequestFailed("status 500: oops")
        return Found({"m": [turn]})

    async def other(server: Server, turn: int, kit: Kit) -> Found:
        return Found({"n": [turn]})

    both = [at(scripted, "a"), at(scripted, "b")]
    results = matrix([Leg("leg", leg, 2), Leg("other", other, 1)], both)
    assert results.samples == {"m": {"b": [0, 1]}, "n": {"a": [0], "b": [0]}}
    assert results.notes == ["a: leg: status 500: oops"]


def test_what_does_not_finish_is_noted(scripted: _Server) -> None:
    async def leg(server: Server, turn: int, kit: Kit) -> Found:
        if turn == 1:
            await asyncio.Event().wait()
        return Found({"m": [turn]})

    results = matrix([Leg("leg", leg, 3)], [at(scripted)], budget_s=0.3)
    assert results.samples == {"m": {"them": [0]}}
    assert results.notes == [
        "them: leg did not finish within 0 s; 1 of 3 rounds were measured",
    ]


def test_what_cannot_finish_is_not_begun(scripted: _Server) -> None:
    async def prompt(server: Server, turn: int, kit: Kit) -> Found:
        return Found({"cold_s": [WAIT_S / 2]})

    async def ours_only(server: Server, turn: int, kit: Kit) -> Found:
        return Found({"m": [1.0]})

    two = [Leg("prompt", prompt, 1), Leg("long", ours_only, 1, prompt_tokens=3000)]
    results = matrix(two, [at(scripted, "ours"), at(scripted)])
    assert results.samples["m"] == {"ours": [1.0]}
    assert results.notes == ["them: long was not run: its prompts would take some 15 s"]


def test_legs_that_start_servers_leave_others_alone(scripted: _Server) -> None:
    assert matrix([leg for leg in legs.LEGS if leg.owns], [at(scripted)]).samples == {}
    assert scripted.asked == []


def test_a_server_that_does_not_start_is_one_note(scripted: _Server) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('first\\nno weights')"]
    ours = Server("ours", Base("127.0.0.1", 0), broken)
    two = [leg for leg in legs.LEGS if leg.name in ("prompt", "decode")]
    results = matrix(two, [ours, at(scripted)])
    assert results.notes == ["ours: prompt: it ended instead of starting: no weights"]
    assert set(results.samples["decode_tps"]) == {"them"}


@pytest.mark.parametrize(
    "leg", [leg for leg in legs.LEGS if not leg.owns], ids=lambda leg: leg.name
)
def test_legs(leg: Leg, scripted: _Server) -> None:
    """Every leg on a server that has all its tokens ready; the same prompts in every run."""
    server = at(scripted)
    kit = asyncio.run(legs.calibrate(server, "salt"))
    assert kit.words_per_token == 1.0
    found = asyncio.run(leg.run(server, 0, kit))
    measured = {name: values for name, values in found.values.items() if values}
    assert measured or found.notes
    assert all(value >= 0 for values in measured.values() for value in values)
    first, scripted.asked[2:] = scripted.asked[2:], []
    asyncio.run(leg.run(server, 0, kit))
    again = [json.dumps(body) for body in scripted.asked[2:]]
    shared = {json.dumps(body) for body in first} & set(again)
    assert len(shared) == len(set(again)) or leg.name in ("busy", "prefill")  # as many as fit
    cold = Kit(1.0, "salt")
    assert cold.prompt("a0", 50).split()[0] != cold.prompt("a1", 50).split()[0]
    assert len(cold.prompt("a0", 50).split()) == 51


def test_run_once() -> None:
    run_once([sys.executable, "-c", ""], WAIT_S)
    with pytest.raises(RequestFailed, match="no memory"):
        run_once([sys.executable, "-c", "raise SystemExit('no memory')"], WAIT_S)


# -------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(("dtype", "width"), [("F32", 4), ("BF16", 2)])
@pytest.mark.parametrize("exponent", [-5, -4])
def test_noise_has_its_size(dtype: str, width: int, exponent: int) -> None:
    raw = bytes(range(256)) * 8
    drawn = weights._noise(raw, dtype, exponent)
    count = len(raw) // width
    if width == 2:  # bfloat16 is the upper half of a float32
        drawn = b"".join(b"\0\0" + drawn[n : n + 2] for n in range(0, len(drawn), 2))
    numbers = struct.unpack(f"<{count}f", drawn)
    assert {2.0**exponent <= abs(number) < 2.0 ** (exponent + 1) for number in numbers} == {True}
    assert {math.copysign(1, number) for number in numbers} == {1.0, -1.0}
    assert struct.unpack("<f", weights._ones(1, dtype).rjust(4, b"\0")) == (1.0,)


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_shapes_are_models(dtype: str, tmp_path: Path) -> None:
    model = weights.make_shape("tiny", tmp_path, dtype)
    assert (model.name, model.model_type, model.bits) == ("random-tiny", "llama", None)
    specs = check_safetensors(model.folder / "model.safetensors")
    assert {spec.dtype for spec in specs.values()} == {dtype}
    assert specs["lm_head.weight"].shape == (2048, 64)
    tokenizer = Tokenizer.load(model.folder)
    ids = tokenizer.encode("Hi, <|im_end|>", add_special_tokens=False)
    assert len(ids) == 5 and ids[-1] == 2
    assert tokenizer.vocab_size == 2048
    made = (model.folder / "config.json").stat().st_mtime_ns
    assert weights.make_shape("tiny", tmp_path, dtype) == model  # kept
    assert (model.folder / "config.json").stat().st_mtime_ns == made
    assert [path.name for path in (tmp_path / "bench").iterdir()] == [f"tiny-{dtype.lower()}"]


def test_unknown_shape(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no shape 'huge'; there are tiny, 135m"):
        weights.make_shape("huge", tmp_path, "F32")


def test_a_dense_copy_becomes_a_model(tiny_folder: Path, tmp_path: Path) -> None:
    """The packed model's config and weights are left out, everything else is there."""
    settings = config.build({"home": str(tmp_path / "home")}, {})
    packed = tmp_path / "packed"
    packed.mkdir()
    for file in tiny_folder.iterdir():
        (packed / file.name).write_bytes(file.read_bytes())
    told = json.loads((packed / "config.json").read_text())
    told |= {"quantization": {"bits": 4, "group_size": 32}, "torch_dtype": "float16"}
    (packed / "config.json").write_text(json.dumps(told))
    model = library.describe(packed, "packed")
    assert model.bits == 4 and weights.dense_copy(settings, model) is None
    copy = tmp_path / "float32-0.safetensors"
    copy.write_bytes((tiny_folder / "model.safetensors").read_bytes())
    folder = weights.dress(model, copy, tmp_path / "dressed")
    dense = library.describe(folder, "dense")
    assert dense.bits is None and dense.has_chat_template
    assert library.weight_files(folder) == [folder / "model.safetensors"]
    written = json.loads((folder / "config.json").read_text())
    assert written["dtype"] == "float32" and not {"quantization", "torch_dtype"} & set(written)
    assert (folder / "model.safetensors").read_bytes() == copy.read_bytes()
    assert (folder / "tokenizer.json").read_text() == (packed / "tokenizer.json").read_text()


# --------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(("only", "found"), [
    ([], legs.NAMES),
    (["decode", "start"], ("start", "decode")),
    (["streams"], ("streams1", "streams4", "streams16")),
    (["streams4", "inside"], ("streams4", "inside")),
], ids=["all", "in order", "several", "one of several"])  # fmt: skip
def test_chosen_legs(only: list[str], found: tuple[str, ...]) -> None:
    assert command.chosen(only) == found


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["--only", "decod"], 2, "no leg 'decod'; there are start, prompt"),
    (["--only", ","], 2, "no leg ''"),
    (["--budget", "0"], 2, "--budget must be"),
    (["--budget", "long"], 2, "'long'"),
    (["--against", "ftp://box"], 2, "no http:// or https:// address"),
    (["--shape", "tiny", "--model", "x"], 2, "a model or --shape, not both"),
    (["--alone", "--against", "box"], 2, "--alone or --against, not both"),
    (["--shapes", "tiny"], 2, "did you mean --shape?"),
    (["--shape", "huge"], 1, "no shape 'huge'"),
    (["no-such-model"], 1, "no model 'no-such-model'"),
    (["--shape", "tiny", "--only", "decode", "--against", "127.0.0.1:1"], 1, "no connection"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")  # fmt: skip
def test_wrong_usage(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MLXLITE_HOME", str(tmp_path))
    assert cli.main(["bench", *arguments]) == code
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and shown.out == ""


def test_help_and_readme_name_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "mlxlite bench" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    shown = capsys.readouterr().out
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    for flag in ("--shape", "--only", "--against", "--alone", "--packed", "--budget", "--json"):
        assert flag in shown and flag in readme
    for shape in weights.SHAPES:
        assert shape in shown and shape in readme


# ------------------------------------------------------------------------------------ for real


@pytest.mark.slow
def test_a_whole_run(scripted: _Server, tmp_path: Path) -> None:
    """The real command: mlxlite started on random weights, beside a server that runs already."""
    written = tmp_path / "found.json"
    url = f"http://127.0.0.1:{scripted.server_address[1]}"
    only = "start,streams1,busy"
    done = run_command(
        tmp_path, "bench", "--shape", "tiny", "--only", only, "--against", url,
        "--json", str(written),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| start to ready (s) | " in done.stdout and "- not measured: " in done.stdout
    found = json.loads(written.read_text())
    metrics = found["metrics"]
    assert set(metrics["streams1_tps"]) == {"mlxlite", url}
    assert set(metrics["ready_s"]) == set(metrics["first_s"]) == {"mlxlite"}
    assert len(metrics["streams1_tps"][url]["values"]) == 3
    assert found["greedy"]["compared"] == 3 == len(found["greedy"]["differences"])
    assert found["model"]["name"] == "random-tiny" and found["versions"]["mlx"]
    assert {body["model"] for body in scripted.asked} == {"scripted"}


@pytest.mark.slow
def test_bookkeeping_is_measured(tiny_folder: Path, tmp_path: Path) -> None:
    settings = config.build({"home": str(tmp_path)}, {})
    found = inner.bookkeeping(settings, library.describe(tiny_folder, "tiny"))
    assert found["bookkeeping_ms"] > 0 and -100 < found["bookkeeping_share"] < 100


def test_the_prefix_tree_is_measured() -> None:
    found = inner.prefix_ms()
    assert 0 < found["lookup_ms"] < 100 and 0 < found["insert_ms"] < 100


def test_forms(tiny_folder: Path, tmp_path: Path) -> None:
    settings = config.build({"home": str(tmp_path)}, {})
    said: list[str] = []
    found = forms.measure(
        settings, library.describe(tiny_folder, "tiny"), said.append, turns=1, tokens=8
    )
    assert set(found) == {
        "grammar_vocabulary_ms", "grammar_compile_ms", "grammar_step_cost", "grammar_step_cost16",
        "grammar_rate16",
    }  # fmt: skip
    assert found["grammar_rate16"] > 0 and found["grammar_compile_ms"] > 0 and len(said) == 2
