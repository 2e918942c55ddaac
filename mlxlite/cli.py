"""The command line: verbs, flags, exit codes (floor 4, spec 80).

`serve` is the verb when none is named. Flags of the server derive from `Settings`. Exit codes: 0
done, 1 failed (one line on stderr says why), 2 wrong usage. Nothing heavy is imported before a verb
runs.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from queue import SimpleQueue
from typing import Any, NoReturn

from mlxlite import __version__, config
from mlxlite import fields as request_fields
from mlxlite.config import SettingError, Settings
from mlxlite.errors import BadRequest, MlxliteError, ModelError
from mlxlite.fields import Field
from mlxlite.types import Ask, Done, Event, Finish

PROG = "mlxlite"


class _Usage(Exception):
    """Wrong usage; exit code 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Usage(message)


def _add_settings(parser: argparse.ArgumentParser, names: Sequence[str] | None = None) -> None:
    """Flags for settings, all of them or those named."""
    for setting in fields(Settings):
        if names is not None and setting.name not in names:
            continue
        knob, default = config.knob(setting), config.default(setting)
        shown = f"; default {default}" if default not in (None, ()) else ""
        parser.add_argument(
            config.flag(setting),
            dest=setting.name,
            action="append" if knob.many else "store",
            metavar=knob.metavar or ("|".join(knob.choices) or setting.name.split("_")[-1].upper()),
            help=f"{knob.help}{shown} [{knob.env}]",
        )


_ENGINE_SETTINGS = ("model", "home", "log_level", "dtype", "chat_template")


def _serve_parser() -> _Parser:
    parser = _Parser(
        prog=f"{PROG} serve", allow_abbrev=False, description="Serve a model over HTTP."
    )
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="the same as --model")
    _add_settings(parser)
    return parser


def _absent(field: Field) -> str:
    """What happens without a field, less the server flags, which one prompt does not have."""
    return ", ".join(p for p in field.absent.split(", ") if not p.startswith("--"))


def _generate_parser() -> _Parser:
    parser = _Parser(prog=f"{PROG} generate", allow_abbrev=False, description="Answer one prompt.")
    parser.add_argument(
        "text",
        nargs="*",
        metavar="[MODEL] TEXT",
        help="the prompt; - or nothing reads it from stdin",
    )
    parser.add_argument("--prompt", help="the prompt, as a flag")
    parser.add_argument("--raw", action="store_true", help="do not use the chat template")
    parser.add_argument("--max-tokens", default="256", help="default 256")
    for field in request_fields.SAMPLING:  # the flags of a request are its fields
        flag = "--" + field.name.replace("_", "-")
        shown = "NUMBER" if field.kind is float else "INT"
        parser.add_argument(flag, metavar=shown, help=f"{field.doc}; without it: {_absent(field)}")
    _add_settings(parser, _ENGINE_SETTINGS)
    return parser


def _get_parser() -> _Parser:
    parser = _Parser(prog=f"{PROG} get", allow_abbrev=False, description="Fetch or import a model.")
    parser.add_argument(
        "name", nargs="?", metavar="NAME|REPO|FILE.gguf", help="default: the default model"
    )
    _add_settings(parser, ("home", "log_level"))
    return parser


def _ls_parser() -> _Parser:
    parser = _Parser(prog=f"{PROG} ls", allow_abbrev=False, description="List the local models.")
    _add_settings(parser, ("home", "log_level"))
    return parser


# -------------------------------------------------------------------------------------- verbs


def _serve(arguments: argparse.Namespace, settings: Settings) -> int:
    from mlxlite import launch

    sock = launch.listen(settings)
    try:
        model = _model_to_serve(arguments, settings)
        worker = launch.start_engine(settings, model)

        import asyncio  # from here on the engine thread loads while this one imports

        from mlxlite import app

        asyncio.run(
            app.serve(settings, model.name, worker, sock, lambda line: print(line, flush=True))
        )
    finally:
        sock.close()
    return 0


def _model_to_serve(arguments: argparse.Namespace, settings: Settings) -> Any:
    from mlxlite.models import library

    try:
        return _local_model(arguments.positional or settings.model, settings)
    except library.UnknownModel:
        if near := _near_verb(arguments.instead_of_verb):
            word = arguments.instead_of_verb
            raise _Usage(f"no verb or model {word!r}; did you mean {PROG} {near}?") from None
        raise


