"""prepare: which value wins, how long an answer may be, which ids a prompt becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from mlxlite import config
from mlxlite.errors import BadRequest, TooLong
from mlxlite.prepare import Preparation
from mlxlite.text.guides import StopGuide
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import Ask, ModelFacts
from tests import tiny

MESSAGES = ({"role": "user", "content": "hello world"},)
BOS, EOS = "<|endoftext|>", "<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.make_tokenizer(), eos_ids=[0, 2], bos_token=BOS, eos_token=EOS)


def make(
    tokenizer: Tokenizer,
    *,
    template: str = tiny.TEMPLATE,
    context: int = 1024,
    defaults: dict[str, Any] | None = None,
    **flags: str,
) -> Preparation:
    facts = ModelFacts("llama", "cpu", "float32", 1, context, 512)
    chat = ChatTemplate(template, bos_token=BOS, eos_token=EOS)
    return Preparation(config.build(flags, {}), tokenizer, chat, facts, defaults or {})


def ask(**fields: Any) -> Ask:
    return Ask(messages=MESSAGES, **fields)


# ---------------------------------------------------------------------- which value wins


@pytest.mark.parametrize(
    ("field", "request_value", "server", "model", "built_in"),
    [
        ("temperature", 0.1, 0.2, 0.3, 0.7),
        ("temperature", 0.0, 0.2, 0.3, 0.7),
        ("top_p", 0.1, 0.2, 0.3, 0.0),
        ("top_p", 0.0, 0.2, 0.3, 0.0),
        ("top_k", 1, 2, 3, 0),
        ("top_k", 0, 2, 3, 0),
    ],
)
def test_precedence(
    tokenizer: Tokenizer,
    field: str,
    request_value: float,
    server: float,
    model: float,
    built_in: float,
) -> None:
    """Spec 10 section 2: request, server, generation config, built-in; 0 is a value."""

    def resolved(asked: bool, flagged: bool, configured: bool) -> float:
        preparation = make(
            tokenizer,
            defaults={field: model} if configured else {},
            **({field: str(server)} if flagged else {}),
        )
        sampling = preparation.sampling(ask(**({field: request_value} if asked else {})))
        return float(getattr(sampling, field))

    assert resolved(True, True, True) == request_value
    assert resolved(True, False, False) == request_value
    assert resolved(False, True, True) == server
    assert resolved(False, False, True) == model
    assert resolved(False, False, False) == built_in


def test_min_p_comes_from_the_request_alone(tokenizer: Tokenizer) -> None:
    preparation = make(tokenizer, defaults={"min_p": 0.5})
    assert preparation.sampling(ask()).min_p == 0.0
    assert preparation.sampling(ask(min_p=0.25)).min_p == 0.25


@pytest.mark.parametrize("junk", ["0.5", None, True, [0.5], {"a": 1}])
def test_generation_config_junk_is_ignored(tokenizer: Tokenizer, junk: Any) -> None:
    sampling = make(tokenizer, defaults={"temperature": junk, "top_k": junk}).sampling(ask())
    assert (sampling.temperature, sampling.top_k) == (0.7, 0)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k"])
@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "-1"])
def test_generation_config_nonsense_is_ignored(tokenizer: Tokenizer, name: str, raw: str) -> None:
    defaults = json.loads(f'{{"{name}": {raw}}}')  # Python writes and reads these
    assert make(tokenizer, defaults=defaults).sampling(ask(seed=1)) == make(tokenizer).sampling(
        ask(seed=1)
    )


# ------------------------------------------------------------------------------ max tokens


def test_max_tokens(tokenizer: Tokenizer) -> None:
    plain, flagged = make(tokenizer), make(tokenizer, max_tokens="50")
    room = 1024 - len(plain.prompt_ids(ask()))
    assert plain(ask()).limit == plain(ask()).spec.max_tokens == room
    assert flagged(ask()).limit == 50
    assert flagged(ask(max_tokens=70)).limit == 70  # the request wins, also upwards
    assert flagged(ask(max_tokens=7)).limit == 7
    assert plain(ask(max_tokens=32_000)).limit == room  # clients.md, Requests 1
    assert plain(ask(max_tokens=10**30)).limit == room
    nothing = plain(ask(max_tokens=0))
    assert nothing.limit == 0 and nothing.spec.max_tokens == 1


def test_too_long(tokenizer: Tokenizer) -> None:
    count = len(make(tokenizer).prompt_ids(ask()))
    assert make(tokenizer, context=count + 1)(ask()).limit == 1
    for context in (count, count - 1, 1):
        with pytest.raises(TooLong) as caught:
            make(tokenizer, context=context)(ask(max_tokens=1))
        error = caught.value
        assert (error.status, error.code, error.param) == (
            400,
            "context_length_exceeded",
            "messages",
        )
        assert str(count) in error.message and str(context) in error.message
    with pytest.raises(TooLong) as caught:
        make(tokenizer, context=1)(Ask(prompt="hello world"))
    assert caught.value.param == "prompt"


# ----------------------------------------------------------------------------------- seeds


def test_fresh_seeds_differ(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxlite.prepare.time.time", lambda: 1e9)  # one and the same millisecond
    preparation = make(tokenizer)
    seeds = [preparation.sampling(ask()).seed for _ in range(1000)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, 2**64 + 5, -(10**30)])
def test_explicit_seed(tokenizer: Tokenizer, seed: int) -> None:
    preparation = make(tokenizer)
    first, second = (preparation(ask(seed=seed)).spec for _ in range(2))
    assert first == second
    assert first.sampling.seed == seed % 2**64


# -------------------------------------------------------------------------------- prompt ids


def test_chat_prompt(tokenizer: Tokenizer) -> None:
    spec = make(tokenizer)(ask()).spec
    text = "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(spec.prompt_ids, keep_special=True) == text
    assert spec.prompt_ids[0] == tokenizer.token_id("<|im_start|>")  # not spelled letter by letter


def test_raw_prompt(tokenizer: Tokenizer) -> None:
    spec = make(tokenizer)(Ask(prompt="hello world")).spec
    assert tokenizer.decode(spec.prompt_ids, keep_special=True) == "hello world"


@pytest.mark.parametrize("written", ["", "{{ bos_token }}"])
@pytest.mark.parametrize("added", [False, True])
def test_bos_is_there_once(written: str, added: bool) -> None:
    """Template and post-processor may both write it (spec 10 section 7.3)."""
    backend = tiny.make_tokenizer()
    if added:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, 0)]
        )
    tokenizer = Tokenizer(backend, bos_token=BOS, eos_token=EOS)
    ids = make(tokenizer, template=written + tiny.TEMPLATE)(ask()).spec.prompt_ids
    assert ids.count(0) == (1 if written or added else 0)
    assert written == "" and not added or ids[0] == 0


def test_a_prompt_is_never_empty(tokenizer: Tokenizer) -> None:
    assert make(tokenizer, template="{# nothing #}")(ask()).spec.prompt_ids == (0,)
    assert make(tokenizer)(Ask(prompt="")).spec.prompt_ids == (0,)
    without_bos = Tokenizer(tiny.make_tokenizer(), eos_ids=[2])
    assert make(without_bos, template="")(ask()).spec.prompt_ids == (2,)
    with_nothing = Tokenizer(tiny.make_tokenizer())
    assert make(with_nothing, template="")(ask()).spec.prompt_ids == (0,)


def test_eos_set(tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert make(tokenizer)(ask()).spec.eos_ids == {0, 2}
    # The config names one, the tokenizer another: both end an answer.
    folder = tiny.make_model(tmp_path / "m", eos_token_id=1)
    assert make(Tokenizer.load(folder))(ask()).spec.eos_ids == {1, 2}


def test_stops_become_a_guide(tokenizer: Tokenizer) -> None:
    preparation = make(tokenizer)
    assert preparation(ask()).spec.guide is None
    prepared = preparation(ask(stop=("a", "b")))
    assert prepared.stops == ("a", "b")
    assert isinstance(prepared.spec.guide, StopGuide)
    assert preparation(ask(stop=("a",))).spec.guide is not prepared.spec.guide  # one a row


def test_template_options(tokenizer: Tokenizer) -> None:
    """Only what is given, and only real booleans, reach the template (spec 10 section 1)."""
    template = (
        "{{ enable_thinking is defined }} {{ enable_thinking }} {{ other is defined }}"
        "{% for m in messages %}{% endfor %}"
    )
    preparation = make(tokenizer, template=template)

    def shown(**options: Any) -> str:
        return tokenizer.decode(preparation.prompt_ids(ask(template_options=options)))

    assert shown() == "False  False"
    assert shown(enable_thinking=True) == "True True False"
    assert shown(enable_thinking=False) == "True False False"
    assert shown(enable_thinking="yes") == "False  False"
    assert shown(other=True) == "False  False"


def test_wrong_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest) as caught:
        make(tokenizer)(Ask(messages=({"role": "user"},)))
    assert caught.value.param == "messages[0].content"
    template = "{{ raise_exception('no such role here') }}"
    with pytest.raises(BadRequest, match="no such role here"):
        make(tokenizer, template=template)(ask())
