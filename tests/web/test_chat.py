"""The chat in a real browser: streaming, thinking, calls, branches, stop, errors, files, keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxlite.errors import EngineFault
from mlxlite.types import Finish
from tests.browser import Page
from tests.scripted import TOKENIZER
from tests.web.acts import ANSWERS, button, converse, open_chat, say, wait_answer, wait_saved
from tests.web.stage import Stage

pytestmark = pytest.mark.web

Shoot = Callable[[str], None]
ARTICLE = """# Sorting

There are **two** ways: `sorted()` and *in place*.

```python
def by_size(words: list[str]) -> list[str]:
    \"\"\"Shortest first.\"\"\"
    # Words of the same length by the alphabet, which makes this a line that has to scroll.
    return sorted(words, key=lambda word: (len(word), word))
```

1. First
   - nested
2. Second

> A quotation.

| Method | Stable |
|---|---:|
| `sorted` | yes |

See [the manual](https://docs.python.org/3/).
"""


def test_answer(page: Page, stage: Stage, shoot: Shoot) -> None:
    """An answer comes as Markdown with coloured code, with its figures, and is kept."""
    stage.engine.says(ARTICLE)
    open_chat(page, stage.url)
    shoot("new")
    text = converse(page, "How do I sort a list?")
    assert "There are two ways" in text and "**" not in text
    assert page.run("document.querySelector('.prose .hl-keyword').textContent") == "def"
    assert page.run("document.querySelector('.prose td.align-right').textContent") == "yes"
    assert page.run("document.querySelector('.prose a').rel").startswith("noopener")
    assert "tokens" in page.text(f"{ANSWERS} .figures") and "cached" in page.text(".figures")
    session = stage.session(wait_saved(page))
    assert session["title"] == "How do I sort a list?"
    assert [message["role"] for message in session["messages"]] == ["user", "assistant"]
    page.wait_for(
        lambda: (stage.session(session["id"])["messages"][1]["usage"] or {}).get("state") == "done",
        "the answer to be saved",
    )
    assert stage.session(session["id"])["messages"][1]["content"] == ARTICLE
    shoot("answer")
    page.prefer(color_scheme="dark")
    shoot("answer-dark")
    page.reload()
    assert wait_answer(page, 1) == text


def test_streaming(page: Page, stage: Stage) -> None:
    """Text is there before the answer is over; the answer is not told by the token."""
    stage.engine.says("One two three four five six seven eight nine ten.")
    stage.engine.hold_after = 12
    open_chat(page, stage.url)
    say(page, "Count")
    page.wait(f"document.querySelector('{ANSWERS} .prose')?.innerText.startsWith('One')")
    assert page.run("document.querySelector('.send').getAttribute('aria-label')") == "Stop"
    assert page.run(f"document.querySelector('{ANSWERS}').getAttribute('aria-busy')") == "true"
    assert page.run("document.querySelector('.log').getAttribute('aria-live')") == "off"
    stage.engine.hold_after = None
    stage.engine.let_go()
    assert wait_answer(page, 1).endswith("ten.")
    page.wait("document.querySelector('#announcer').textContent.includes('ten.')")


def test_thinking(page: Page, stage: Stage, shoot: Shoot) -> None:
    """Thinking is folded, and not sent on."""
    stage.engine.says("<think>\nTwo and two.\n</think>\n\nFour.")
    open_chat(page, stage.url)
    assert "Four." in converse(page, "2 + 2?")
    assert page.run("document.querySelector('.thinking').open") is False
    page.click(".thinking summary")
    page.wait("document.querySelector('.thinking').innerText.includes('Two and two')")
    shoot("thinking")
    stage.engine.says("Yes.")
    converse(page, "Sure?")
    asked = TOKENIZER.decode(stage.engine.specs[-1].prompt_ids, keep_special=True)
    assert "Four." in asked and "Two and two" not in asked
    message = stage.session(wait_saved(page))["messages"][1]
    assert message["reasoning"].strip() == "Two and two." and message["content"].strip() == "Four."


def test_calls(page: Page, stage: Stage, shoot: Shoot) -> None:
    """A stored call is shown with its arguments."""
    session = stage.ask("POST", "/api/sessions", {"title": "Calls"}).json()["session"]["id"]
    add = f"/api/sessions/{session}/messages"
    question = stage.ask("POST", add, {"parent": None, "role": "user", "content": "Weather?"})
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Paris"}'},
    }
    answer = {
        "parent": question.json()["message"]["id"],
        "role": "assistant",
        "content": "",
        "tool_calls": [call],
    }
    assert stage.ask("POST", add, answer).status == 200
    open_chat(page, stage.url, f"#/chat/{session}")
    page.wait("document.querySelector('.call')")
    assert page.text(".call summary") == "Calls weather"
    assert json.loads(page.text(".call pre")) == {"city": "Paris"}
    shoot("call")


def test_stop_and_go_on(page: Page, stage: Stage, shoot: Shoot) -> None:
    """Stop keeps what came; going on appends to it, from the very place."""
    stage.engine.says("Once upon a time there was a king who had three daughters.")
    stage.engine.hold_after = 9
    open_chat(page, stage.url)
    say(page, "A story")
    page.wait(f"document.querySelector('{ANSWERS} .prose')?.innerText.startsWith('Once')")
    page.press("Escape")
    page.wait("document.querySelector('.aside')?.innerText.includes('Stopped')")
    shoot("stopped")
    begun = page.text(f"{ANSWERS} .prose")
    stage.engine.hold_after = None
    stage.engine.says(" And so on.")
    page.click(".aside .button")
    page.wait(f"document.querySelector('{ANSWERS} .prose').innerText.includes('And so on.')")
    text = wait_answer(page, 1)
    assert text.startswith(begun.strip()) and text.endswith("And so on.")
    asked = TOKENIZER.decode(stage.engine.specs[-1].prompt_ids, keep_special=True)
    assert asked.rpartition("assistant\n")[2].strip() == begun.strip()


def held(page: Page, stage: Stage, text: str, pieces: int) -> str:
    """Has an answer stop after so many pieces; the id of its chat."""
    stage.engine.says(text)
    stage.engine.hold_after = pieces
    open_chat(page, stage.url)
    say(page, "Go on")
    session = wait_saved(page)
    begun = text.partition(" ")[0]
    page.wait(f"document.querySelector('{ANSWERS} .prose')?.innerText.startsWith('{begun}')")
    return session


def test_reload_in_the_middle(page: Page, stage: Stage, shoot: Shoot) -> None:
    """An answer that the page left is still there after, marked, and can be gone on with."""
    session = held(page, stage, "Once upon a time there was a king who had three daughters.", 9)
    page.wait_for(lambda: len(stage.session(session)["messages"]) == 2, "the answer to be saved")
    page.reload()
    page.wait("document.querySelector('.aside')?.innerText.includes('cut off')")
    shoot("cut-off")
    stage.engine.hold_after = None
    stage.engine.says(" The end.")
    page.click(".aside .button")
    page.wait(f"document.querySelector('{ANSWERS} .prose').innerText.endsWith('The end.')")
    assert wait_answer(page, 1).startswith("Once upon")


def test_last_words(page: Page, stage: Stage) -> None:
    """The page that comes next may ask before the last words of the one before it have arrived, as
    where they never do."""
    session = held(page, stage, "Once upon a time there was a king who had three daughters.", 9)
    page.press("Escape")
    page.wait_for(lambda: state(stage, session) == "stopped", "the stopped answer to be saved")
    page.run(
        "{ const real = fetch; window.fetch = (path, more) => more?.method === 'PATCH'"
        " ? new Promise(() => {}) : real(path, more); }"
    )
    stage.engine.says(" And so on for ever.")
    page.click(".aside .button")
    page.wait(f"document.querySelector('{ANSWERS} .prose').innerText.includes('And so')")
    page.reload()
    page.wait("document.querySelector('.aside')?.innerText.includes('cut off')")
    assert "And so" in page.text(f"{ANSWERS} .prose")
    page.wait_for(lambda: state(stage, session) == "streaming", "the last words to be saved")
    assert "And so" in stage.session(session)["messages"][1]["content"]
    assert len(stage.session(session)["messages"]) == 2


def state(stage: Stage, session: str) -> str:
    """How far the answer is, as the server knows it."""
    messages = stage.session(session)["messages"]
    return messages[1]["usage"]["state"] if len(messages) > 1 else ""


def test_branches(page: Page, stage: Stage, shoot: Shoot) -> None:
    """Editing and asking again make branches; arrows move between them; the choice is kept."""
    open_chat(page, stage.url)
    converse(page, "What is the capital of France?")
    stage.engine.says("Rome.")
    page.click(button("Edit"))
    page.wait("document.querySelector('.edit-field') === document.activeElement")
    page.run("document.querySelector('.edit-field').select()")
    page.type("What is the capital of Italy?")
    page.press("Enter", "Control")
    page.wait("document.querySelector('.log').innerText.includes('Rome.')")
    wait_answer(page, 1)
    assert page.text(".branch-at") == "2 / 2"
    stage.engine.says("Roma.")
    page.click(button("Answer again"))
    page.wait("document.querySelector('.log').innerText.includes('Roma.')")
    wait_answer(page, 1)
    assert page.texts(".branch-at") == ["2 / 2", "2 / 2"]
    shoot("branches")
    page.click(f"{ANSWERS} {button('Previous branch')}")
    page.wait("document.querySelector('.log').innerText.includes('Rome.')")
    page.click(f".is-user {button('Previous branch')}")
    page.wait("document.querySelector('.log').innerText.includes('France')")
    page.wait(f"document.querySelector('{ANSWERS}').innerText.includes('Paris')")
    session = wait_saved(page)
    found = stage.session(session)
    assert len(found["messages"]) == 5
    page.wait_for(lambda: stage.session(session)["leaf"] == found["messages"][1]["id"], "the leaf")
    page.reload()
    assert "Paris" in wait_answer(page, 1)


def test_errors(page: Page, stage: Stage, shoot: Shoot) -> None:
    """What fails is told in its place, and tried again from there."""
    stage.engine.portions, stage.engine.error = [()], EngineFault("the engine broke down")
    stage.engine.finish = Finish.ERROR
    open_chat(page, stage.url)
    say(page, "Hello")
    page.wait("document.querySelector('.trouble')?.innerText.includes('the engine broke down')")
    shoot("error")
    assert page.texts(ANSWERS) == []
    stage.engine.error = None
    stage.engine.says("Hello!")
    page.click(".trouble .button")
    assert wait_answer(page, 1) == "Hello!"
    assert page.texts(".trouble") == []
    page.troubles.clear()  # the browser notes each answer that is no success


def test_settings(page: Page, stage: Stage, shoot: Shoot) -> None:
    """Settings are checked, kept with the chat, and sent with each request."""
    open_chat(page, stage.url)
    page.click(button("Settings of this chat"))
    page.wait("document.querySelector('dialog textarea') === document.activeElement")
    page.type("Speak like a pirate.")
    page.call(
        """() => {
        const set = (label, value) => {
            const labels = [...document.querySelectorAll('dialog label')];
            labels.find((one) => one.textContent === label).control.value = value;
        };
        set('Temperature', '0.25'); set('Seed', '11'); set('Most tokens', '7');
        set('Top k', '5'); set('Repetition penalty', '-1'); set('JSON schema', '{"type": ');
    }"""
    )
    page.click("dialog .primary")
    page.wait("document.querySelector('dialog details').open")  # something is wrong in there
    page.run("document.querySelector('dialog input:invalid').value = '1.25'")
    shoot("settings-more")
    page.click("dialog .primary")
    page.wait("document.querySelector('dialog .wrong')?.innerText.includes('no JSON')")
    shoot("settings")
    page.run("document.querySelector('dialog .mono').value = ''")
    page.click("dialog .primary")
    page.wait("!document.querySelector('dialog')")
    converse(page, "Hello")
    spec = stage.engine.specs[-1]
    assert "Speak like a pirate." in TOKENIZER.decode(spec.prompt_ids, keep_special=True)
    assert spec.max_tokens == 7 and spec.sampling.temperature == 0.25
    assert (spec.sampling.top_k, spec.sampling.repetition_penalty) == (5, 1.25)
    kept = stage.session(wait_saved(page))["settings"]
    assert kept == {
        "system": "Speak like a pirate.",
        "temperature": 0.25,
        "max_tokens": 7,
        "seed": 11,
        "top_k": 5,
        "repetition_penalty": 1.25,
    }
    page.wait("document.querySelector('.aside')?.innerText.includes('limit of tokens')")


def test_files(page: Page, stage: Stage, shoot: Shoot, tmp_path: Path) -> None:
    """Text files go into the message and are shown folded; others are refused with a reason."""
    notes, picture, big = tmp_path / "notes.md", tmp_path / "p.png", tmp_path / "big.txt"
    notes.write_text("Remember\n```\nthe milk\n```\n", encoding="utf-8")
    picture.write_bytes(b"\x89PNG\xff\xfe")
    big.write_text("x" * 300_000)
    open_chat(page, stage.url)
    page.attach(".composer input[type=file]", notes, picture, big)
    page.wait("document.querySelector('.composer-trouble').innerText.includes('UTF-8')")
    assert "256 kB" in page.text(".composer-trouble") and len(page.texts(".chip")) == 1
    shoot("attached")
    converse(page, "What is in it?")
    assert page.text(".typed") == "What is in it?" and "notes.md" in page.text(".file summary")
    assert page.run("document.querySelector('.file pre').textContent") == notes.read_text()
    content = stage.session(wait_saved(page))["messages"][0]["content"]
    assert content.startswith("[file: notes.md]\n````\nRemember\n") and content.endswith("in it?")


def test_context_meter(page: Page, stage: Stage) -> None:
    open_chat(page, stage.url)
    page.wait("document.querySelector('.meter-text').textContent === '0 / 1,048,576'")
    page.click("#composer")
    page.type("word " * 100)
    page.wait("parseInt(document.querySelector('.meter-text').textContent) > 100")
    page.press("Enter")
    wait_answer(page, 1)
    usage = "parseInt(document.querySelector('.meter-text').textContent.replace(',', ''))"
    page.wait(f"{usage} > 100 && document.querySelector('.context-meter meter').value > 100")


def test_the_model_was_changed_meanwhile(page: Page, stage: Stage) -> None:
    """By another tab: whoever comes back to this one sees which model answers now."""
    open_chat(page, stage.url)
    page.run("""(() => {
        const fetch = window.fetch;
        window.fetch = async (path, ...rest) => {
            if (path !== "/v1/models") return fetch(path, ...rest);
            return Response.json({ data: [{ id: "other", backend: "cpu", context_window: 77 }] });
        };
        document.dispatchEvent(new Event("visibilitychange"));
    })()""")
    page.wait("document.querySelector('.chat-model').innerText === 'other'")
    page.wait("document.querySelector('.meter-text').innerText === '0 / 77'")
    assert "other answers on this machine" in page.text(".welcome")


def test_another_page_meanwhile(page: Page, stage: Stage) -> None:
    """An answer goes on while another view is shown."""
    session = held(page, stage, "One two three four five six.", 6)
    page.click('a[href="#/status"]')
    page.wait("document.querySelector('.tiles')")
    stage.engine.hold_after = None
    stage.engine.let_go()
    page.click(".recent-link")
    assert wait_answer(page, 1) == "One two three four five six."
    assert page.run("location.hash").endswith(session)


def test_what_cannot_be_saved(page: Page, stage: Stage, shoot: Shoot) -> None:
    """The chat goes on, says so, survives a look elsewhere, and is saved when that works again."""
    open_chat(page, stage.url)
    page.send("Network.setBlockedURLs", urls=["*/api/sessions*"])
    assert "Paris" in converse(page, "What is the capital of France?")
    page.wait("document.querySelector('.notice')?.innerText.includes('not saved')")
    shoot("not-saved")
    page.click('a[href="#/status"]')
    page.wait("document.querySelector('.toast')?.innerText.includes('is not saved yet')")
    page.click(".toast .button")
    assert "Paris" in wait_answer(page, 1)
    assert stage.sessions() == []
    page.send("Network.setBlockedURLs", urls=[])
    page.wait("document.querySelector('.notice').hidden")  # it tries again by itself
    messages = stage.session(wait_saved(page))["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[1]["content"] == "Paris is the capital of France."
    page.troubles.clear()  # the browser notes what it was kept from


def test_the_key(browser_page_with_key: tuple[Page, Stage]) -> None:
    """A server with a key: the page asks for it, says when it is wrong, and keeps it."""
    page, stage = browser_page_with_key
    page.goto(stage.url)
    page.wait("document.querySelector('dialog input[type=password]')")
    page.type("wrong")
    page.press("Enter")
    page.wait("document.querySelector('dialog')?.innerText.includes('not right')")
    page.type("secret")
    page.press("Enter")
    page.wait("document.querySelector('.chat-model')?.textContent")
    page.reload()
    page.wait("document.querySelector('.chat-model')?.textContent")
    assert page.run("document.querySelector('dialog')") is None
    page.troubles.clear()  # the browser notes each 401


def test_who_leaves_while_a_chat_is_saved_gets_where_they_wanted(page: Page, stage: Stage) -> None:
    """The chat has an address from then on, but is not what is shown."""
    open_chat(page, stage.url)
    page.run("""{
        const fetch = window.fetch;
        window.held = [];
        window.fetch = async (path, more) => {
            const reply = await fetch(path, more);
            if (!/"role":"assistant"/.test(more?.body) || !path.startsWith("/api/")) return reply;
            const found = await reply.json();
            await new Promise((go) => window.held.push(go));
            return { ok: true, status: 200, headers: reply.headers, json: async () => found };
        };
    }""")
    converse(page, "Hello")
    page.wait("window.held.length > 0")
    page.run("{ location.hash = '#/status'; for (const go of window.held) go(); }")
    page.wait("document.querySelector('main[data-view=status] .page')")
    page.wait("document.querySelector('#recent a')")
    assert page.run("location.hash") == "#/status"
    assert page.run("document.querySelector('main').dataset.view") == "status"
