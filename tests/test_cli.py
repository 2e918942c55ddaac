"""The command: verbs, flags, exit codes, one line for each failure, signals; in real children.

What needs no process of its own calls `main` here. A child on the tiny model starts in 0.4 s.
"""

from __future__ import annotations

import io
import json
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxlite import __version__, cli
from tests.live import CHAT, Child, LiveApp, ask, chat_body, connect, post_bytes, read_until, run

pytestmark = pytest.mark.slow

HEAVY = ("transformers", "numpy", "huggingface_hub", "torch")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXLITE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture
def model_copy(tiny_folder: Path, home: Path) -> Path:
    """A copy of the tiny model, to be damaged."""
    return shutil.copytree(tiny_folder, home / "copy")


def one_line(text: str) -> str:
    """The one line that a failure prints."""
    assert text.startswith("mlxlite: ") and text.count("\n") == 1 and text.endswith("\n"), text
    return text.removeprefix("mlxlite: ").rstrip("\n")


# ------------------------------------------------------------------------------------- usage


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mlxlite {__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([flag]) == 0
    shown = capsys.readouterr().out
    for word in ("serve", "generate", "get", "ls", "--version", "--help"):
        assert word in shown


@pytest.mark.parametrize("verb", ["serve", "generate", "gen", "get", "ls"])
def test_help_of_a_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0
    assert "--home" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["serve", "--prot=1"], "unknown flag --prot=1; did you mean --port?"),
        (["serve", "--servedname", "x"], "unknown flag --servedname; did you mean --served-name?"),
        (["ls", "--port", "1"], "unknown flag --port"),
        (["generate", "hi", "--temprature", "1"], "did you mean --temperature?"),
        (["serve", "--por", "1"], "unknown flag --por"),  # no abbreviations
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["generat", "hi"], "unknown verb 'generat'; did you mean mlxlite generate?"),
        (["generat", "--raw"], "unknown flag --raw"),
        (["lst", "--port", "0"], "no verb or model 'lst'; did you mean mlxlite ls?"),
        (["model", "hi"], "unexpected argument 'hi'"),
        (["serve", "ls", "x"], "unexpected argument 'x'"),
        (["ls", "x"], "unexpected argument 'x'"),
        (["serve", "--port"], "--port"),
        (["serve", "--port", "http"], "--port must be a whole number, not 'http'"),
        (["serve", "--port", "65536"], "--port must be at most 65535, not 65536"),
        (["serve", "--temperature", "nan"], "--temperature must be at least 0, not nan"),
        (["serve", "--dtype", "int8"], "--dtype must be one of"),
        (["serve", "--api-key", ""], "--api-key must not be empty"),
        (["generate", "a", "b", "c"], "give one prompt"),
        (["generate", "hi", "--temperature", "-1"], "--temperature must be at least 0"),
        (["generate", "hi", "--temperature", "nan"], "--temperature must be a finite number"),
        (["generate", "hi", "--temperature", "inf"], "--temperature must be a finite number"),
        (["generate", "hi", "--max-tokens", "x"], "--max-tokens must be of type int"),
        (["generate", "hi", "--seed", "1.5"], "--seed must be of type int"),
    ],
)
def test_wrong_usage(
    home: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    shown = one_line(capsys.readouterr().err)
    assert message in shown and shown.endswith("; see mlxlite --help")


def test_unknown_variable(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLXLITE_PROT", "1")
    assert cli.main(["ls"]) == 2
    assert "MLXLITE_PROT is not known; did you mean MLXLITE_PORT?" in capsys.readouterr().err


# ------------------------------------------------------------------------------- cheap failures


def test_port_clash_comes_first(tiny_folder: Path, home: Path) -> None:
    """Before anything heavy: MLX is not even imported, the model not looked at."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        script = (
            "import sys; from mlxlite import cli; code = cli.main(sys.argv[1:]);"
            "print(code, sorted({name.split('.')[0] for name in sys.modules}))"
        )
        done = run(home, "serve", "no-such-model", "--port", port, script=script)
    code, _, modules = done.stdout.partition(" ")
    assert code == "1"
    assert not {"mlx", "tokenizers", "jinja2", "asyncio", *HEAVY} & set(eval(modules))
    assert one_line(done.stderr) == (
        f"cannot listen on 127.0.0.1:{port}: another program listens there; "
        "stop it or choose another port"
    )


@pytest.mark.parametrize("verb", [["serve", "--port", "0"], ["generate", "hi", "--model"]])
def test_missing_model(verb: list[str], home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*verb, "smolm2-135m"]) == 1
    assert "smollm2-135m" in one_line(capsys.readouterr().err)
    assert cli.main([*verb, str(home / "nowhere.gguf")]) == 1
    assert one_line(capsys.readouterr().err).endswith("nowhere.gguf: no such file")


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xffnot a model" * 50)


def _no_type(path: Path) -> None:
    path.write_text("{}")


def _unknown_type(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "nonesuch"}))


def _wrong_width(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": 128}))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", _cut),
        ("model.safetensors", _garbage),
        ("model.safetensors", Path.unlink),
        ("config.json", _garbage),
        ("config.json", _no_type),
        ("config.json", _unknown_type),
        ("config.json", _wrong_width),
        ("tokenizer.json", _garbage),
        ("tokenizer.json", _no_type),
        ("tokenizer_config.json", _garbage),
    ],
)
def test_damaged_models(
    model_copy: Path,
    name: str,
    damage: Callable[[Path], Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line that names the file and the reason, exit code 1, for both verbs that load."""
    damage(model_copy / name)
    assert cli.main(["generate", str(model_copy), "hi"]) == 1
    shown = one_line(capsys.readouterr().err)
    assert str(model_copy) in shown
    assert name in shown or damage in (_wrong_width, Path.unlink)
    assert cli.main(["serve", str(model_copy), "--port", "0"]) == 1
    assert one_line(capsys.readouterr().err) == shown


def test_a_damaged_model_in_a_child(model_copy: Path, home: Path) -> None:
    """The process itself ends with 1, not with an abort of the engine's thread."""
    _garbage(model_copy / "tokenizer.json")
    done = run(home, "serve", str(model_copy), "--port", "0")
    assert done.returncode == 1, done.stderr
    assert "tokenizer.json" in one_line(done.stderr)


def test_bad_chat_template(
    tiny_folder: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = home / "bad.jinja"
    template.write_text("{% for %}")
    assert cli.main(["generate", str(tiny_folder), "hi", "--chat-template", str(template)]) == 1
    one_line(capsys.readouterr().err)


# ------------------------------------------------------------------------------------- verbs


def test_ls_and_get(
    tiny_folder: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    not_here = "not here yet: mlxlite get smollm2-135m"
    assert cli.main(["ls"]) == 0
    head, only = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "NAME" and head.endswith("DENSE COPY")
    assert only.startswith("smollm2-135m ") and only.endswith(f"served by default, {not_here}")
    model = shutil.copytree(tiny_folder, home / "models" / "mine")
    (home / "models" / ".half.partial").mkdir()
    assert cli.main(["ls"]) == 0
    head, mine, other = capsys.readouterr().out.splitlines()
    assert mine.split()[:3] == ["mine", "llama", "dense"] and mine.endswith(" served by default")
    assert mine.count(" MB") == 1 and other.endswith(f" MB              {not_here}")
    (model / "dense").mkdir()
    (model / "dense" / "float32-0.safetensors").write_bytes(bytes(1_500_000))
    monkeypatch.setenv("MLXLITE_MODEL", "smollm2-135m")
    assert cli.main(["ls"]) == 0
    _, mine, other = capsys.readouterr().out.splitlines()
    assert mine.endswith(" 1.5 MB") and other.endswith(f"served by default, {not_here}")
    for _ in range(2):  # idempotent
        assert cli.main(["get", "mine"]) == 0
        assert capsys.readouterr().out == f"mine  {home / 'models' / 'mine'}\n"


def test_generate_is_the_servers_answer(
    tiny_server: LiveApp, tiny_folder: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = tiny_server.chat(max_tokens=20).text
    greedy = ["--temperature", "0", "--max-tokens", "20"]
    for words in (
        [str(tiny_folder), "hello world"],
        ["hello world", "--model", str(tiny_folder)],
        ["--prompt", "hello world", "--model", str(tiny_folder)],
    ):
        assert cli.main(["generate", *words, *greedy]) == 0
        shown = capsys.readouterr()
        assert shown.out == right + "\n"
        assert "prompt tokens" in shown.err and "peak memory" in shown.err
    assert cli.main(["generate", str(tiny_folder), "hello world", *greedy, "--raw"]) == 0
    assert capsys.readouterr().out != right + "\n"
    sampled = [*greedy[2:], "--temperature", "1.3", "--seed", "-5"]
    outputs = set()
    for _ in range(2):
        assert cli.main(["generate", str(tiny_folder), "hello world", *sampled]) == 0
        outputs.add(capsys.readouterr().out)
    assert outputs == {tiny_server.chat(max_tokens=20, temperature=1.3, seed=-5).text + "\n"}


class Stdin(io.TextIOWrapper):
    """A stdin that holds bytes, or a terminal."""

    def __init__(self, content: bytes | None) -> None:
        super().__init__(io.BytesIO(content or b""))
        self._is_terminal = content is None

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("words", [[], ["-"], ["--prompt", "-"]], ids=["none", "-", "--prompt"])
def test_generate_from_stdin(
    tiny_server: LiveApp,
    tiny_folder: Path,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    monkeypatch.setattr("sys.stdin", Stdin("grüße, world\n".encode()))
    flags = ["--model", str(tiny_folder), "--temperature", "0", "--max-tokens", "9"]
    assert cli.main(["generate", *words, *flags]) == 0
    shown = capsys.readouterr()
    message = {"role": "user", "content": "grüße, world"}
    reply = tiny_server.chat(messages=[message], max_tokens=9)
    assert shown.out == reply.text + "\n"
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    assert shown.err.splitlines()[0] == "cut off after 9 tokens: --max-tokens sets the limit"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the prompt on stdin is empty"),
        (b"\n", "the prompt on stdin is empty"),
        (b"\xff", "the prompt on stdin is not UTF-8"),
        (None, "give one prompt"),
    ],
    ids=["empty", "newline", "latin", "terminal"],
)
def test_no_prompt_on_stdin(
    home: Path,
    content: bytes | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(content))
    assert cli.main(["generate"]) == 2
    assert message in one_line(capsys.readouterr().err)


def test_generate_to_the_end_of_the_context(
    tiny_folder: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tiny_folder), "hello world " * 330, "--raw", "--temperature", "0"]
    assert cli.main(["generate", *words, "--max-tokens", "100000"]) == 0
    assert "tokens: the context is full\n" in capsys.readouterr().err


def test_generate_nothing(
    tiny_folder: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(tiny_folder), "hi", "--max-tokens", "0"]) == 0
    assert capsys.readouterr().out == "\n"


def test_generate_in_a_child(tiny_server: LiveApp, tiny_folder: Path, home: Path) -> None:
    done = run(
        home, "gen", str(tiny_folder), "hello world", "--temperature", "0", "--max-tokens", "20"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == tiny_server.chat(max_tokens=20).text + "\n"


# ------------------------------------------------------------------------------ a real server


def test_a_real_server(tiny_server: LiveApp, tiny_folder: Path, home: Path) -> None:
    """Start lines, an answer, SIGTERM in the middle of another one: it is finished, exit code 0."""
    with Child(home, str(tiny_folder), "--port", "0", "--served-name", "org/mine") as child:
        child.wait_ready()
        right = tiny_server.chat().text
        reply = ask(child.address, "POST", CHAT, chat_body())
        assert (reply.text, reply.json()["model"]) == (right, "org/mine")
        sock = connect(child.address)
        sock.sendall(post_bytes(CHAT, chat_body(max_tokens=300, stream=True)))
        read_until(sock, b'{"content":"')
        child.signal(signal.SIGTERM)
        assert b"[DONE]" in read_until(sock, b"0\r\n\r\n")
        sock.close()
        assert child.wait() == 0
        errors = child.errors()
        assert "stopping; a second signal stops at once" in errors
        assert "Traceback" not in errors and "ERROR" not in errors


def test_signals_and_imports(tiny_folder: Path, home: Path) -> None:
    """SIGINT bounded by --shutdown-s; a second one at once; nothing heavy was ever imported."""
    modules = home / "modules"
    (home / "site").mkdir()
    # Runs at the end of the child, however it ends in order.
    (home / "site" / "sitecustomize.py").write_text(
        "import atexit, sys\n"
        f"atexit.register(lambda: open({str(modules)!r}, 'w').write(' '.join(sys.modules)))\n"
    )
    body = chat_body(
        max_tokens=None,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        temperature=0,  # a drawn answer may end at its first token
    )
    path = {"PYTHONPATH": str(home / "site")}
    with (
        Child(home, str(tiny_folder), "--port", "0", "--shutdown-s", "0", **path) as first,
        Child(
            home, str(tiny_folder), "--port", "0", "--shutdown-s", "60", "--batch", "1"
        ) as second,
    ):
        for child in (first, second):
            child.wait_ready()
        sock = connect(first.address)
        sock.sendall(post_bytes(CHAT, body))
        read_until(sock, b'{"content":"')
        first.signal(signal.SIGINT)
        assert first.wait() == 0, first.errors()
        sock.close()
        names = {name.partition(".")[0] for name in modules.read_text().split()}
        assert "mlx" in names and not names & set(HEAVY)

        # Answers that take many seconds hold the stop up; a second signal does not wait for them.
        clients = [connect(second.address) for _ in range(16)]
        clients[0].sendall(post_bytes(CHAT, body))
        read_until(clients[0], b'{"content":"')
        for client in clients[1:]:
            client.sendall(post_bytes(CHAT, body))
        second.signal(signal.SIGTERM)
        second.wait_for_error("stopping; a second signal stops at once")
        second.signal(signal.SIGTERM)
        assert second.wait() == 128 + signal.SIGTERM
        for client in clients:
            client.close()


def test_unix_socket_and_stop_while_starting(
    tiny_server: LiveApp, tiny_folder: Path, home: Path
) -> None:
    path = home / "s.sock"
    with Child(home, "serve", str(tiny_folder), "--unix", str(path)) as child:
        child.wait_ready()
        assert ask(path, "POST", CHAT, chat_body()).text == tiny_server.chat().text
        clash = run(home, "serve", str(tiny_folder), "--unix", str(path))
        assert clash.returncode == 1
        assert one_line(clash.stderr).endswith("another program listens there")
        child.signal(signal.SIGINT)
        assert child.wait() == 0
        assert not path.exists()
