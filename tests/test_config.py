"""config: every setting by flag and by variable, and every way to get one wrong."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from mlxlite import config
from mlxlite.config import SettingError, Settings

# A good value of each setting: as text, and as parsed. A new setting needs a line here.
GOOD: dict[str, tuple[Any, Any]] = {
    "model": ("org/name", "org/name"),
    "served_name": ("mine", "mine"),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("1234", 1234),
    "unix": ("/tmp/x.sock", Path("/tmp/x.sock")),
    "dtype": ("float16", "float16"),
    "batch": ("3", 3),
    "memory_budget": ("1.5", 1.5),
    "prompt_cache": ("0.5", 0.5),
    "queue": ("0", 0),
    "replay": ("off", "off"),
    "max_tokens": ("7", 7),
    "temperature": ("0.25", 0.25),
    "top_p": ("1", 1.0),
    "top_k": ("40", 40),
    "thinking": ("off", "off"),
    "reasoning_field": ("reasoning_content", "reasoning_content"),
    "hlg_sampling": ("on", "on"),
    "hlg_width": ("2.5", 2.5),
    "hlg_shoulder": ("0", 0.0),
    "hlg_toe": ("100", 100.0),
    "hlg_pivot_offset": ("1", 1.0),
    "fill": ("1", "strict"),
    "fill_max_span": ("16.9", 16),
    "fill_k": ("4", 4),
    "fill_candidates": ("1.5", 1),
    "fill_index_max": ("2048", 2048),
    "fill_append_chunk_size": ("4", 4),
    "fill_trace": ("/tmp/fill.jsonl", "/tmp/fill.jsonl"),
    "embedding_pooling": ("mean", "mean"),
    "chat_template": ("t.jinja", "t.jinja"),
    "api_key": ("secret", "secret"),
    "allow_host": (["a.test", "b.test"], ("a.test", "b.test")),
    "cors_origin": (["https://a.test"], ("https://a.test",)),
    "grammar": ("off", "off"),
    "grammar_jump": ("off", "off"),
    "grammar_fallback": ("refuse", "refuse"),
    "grammar_debug": ("1", "1"),
    "heartbeat_s": ("0.5", 0.5),
    "shutdown_s": ("0", 0.0),
    "log_level": ("debug", "debug"),
    "home": ("/tmp/home", Path("/tmp/home")),
}
BY_NAME = {setting.name: setting for setting in fields(Settings)}
NUMBERS = [
    name for name, s in BY_NAME.items() if config.knob(s).parse in (int, float, config.floored)
]


def env_of(name: str) -> str:
    variable = config.knob(BY_NAME[name]).env
    assert variable is not None
    return variable


def as_variable(raw: Any) -> str:
    return raw if isinstance(raw, str) else ", ".join(raw)


def test_defaults() -> None:
    settings = config.build({}, {})
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 8080, None)
    assert settings.home == Path("~/.cache/mlxlite").expanduser()
    with pytest.raises(FrozenInstanceError):
        settings.port = 1  # type: ignore[misc]


def test_every_setting_is_covered_and_has_a_variable() -> None:
    assert set(GOOD) == set(BY_NAME)
    for name in BY_NAME:
        assert env_of(name) == f"MLXLITE_{name.upper()}"


@pytest.mark.parametrize("name", GOOD)
def test_flag_and_variable(name: str) -> None:
    raw, value = GOOD[name]
    assert getattr(config.build({name: raw}, {}), name) == value
    assert getattr(config.build({}, {env_of(name): as_variable(raw)}), name) == value


@pytest.mark.parametrize("name", GOOD)
def test_flag_beats_variable(name: str) -> None:
    raw, value = GOOD[name]
    # Not even looked at: a flag makes a broken variable harmless.
    assert getattr(config.build({name: raw}, {env_of(name): "no, this is bad"}), name) == value


@pytest.mark.parametrize("name", GOOD)
def test_empty_variable_is_absent(name: str) -> None:
    assert config.build({}, {env_of(name): ""}) == config.build({}, {})


@pytest.mark.parametrize("name", NUMBERS)
def test_wrong_numbers(name: str) -> None:
    spec = config.knob(BY_NAME[name])
    bad = ["abc", "nan", "-inf", "1e", "0x10", "१x", "--", "1,5", "9" * 5000 if spec.high else "x"]
    if spec.low is not None and spec.parse is not config.floored:  # those are raised to it
        bad.append(str(int(spec.low) - 1))
    if spec.high is not None:
        bad += [str(int(spec.high) + 1), "inf"]
    if spec.parse is int:
        bad += ["1.5", "1e3", "inf"]
    for raw in bad:
        for flags, environ, source in (
            ({name: raw}, {}, config.flag(BY_NAME[name])),
            ({}, {env_of(name): raw}, env_of(name)),
        ):
            with pytest.raises(SettingError) as caught:
                config.build(flags, environ)
            assert caught.value.message.startswith(f"{source} must be "), raw
            assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", NUMBERS)
def test_limits_are_inclusive(name: str) -> None:
    spec = config.knob(BY_NAME[name])
    for limit in (spec.low, spec.high):
        if limit is not None:
            assert getattr(config.build({name: f"{limit:g}"}, {}), name) == limit


def test_messages_say_what_is_allowed() -> None:
    def message(**flags: str) -> str:
        with pytest.raises(SettingError) as caught:
            config.build(flags, {})
        return caught.value.message

    assert message(port="70000") == "--port must be at most 65535, not 70000"
    assert message(port="-1") == "--port must be at least 0, not -1"
    assert message(port="http") == "--port must be a whole number, not 'http'"
    assert message(temperature="hot") == "--temperature must be a number, not 'hot'"
    assert message(dtype="float8").startswith("--dtype must be one of auto, float32, ")
    assert message(thinking="yes") == "--thinking must be one of on, off, not 'yes'"
    assert message(hlg_sampling="true").startswith("--hlg-sampling must be one of on, off")
    assert message(reasoning_field="none").startswith("--reasoning-field must be one of both, ")
    assert message(hlg_toe="101") == "--hlg-toe must be at most 100, not 101"


@pytest.mark.parametrize(
    ("slip", "near"),
    [
        ("MLXLITE_PROT", "MLXLITE_PORT"),
        ("MLXLITE_APIKEY", "MLXLITE_API_KEY"),
        ("MLXLITE_MAX_TOKEN", "MLXLITE_MAX_TOKENS"),
    ],
)
def test_unknown_variables_are_refused(slip: str, near: str) -> None:
    with pytest.raises(SettingError) as caught:
        config.build({}, {slip: "1"})
    assert caught.value.message == (
        f"environment variable {slip} is not known; did you mean {near}?"
    )


def test_other_variables_pass() -> None:
    ours = {"MLXLITE_BLAS": "/lib/libfast.so", "MLXLITE_CHECK": "1"}
    environ = {**ours, "PATH": "/bin", "MLX_LITE": "x", "HOME": "/root"}
    assert config.build({}, environ) == config.build({}, {})


def test_home_is_expanded() -> None:
    assert config.build({"home": "~/m"}, {}).home == Path("~/m").expanduser()
    with pytest.raises(SettingError, match="--home"):
        config.build({"home": "~nobody-of-this-name/m"}, {})


def test_an_empty_key_is_refused() -> None:
    for flags in ({"api_key": ""}, {"api_key": "  "}):
        with pytest.raises(SettingError, match="--api-key must not be empty"):
            config.build(flags, {})
