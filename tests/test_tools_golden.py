"""Every family's golden table: detection, prompt, and each output at every cut."""

from __future__ import annotations

import json

import pytest

from mlxlite.text.channels import thinking_of
from mlxlite.text.template import ChatTemplate
from mlxlite.text.tools.families import family_of, route
from tests.folded import Folded, run, sink_of, tokenizer_with
from tests.golden.markers import FAMILIES
from tests.golden.shapes import ADD, CHAT, TOOLS, Case, Golden

pytestmark = pytest.mark.slow

CASES = [
    pytest.param(golden, case, id=f"{golden.family}-{n}")
    for golden in FAMILIES
    for n, case in enumerate(golden.cases)
]


def answer(golden: Golden, portions: list[str]) -> Folded:
    tokenizer = tokenizer_with(*golden.specials)
    sink = sink_of(
        tokenizer,
        route(golden.template, golden.model_type, TOOLS),
        thinking_of(golden.template, golden.model_type),
        golden.starts_open,
    )
    folded = run(sink, tokenizer, portions)
    assert (sink.calls, sink.completed_calls) == (len(folded.calls),) * 2
    return folded


@pytest.mark.parametrize("golden", FAMILIES, ids=lambda golden: golden.family)
def test_the_template_tells_the_family(golden: Golden) -> None:
    assert family_of(golden.template, golden.model_type).name == golden.family
    template = ChatTemplate(golden.template)
    assert template.render(CHAT, tools=[ADD]) == golden.prompt


@pytest.mark.parametrize(("golden", "case"), CASES)
def test_outputs(golden: Golden, case: Case) -> None:
    whole = answer(golden, [case.output])
    calls = [(name, json.loads(arguments)) for _, name, arguments in whole.calls]
    assert whole.content == case.content
    assert whole.reasoning == case.reasoning
    assert calls == list(case.calls)
    for _, _, arguments in whole.calls:
        shown = json.dumps(json.loads(arguments), ensure_ascii=False, separators=(",", ":"))
        assert arguments == shown, "compact"


@pytest.mark.parametrize(("golden", "case"), CASES)
def test_outputs_do_not_depend_on_the_cuts(golden: Golden, case: Case) -> None:
    text = case.output
    whole = answer(golden, [text])
    assert answer(golden, list(text)) == whole
    tokenizer = tokenizer_with(*golden.specials)
    tokens = [tokenizer.token_text(i) for i in tokenizer.encode(text)]
    if "\ufffd" not in "".join(tokens):
        assert answer(golden, tokens) == whole
    for cut in range(1, len(text)):
        assert answer(golden, [text[:cut], text[cut:]]) == whole, text[:cut]
