"""Preparations for tests, on the tiny model's tokenizer and any template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlite import config
from mlxlite.prepare import Preparation
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tokenizer import Tokenizer
from mlxlite.types import Ask, ModelFacts
from tests import tiny

MESSAGES = ({"role": "user", "content": "hello world"},)
BOS, EOS = "<|endoftext|>", "<|im_end|>"
TOKENIZER = Tokenizer(tiny.make_tokenizer(), eos_ids=[0, 2], bos_token=BOS, eos_token=EOS)
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)


def make(
    tokenizer: Tokenizer = TOKENIZER,
    *,
    template: str = tiny.TEMPLATE,
    context: int = 1024,
    defaults: Mapping[str, Any] | None = None,
    model_type: str = "llama",
    vocab_size: int = 512,
    **flags: str,
) -> Preparation:
    facts = ModelFacts(model_type, "cpu", "float32", 1, context, vocab_size)
    chat = ChatTemplate(template, bos_token=BOS, eos_token=EOS)
    return Preparation(config.build(flags, {}), tokenizer, chat, facts, defaults or {})


def ask(**fields: Any) -> Ask:
    return Ask(**{"messages": MESSAGES, **fields})


def rendered(preparation: Preparation, request: Ask) -> str:
    """The prompt as text, special tokens spelled out."""
    return preparation.tokenizer.decode(preparation.prompt(request).ids, keep_special=True)
