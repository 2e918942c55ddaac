"""The sandbox of chat templates: its dialect, what it refuses, and its limits of time and size."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from mlxlite.errors import BadRequest
from mlxlite.text.template import ChatTemplate

pytestmark = pytest.mark.slow


def turns(*pairs: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[pair[0]], "content": pair[2:]} for pair in pairs]


def render(source: str, *pairs: str) -> str:
    return ChatTemplate(source).render(turns(*pairs))


# ------------------------------------------------------------------------------------ the dialect


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in [1, 2, 3] if i != 2 %}{{ loop.index }}{{ i }}{% endfor %}", "1123"),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% generation %}a{{ messages[0].content }}{% endgeneration %}b", "axb"),
        ("{% generation %}{% set q = 1 %}{% endgeneration %}{{ q is defined }}", "False"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}", '{"a": 2, "b": 1}'),
        ("{{ [1, 'é'] | tojson(separators=(',', ':'), ensure_ascii=true) }}", '[1,"\\u00e9"]'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ '<b>' ~ 1 ~ none ~ ('x' ~ 2) }}", "<b>1Nonex2"),
        ("{{ missing ~ 'x' }}", "x"),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}"
         "{{ ns.n }}", "3"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) }}{{ f(x='y') }}", "[1][y]"),
        ("{% macro f() %}<{{ caller() }}>{% endmacro %}{% call f() %}in{% endcall %}", "<in>"),
        ("{% for x in [[1, [2]]] recursive %}{% if x is iterable %}({{ loop(x) }})"
         "{% else %}{{ x }}{% endif %}{% endfor %}", "(1(2))"),
        ("{{ 'a,b'.split(',') | join('-') }}{{ 'x'.replace('x', 'yy') }}", "a-byy"),
        ("{{ ['a', 'b'] | map('upper') | join }}{{ [1, 2] | select('odd') | list }}", "AB[1]"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '{:>4}'.format('x') }}", "a-007   x"),
        ("{{ '%s' | format('q') }}", "q"),
        ("{{ 'a\\nb' | indent(2) }}{{ 'x' | center(3) }}{{ 'z'.ljust(3) }}|", "a\n  b x z  |"),
        ("{{ 'ab' * 2 }}{{ [1] + [2] }}{{ 2 ** 8 }}{{ 3 * 4 }}{{ 1.5 + 1 }}", "abab[1, 2]256122.5"),
        ("{{ messages | length }}{{ messages[0]['content'] }}{{ messages[-1].role }}", "1xuser"),
        ("{% filter upper %}a{% endfilter %}{% set b %}c{% endset %}{{ b }}", "Ac"),
    ],
)  # fmt: skip
def test_dialect(source: str, text: str) -> None:
    assert render(source, "u:x") == text


def test_strftime_now() -> None:
    assert render("{{ strftime_now('%Y') }}", "u:x") == time.strftime("%Y")


# ------------------------------------------------------------------------------------- the sandbox


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ (''|attr('__class__')).__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{{ strftime_now.__globals__.json }}",
        "{{ self.__init__.__globals__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ messages[0].pop('role') }}",
        "{{ '{0.__class__.__mro__}'.format(1).x.y }}",
        "{{ messages[0].nothing.more }}",
        "{{ nothing() }}",
        "{{ 1 + 'a' }}",
        "{{ nothing | tojson }}",
        "{{ messages | sum }}",
        "{{ strftime_now(5) }}",
        "{{ 1 // 0 }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ lipsum(9) }}",
        "{{ [1] | map('nofilter') | list }}",
    ],
)
def test_a_fault_of_the_template_is_a_400(source: str) -> None:
    messages = turns("u:x")
    with pytest.raises(BadRequest) as caught:
        ChatTemplate(source).render(messages)
    assert caught.value.message.startswith("prompt build failed: ")
    assert messages == turns("u:x")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for x in range(99999) if range(99999) | list | length == 0 %}{% endfor %}",
        "{{ range(99999) | select('in', range(99999) | list) | list | length }}",
        "{{ range(99999) | map('string') | map('center', 9999) | list | length }}" * 9,
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% macro tick() %}{% endmacro %}{% set environment = 1 %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_time_is_bounded(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(BadRequest, match="ran too long|without end"):
        ChatTemplate(source, limit_s=0.1).render(turns("s:x", "u:x"))
    assert time.monotonic() - start < 1.0


def doubling(start: str, step: str) -> str:
    return f"{{% set n = namespace(x={start}) %}}" + (
        "{% for i in range(99) %}{% set n.x = " + step + " %}{% endfor %}"
    )


@pytest.mark.parametrize(
    "source",
    [
        doubling("'abc'", "n.x ~ n.x"),
        doubling("'abc'", "n.x + n.x"),
        doubling("[1]", "n.x + n.x"),
        doubling("7", "n.x * n.x"),
        "{{ messages[0].content * 10 ** 12 }}",
        "{{ 10 ** 12 * messages }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ ('{:999999999}' ~ messages[0].content).format(1) }}",
        "{{ messages[0].content.ljust(10 ** 10) }}",
        "{{ messages[0].content | center(10 ** 10) }}",
        "{{ messages[0].content | indent(10 ** 10) }}",
        "{{ messages | slice(10 ** 10) | list }}",
        "{% set b = 'a' * 1000000 %}{% for i in range(99999) %}{{ b }}{% endfor %}",
        "{% set b = 'a' * 10 ** 6 %}"
        "{% set x %}{% for i in range(99999) %}{{ b }}{% endfor %}{% endset %}",
        "{% set b = 'a' * 1000000 %}{{ ([b] * 99999) | join }}",
        "{% set b = 'a' * 1000000 %}{{ b.join(range(99999) | map('string') | list) }}",
        "{% set b = 'a' * 1000000 %}{{ b | replace('a', b) }}{{ b.replace('a', b) }}",
    ],
)  # fmt: skip
def test_size_is_bounded(source: str) -> None:
    start = time.process_time()
    with pytest.raises(BadRequest, match="too much|too large"):
        ChatTemplate(source).render(turns("u:x"))
    assert time.process_time() - start < 1.5


def test_the_output_limit() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ 'b' }}", limit_chars=10)
    assert template.render(turns("u:" + "a" * 9)) == "a" * 9 + "b"
    with pytest.raises(BadRequest, match="too much text"):
        template.render(turns("u:" + "a" * 10))


def test_the_clock_is_each_threads_own() -> None:
    slow = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(
        "{% if messages[0].content == 'slow' %}" + slow + "{% endif %}ok", limit_s=0.3
    )
    results: dict[str, list[str]] = {"slow": [], "quick": []}

    def work(word: str, count: int) -> None:
        for _ in range(count):
            try:
                results[word].append(template.render(turns("u:" + word)))
            except BadRequest as exc:
                results[word].append(exc.message)

    threads = [threading.Thread(target=work, args=args) for args in (("slow", 1), ("quick", 20))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["quick"] == ["ok"] * 20
    assert "ran too long" in results["slow"][0]