def _generate(arguments: argparse.Namespace, settings: Settings) -> int:
    words = [*arguments.text, *([arguments.prompt] if arguments.prompt is not None else [])]
    if not words and sys.stdin is not None and not sys.stdin.isatty():
        words = ["-"]
    if not 1 <= len(words) <= 2:
        raise _Usage("give one prompt, with the model before it or by --model, or - for stdin")
    name, text = (words[0] if len(words) == 2 else settings.model), words[-1]
    if text == "-":
        text = _stdin()
    ask = Ask(
        messages=None if arguments.raw else ({"role": "user", "content": text},),
        prompt=text if arguments.raw else None,
        max_tokens=_sampling(arguments, request_fields.MAX_TOKENS),
        **{field.name: _sampling(arguments, field) for field in request_fields.SAMPLING},
    )
    from mlxlite import launch

    worker = launch.start_engine(settings, _local_model(name, settings))

    from mlxlite import app
    from mlxlite.text.detokenizer import Detokenizer

    try:
        preparation = app.open_model(settings, worker)
        prepared = preparation(ask)
        if prepared.limit == 0:  # the engine always draws one
            print()
            return 0
        events: SimpleQueue[Event] = SimpleQueue()
        worker.submit(prepared.spec, events.put)
        detokenizer = Detokenizer(preparation.tokenizer)
        done = None
        while done is None:
            event = events.get()
            print(detokenizer.push(event.ids), end="", flush=True)
            done = event.done
        print(detokenizer.flush(), flush=True)
        if done.error is not None:
            raise done.error
        if done.finish is Finish.LENGTH:
            why = "--max-tokens sets the limit"
            if ask.max_tokens is None or prepared.limit < ask.max_tokens:
                why = "the context is full"
            print(f"cut off after {done.generated_tokens} tokens: {why}", file=sys.stderr)
        print(_statistics(done), file=sys.stderr)
    finally:
        worker.stop()
    return 0


def _stdin() -> str:
    """The prompt on stdin, less the newline that ends the last line of any file."""
    try:
        content = sys.stdin.buffer.read() if sys.stdin is not None else b""
        text = content.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise _Usage("the prompt on stdin is not UTF-8") from None
    if not text:
        raise _Usage("the prompt on stdin is empty")
    return text


def _statistics(done: Done) -> str:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    rate = (done.generated_tokens - 1) / done.decode_s if done.decode_s else 0.0
    return (
        f"{done.prompt_tokens} prompt tokens ({done.cached_tokens} cached), first token after "
        f"{done.prefill_s * 1000:.0f} ms, {done.generated_tokens} tokens at {rate:.1f} tok/s, "
        f"peak memory {peak / 1e6:.0f} MB"
    )


def _get(arguments: argparse.Namespace, settings: Settings) -> int:
    from mlxlite.models import install, progress

    model = install.get(arguments.name, settings.home, progress.for_terminal(sys.stderr))
    print(f"{model.name}  {model.folder}")
    return 0


def _ls(arguments: argparse.Namespace, settings: Settings) -> int:
    from mlxlite import launch
    from mlxlite.models import catalogue, library

    chosen = _served_by_default(settings)
    local = library.local_models(settings.home)
    rows = [("NAME", "TYPE", "WEIGHTS", "SIZE", "DENSE COPY", "")]
    for model in local:
        dense = launch.dense_folder(settings, model.folder)
        copies_bytes = sum(copy.stat().st_size for copy in dense.glob("*.safetensors"))
        rows.append((
            model.name,
            model.model_type,
            f"{model.bits}-bit" if model.bits else "dense",
            _megabytes(model.size_bytes),
            _megabytes(copies_bytes) if copies_bytes else "",
            "served by default" if model == chosen else "",
        ))  # fmt: skip
    for entry in catalogue.CATALOGUE.values():
        if entry.name not in {model.name for model in local}:
            note = f"not here yet: mlxlite get {entry.name}"
            note = f"served by default, {note}" if entry.name == chosen else note
            rows.append((entry.name, "", "", _megabytes(entry.snapshot_bytes), "", note))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, kind, weights, size, dense_copy, note in rows:
        print(
            f"{name:{widths[0]}}  {kind:{widths[1]}}  {weights:{widths[2]}}  {size:>{widths[3]}}  "
            f"{dense_copy:>{widths[4]}}  {note}".rstrip()
        )
    return 0


