"""Settings: one frozen dataclass, from which flags, environment, `--help` and the README derive.

Each field is spelled once, here, with its flag, environment variable, range and one line of help
(spec 80 sections 2 and 3). A flag beats its variable, a variable beats the default, and a value
that is not understood is an error at start, whichever way it came. Argument vectors are parsed by
`cli`; the environment is read here and nowhere else, but for two variables that are the engine's
own: `MLXLITE_BLAS`, which has to come earlier, and `MLXLITE_CHECK`, which is for tests.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from mlxlite.errors import MlxliteError


class SettingError(MlxliteError):
    """A flag or variable with a value that cannot be used; the command line exits with 2."""


@dataclass(frozen=True, slots=True)
class Knob:
    """What a setting is called outside, and what it may be."""

    help: str
    env: str | None = None
    parse: Callable[[str], Any] = str  # str, int, float, floored or Path
    choices: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)  # other words for some of these
    low: float | None = None
    high: float | None = None
    many: bool = False  # a flag may be given several times, a variable holds a comma list
    metavar: str | None = None


def floored(raw: str) -> int:
    """The whole part of a number. Raises ValueError. A setting of this kind takes its lowest value
    for any that is lower (spec 50 section 2)."""
    try:
        return math.floor(float(raw))
    except OverflowError:
        raise ValueError(f"{raw} is not finite") from None


def _knob(default: Any, help: str, **rest: Any) -> Any:
    return field(default=default, metadata={"knob": Knob(help, **rest)})


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything an operator can choose. Immutable once the server starts."""

    model: str | None = _knob(
        None, "model: catalogue name, hub repository or folder", env="MLXLITE_MODEL"
    )
    served_name: str | None = _knob(
        None, "model id shown to clients (default: the model's own name)", env="MLXLITE_SERVED_NAME"
    )
    host: str = _knob("127.0.0.1", "address to listen on", env="MLXLITE_HOST")
    port: int = _knob(
        8080,
        "port to listen on; 0 picks a free one",
        env="MLXLITE_PORT",
        parse=int,
        low=0,
        high=65535,
    )
    unix: Path | None = _knob(
        None,
        "listen on this unix socket instead of TCP",
        env="MLXLITE_UNIX",
        parse=Path,
        metavar="PATH",
    )
    dtype: str = _knob(
        "auto",
        "dtype of the activations; auto is float32 on a CPU, else the model's own",
        env="MLXLITE_DTYPE",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    batch: int = _knob(
        8, "rows that decode at the same time", env="MLXLITE_BATCH", parse=int, low=1, high=256
    )
    memory_budget: float | None = _knob(
        None,
        "memory to use at most, in GB of 10^9 bytes (default: three quarters of the machine's)",
        env="MLXLITE_MEMORY_BUDGET",
        parse=float,
        low=0.01,
        high=100_000,
        metavar="GB",
    )
    prompt_cache: float = _knob(
        8,
        "memory for kept prompt prefixes, in GiB; 0 keeps none",
        env="MLXLITE_PROMPT_CACHE",
        parse=float,
        low=0,
        high=100_000,
        metavar="GIB",
    )
    replay: str = _knob(
        "on",
        "replay layers on a CPU where that is quicker, with kernels that g++ compiles meanwhile",
        env="MLXLITE_REPLAY",
        choices=("on", "off"),
    )
    queue: int = _knob(
        64,
        "requests that may wait for a row; one more is answered 429",
        env="MLXLITE_QUEUE",
        parse=int,
        low=0,
        high=100_000,
    )
    max_tokens: int | None = _knob(
        None,
        "limit of an answer that asks for none (default: the room left in the context)",
        env="MLXLITE_MAX_TOKENS",
        parse=int,
        low=1,
    )
    temperature: float | None = _knob(
        None,
        "temperature of requests that give none (default: the model's own, else 0.7)",
        env="MLXLITE_TEMPERATURE",
        parse=float,
        low=0,
        high=5,
    )
    top_p: float | None = _knob(
        None, "top-p of requests that give none", env="MLXLITE_TOP_P", parse=float, low=0, high=1
    )
    top_k: int | None = _knob(
        None, "top-k of requests that give none", env="MLXLITE_TOP_K", parse=int, low=0
    )
    thinking: str | None = _knob(
        None,
        "whether models that can think do (default: the template's own)",
        env="MLXLITE_THINKING",
        choices=("on", "off"),
    )
    reasoning_field: str = _knob(
        "both",
        "field that reasoning goes out in",
        env="MLXLITE_REASONING_FIELD",
        choices=("both", "reasoning", "reasoning_content"),
    )
    hlg_sampling: str = _knob(
        "off",
        "bend probabilities by the HLG tone curve instead of filters",
        env="MLXLITE_HLG_SAMPLING",
        choices=("on", "off"),
    )
    hlg_width: float = _knob(
        4.0, "its straight part, nats", env="MLXLITE_HLG_WIDTH", parse=float, low=0, high=100
    )
    hlg_shoulder: float = _knob(
        4.0, "how it bends above", env="MLXLITE_HLG_SHOULDER", parse=float, low=0, high=100
    )
    hlg_toe: float = _knob(
        6.0, "how it bends below", env="MLXLITE_HLG_TOE", parse=float, low=0, high=100
    )
    hlg_pivot_offset: float = _knob(
        6.0,
        "how far below the best token it turns, nats",
        env="MLXLITE_HLG_PIVOT_OFFSET",
        parse=float,
        low=0,
        high=100,
    )
    grammar: str = _knob(
        "on",
        "structured output by grammars",
        env="MLXLITE_GRAMMAR",
        choices=("on", "off", "1", "0"),
    )
    grammar_jump: str = _knob(
        "on",
        "text that a grammar leaves no choice about goes through the model in one forward",
        env="MLXLITE_GRAMMAR_JUMP",
        choices=("on", "off", "1", "0"),
    )
    grammar_fallback: str = _knob(
        "warn",
        "what cannot be enforced is asked for in the prompt, with a Warning header, or refused",
        env="MLXLITE_GRAMMAR_FALLBACK",
        choices=("warn", "refuse"),
    )
    fill: str = _knob(
        "off",
        "put in known tokens of calls without decoding them; echo: and try spans seen before",
        env="MLXLITE_FILL",
        choices=("off", "strict", "echo"),
        aliases={"0": "off", "1": "strict"},
    )
    fill_max_span: int = _knob(
        32,
        "tokens that are put in at once, at most",
        env="MLXLITE_FILL_MAX_SPAN",
        parse=floored,
        low=2,
        high=4096,
    )
    fill_k: int = _knob(
        8,
        "tokens in a row that echo looks for",
        env="MLXLITE_FILL_K",
        parse=floored,
        low=2,
        high=1024,
    )
    fill_candidates: int = _knob(
        24,
        "how many places echo compares, nearest first",
        env="MLXLITE_FILL_CANDIDATES",
        parse=floored,
        low=1,
        high=10_000,
    )
    fill_index_max: int = _knob(
        131_072,
        "tokens of a request that echo looks in",
        env="MLXLITE_FILL_INDEX_MAX",
        parse=floored,
        low=1024,
        high=100_000_000,
    )
    fill_append_chunk_size: int = _knob(
        0,
        "tokens of a fill in one forward, at most; 0: all",
        env="MLXLITE_FILL_APPEND_CHUNK_SIZE",
        parse=int,
        low=0,
        high=100_000,
    )
    fill_trace: str | None = _knob(
        None,
        "log each fill (1), or write it as a line of JSON to this file",
        env="MLXLITE_FILL_TRACE",
        metavar="1|FILE",
    )
    grammar_debug: str = _knob(
        "off",
        "log compiles, masks and ends of grammars",
        env="MLXLITE_GRAMMAR_DEBUG",
        choices=("on", "off", "1", "0"),
    )
    embedding_pooling: str = _knob(
        "none",
        "pooling of embeddings from a model that was not made for them; over that of one that was",
        env="MLXLITE_EMBEDDING_POOLING",
        choices=("none", "last", "mean"),
    )
    chat_template: str | None = _knob(
        None,
        "Jinja file that replaces the model's chat template",
        env="MLXLITE_CHAT_TEMPLATE",
        metavar="FILE",
    )
    api_key: str | None = _knob(
        None, "key that clients must send", env="MLXLITE_API_KEY", metavar="KEY"
    )
    allow_host: tuple[str, ...] = _knob(
        (), "further host name to answer to", env="MLXLITE_ALLOW_HOST", many=True, metavar="NAME"
    )
    cors_origin: tuple[str, ...] = _knob(
        (),
        "web origin that may call the server; * allows any",
        env="MLXLITE_CORS_ORIGIN",
        many=True,
        metavar="ORIGIN",
    )
    heartbeat_s: float = _knob(
        15.0,
        "seconds of silence after which a stream sends a comment",
        env="MLXLITE_HEARTBEAT_S",
        parse=float,
        low=0.05,
        high=3600,
    )
    shutdown_s: float = _knob(
        10.0,
        "seconds that running answers get when the server stops",
        env="MLXLITE_SHUTDOWN_S",
        parse=float,
        low=0,
        high=3600,
    )
    log_level: str = _knob(
        "info",
        "how much to log",
        env="MLXLITE_LOG_LEVEL",
        choices=("debug", "info", "warning", "error"),
    )
    home: Path = _knob(
        Path("~/.cache/mlxlite"),
        "folder of models and caches",
        env="MLXLITE_HOME",
        parse=Path,
        metavar="DIR",
    )


def knob(setting: Field[Any]) -> Knob:
    """The outside description of a field of `Settings`."""
    found = setting.metadata["knob"]
    assert isinstance(found, Knob)
    return found


def flag(setting: Field[Any]) -> str:
    """`--like-this` for the field `like_this`."""
    return "--" + setting.name.replace("_", "-")


def default(setting: Field[Any]) -> Any:
    assert setting.default is not MISSING
    return setting.default


def build(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from parsed flags (field name -> raw text or list; absent = not given) and
    variables.

    Raises SettingError for a value that is out of range or not understood, and for a variable that
    begins with MLXLITE_ and is none of ours (a typing slip must not be silent).
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        spec = knob(setting)
        raw = flags.get(setting.name)
        source = flag(setting)
        if raw is None and spec.env and environ.get(spec.env, "") != "":
            raw, source = environ[spec.env], spec.env
            if spec.many:
                raw = [part.strip() for part in raw.split(",") if part.strip()]
        if raw is None:
            continue
        values[setting.name] = (
            tuple(_value(source, spec, part) for part in raw)
            if spec.many
            else _value(source, spec, raw)
        )
    _refuse_unknown(environ)
    values.setdefault("home", Settings().home.expanduser())
    return Settings(**values)


# Read by the engine: which BLAS, before any setting; and whether it checks itself at each step.
_OTHER_VARIABLES = frozenset({"MLXLITE_BLAS", "MLXLITE_CHECK"})


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    ours = {knob(f).env for f in fields(Settings)} | _OTHER_VARIABLES
    for name in environ:
        if name.startswith("MLXLITE_") and name not in ours:
            near = difflib.get_close_matches(name, [o for o in ours if o], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingError(f"environment variable {name} is not known{hint}")


def _value(source: str, spec: Knob, raw: str) -> Any:
    if spec.choices:
        raw = spec.aliases.get(raw, raw)
        if raw not in spec.choices:
            raise SettingError(f"{source} must be one of {', '.join(spec.choices)}, not {raw!r}")
        return raw
    if spec.parse in (str, Path) and not raw.strip():
        raise SettingError(f"{source} must not be empty")  # most often a variable that is not set
    try:
        value = spec.parse(raw)
        if isinstance(value, Path):
            value = value.expanduser()
    except RuntimeError:
        raise SettingError(f"{source}: there is no such user's home: {raw!r}") from None
    except ValueError:
        kinds: dict[Any, str] = {int: "a whole number", str: "text", Path: "text"}
        kind = kinds.get(spec.parse, "a number")
        raise SettingError(f"{source} must be {kind}, not {raw!r}") from None
    if spec.parse is floored and spec.low is not None:
        value = max(value, int(spec.low))
    if spec.low is not None and not value >= spec.low:  # not >=: catches NaN too
        raise SettingError(f"{source} must be at least {spec.low:g}, not {raw}")
    if spec.high is not None and not value <= spec.high:
        raise SettingError(f"{source} must be at most {spec.high:g}, not {raw}")
    return value