def _served_by_default(settings: Settings) -> Any:
    """The local model that `mlxlite` alone serves, the name it would fetch, or None if it fails."""
    from mlxlite.models import library

    try:
        return library.resolve(settings.model, settings.home)
    except library.NotLocal as missing:
        return missing.name
    except ModelError:
        return None


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"


def _fit_parser() -> _Parser:
    parser = _Parser(
        prog=f"{PROG} fit",
        allow_abbrev=False,
        description="Say what memory a model takes, and how much context fits.",
    )
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--context", metavar="TOKENS", help="default 8192, or the model's own")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_settings(parser, ("model", "memory_budget", "dtype", "home", "log_level"))
    return parser


def _fit(arguments: argparse.Namespace, settings: Settings) -> int:
    from mlxlite import fit_command

    if (text := arguments.context) is not None:
        if not (text.isascii() and text.isdigit() and 0 < int(text[:9]) == int(text)):
            raise _Usage(f"--context must be a whole number of tokens, not {text!r}")
    context = None if text is None else int(text)
    name = arguments.positional or settings.model
    return fit_command.run(name, context, arguments.json, settings)


def _gc_parser() -> _Parser:
    says = "Say what superseded files of the hub's cache take."
    parser = _Parser(prog=f"{PROG} gc", allow_abbrev=False, description=says)
    parser.add_argument("--yes", action="store_true", help="delete them")
    _add_settings(parser, ("home", "log_level"))
    return parser


def _gc(arguments: argparse.Namespace, settings: Settings) -> int:
    from mlxlite import gc_command

    return gc_command.run(arguments.yes)


def _bench_parser() -> _Parser:
    parser = _Parser(
        prog=f"{PROG} bench",
        allow_abbrev=False,
        description="Measure this server beside mlx_lm's, or another one, on the same weights.",
    )
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--shape", metavar="NAME", help="random weights: tiny, 135m, 1b, 3b, 8b")
    parser.add_argument(
        "--only", metavar="LEG,...", help="some of the legs, such as prompt,streams"
    )
    parser.add_argument(
        "--against",
        metavar="URL",
        action="append",
        default=[],
        help="a running OpenAI-compatible server instead of mlx_lm's; may be repeated",
    )
    parser.add_argument("--against-key", metavar="KEY", help="what it wants as Bearer")
    parser.add_argument("--alone", action="store_true", help="without another server")
    parser.add_argument("--packed", action="store_true", help="quantised weights as they are")
    parser.add_argument("--budget", metavar="S", default="180", help="of a leg; default 180")
    parser.add_argument("--json", metavar="FILE", help="write every value to this file")
    _add_settings(parser, ("model", "home", "log_level"))
    return parser


def _bench(arguments: argparse.Namespace, settings: Settings) -> int:
    from pathlib import Path

    from mlxlite.bench import client, command

    try:
        only = command.chosen(arguments.only.split(",") if arguments.only else ())
        for url in arguments.against:
            client.Base.parse(url)
        budget_s = float(arguments.budget)
        if not 0 < budget_s < 86_400:
            raise ValueError(f"--budget must be more than 0 seconds, not {arguments.budget}")
    except ValueError as error:
        raise _Usage(str(error)) from None
    name = arguments.positional or settings.model
    if arguments.shape is not None and name is not None:
        raise _Usage("give a model or --shape, not both")
    if arguments.alone and arguments.against:
        raise _Usage("give --alone or --against, not both")
    if arguments.shape is not None:
        model = command.make_shape(arguments.shape, settings)
    else:
        model = _local_model(name, settings)
    json_file = None if arguments.json is None else Path(arguments.json)
    return command.bench(
        command.Wanted(
            model=model,
            is_packed=arguments.packed,
            only=only,
            against=tuple(arguments.against),
            key=arguments.against_key,
            is_alone=arguments.alone,
            budget_s=budget_s,
            json_file=json_file,
        ),
        settings,
    )


_VERBS: dict[str, tuple[Callable[[], _Parser], Callable[[argparse.Namespace, Settings], int]]] = {
    "serve": (_serve_parser, _serve),
    "generate": (_generate_parser, _generate),
    "gen": (_generate_parser, _generate),
    "get": (_get_parser, _get),
    "ls": (_ls_parser, _ls),
    "fit": (_fit_parser, _fit),
    "gc": (_gc_parser, _gc),
    "bench": (_bench_parser, _bench),
}


# -------------------------------------------------------------------------------------- common


def _local_model(name: str | None, settings: Settings) -> Any:
    """The model to run; the default one is fetched when none is named and none is here (D5)."""
    from mlxlite.models import install, library, progress

    try:
        return library.resolve(name, settings.home)
    except library.NoLocalModel:
        return install.get(None, settings.home, progress.for_terminal(sys.stderr))


def _sampling(arguments: argparse.Namespace, field: Field) -> Any:
    """A flag that is a request field: the same type, range and words as over HTTP."""
    raw = getattr(arguments, field.name)
    flag = "--" + field.name.replace("_", "-")
    if raw is None:
        return None
    try:
        return request_fields.take({field.name: field.kind(raw)}, field)
    except ValueError:
        kind = request_fields.KIND_NAMES[field.kind]
        raise _Usage(f"{flag} must be of type {kind}, not {raw!r}") from None
    except BadRequest as error:
        raise _Usage(error.message.replace(field.name, flag, 1)) from None


def _help() -> str:
    return (
        f"usage: {PROG} [serve] [MODEL] [flags]   serve a model over HTTP (the default)\n"
        f"       {PROG} generate [MODEL] TEXT     answer one prompt\n"
        f"       {PROG} get [NAME|REPO|FILE.gguf] fetch or import a model\n"
        f"       {PROG} ls                        list the local models\n"
        f"       {PROG} fit [MODEL]               what memory a model takes\n"
        f"       {PROG} bench [MODEL]             measure it beside mlx_lm's server\n"
        f"       {PROG} --version | --help | VERB --help\n"
    )


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, Callable[..., int]]:
    first = arguments[0] if arguments else ""
    is_verb = first in _VERBS
    make_parser, act = _VERBS[first if is_verb else "serve"]
    parser = make_parser()
    parsed, unknown = parser.parse_known_args(arguments[1:] if is_verb else arguments)
    parsed.instead_of_verb = "" if is_verb else first
    for word in unknown:
        if word.startswith("-"):
            flags = [name for action in parser._actions for name in action.option_strings]
            flags += ["--version", "--help"]
            near = difflib.get_close_matches(word.partition("=")[0], flags, n=1)
            raise _Usage(f"unknown flag {word}" + (f"; did you mean {near[0]}?" if near else ""))
        if verb := _near_verb(parsed.instead_of_verb):
            raise _Usage(f"unknown verb {first!r}; did you mean {PROG} {verb}?")
        raise _Usage(f"unexpected argument {word!r}")
    return parsed, act


def _near_verb(word: str) -> str | None:
    """The verb that a word in the place of one resembles."""
    return next(iter(difflib.get_close_matches(word, _VERBS, n=1)), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["--version"]:
        print(f"{PROG} {__version__}")
        return 0
    if arguments[:1] in (["--help"], ["-h"], ["help"]):
        print(_help(), end="")
        return 0
    try:
        parsed, act = _parse(arguments)
        names = {setting.name for setting in fields(Settings)}
        given = {k: v for k, v in vars(parsed).items() if k in names and v is not None}
        if act is _generate:  # its sampling flags are the request's, not the server's
            given = {k: v for k, v in given.items() if k in _ENGINE_SETTINGS}
        if act is _bench and "MLXLITE_LOG_LEVEL" not in os.environ:
            given.setdefault("log_level", "warning")  # a line a request would bury the report
        settings = config.build(given)
        logging.basicConfig(
            level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s"
        )
        if settings.log_level != "debug":
            for client in ("httpx", "httpx2"):  # the hub's: a line a request
                logging.getLogger(client).setLevel("WARNING")
        return act(parsed, settings)
    except (_Usage, SettingError) as error:
        print(f"{PROG}: {error}; see {PROG} --help", file=sys.stderr)
        return 2
    except MlxliteError as error:
        print(f"{PROG}: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def entry() -> NoReturn:
    """The `mlxlite` command."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
