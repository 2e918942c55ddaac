"""Curve Designer, terrain and /dag in a real browser, on a tiny model."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxlite.engine import backend, curves  # noqa: F401  (backend first: it picks the BLAS)
from mlxlite.errors import BadRequest
from mlxlite.transfer import Transfer
from tests.browser import Browser, Page
from tests.live import LiveApp
from tests.web.test_access import complaints

import mlx.core as mx  # isort: skip

pytestmark = pytest.mark.web

Shoot = Callable[[str], None]
MATHS = "const m = await import('/assets/curve-maths.js');"
READY = "document.querySelector('#signal').textContent.includes('could come next')"
CHECK, GO, HANDLES = "#check", "#sample-form button[type=submit]", ".handle"


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[LiveApp]:
    with LiveApp(tiny_folder) as server:
        yield server


@pytest.fixture
def stage(server: LiveApp) -> LiveApp:
    """What `page` meets: the real engine."""
    return server


def designer(page: Page, server: LiveApp) -> None:
    page.goto(server.url + "/curves")
    page.wait(READY)


def middle(page: Page, index: int) -> tuple[float, float]:
    x, y = page.call(
        """(n) => {
            const box = document.querySelectorAll(".handle .dot")[n].getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }""",
        index,
    )
    return x, y


def drag(page: Page, index: int, across: float, down: float) -> None:
    """Moves a point with the mouse, in ten steps."""
    x, y = middle(page, index)
    mouse: dict[str, Any] = {"button": "left", "buttons": 1, "clickCount": 1}
    page.send("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **mouse)
    for step in range(1, 11):
        at = {"x": x + across * step / 10, "y": y + down * step / 10}
        page.send("Input.dispatchMouseEvent", type="mouseMoved", **at, button="left", buttons=1)
    page.send("Input.dispatchMouseEvent", type="mouseReleased", **at, **mouse)


def points(page: Page) -> list[tuple[float, float]]:
    found = json.loads(page.text("#json"))["curve"]["points"]
    return [(point["x_pct"], point["y_pct"]) for point in found]


def attribute(page: Page, selector: str, name: str) -> str:
    found: str = page.call("(s, n) => document.querySelector(s).getAttribute(n)", selector, name)
    return found


# ------------------------------------------------------------------------------------- maths


def random_points(rng: random.Random) -> list[tuple[float, float]]:
    """Some rise, some fall, some share an input."""
    count = rng.randint(1, 7)
    xs = [10 ** rng.uniform(-5, 2) for _ in range(count)]
    ys = [10 ** rng.uniform(-7, 2) for _ in range(count)]
    if rng.random() < 0.7:
        xs, ys = sorted(xs), sorted(ys)
    if rng.random() < 0.1:
        xs[-1] = xs[0]
    if rng.random() < 0.2:
        ys[len(ys) // 2] = ys[-1]
    return list(zip(xs, ys, strict=True))


def at(curve: Transfer, u: float) -> float:
    piece = max((p for p in curve.pieces[1:] if u >= p.knot), key=lambda p: p.knot, default=None)
    value, knot, slope, span, bend, twist = piece or curve.pieces[0]
    t = min(max(u - knot, 0), span) / span
    return value + (u - knot) * (slope + t * (bend + t * twist))


def test_curves_are_the_engines(page: Page, stage: LiveApp) -> None:
    page.goto(stage.url + "/dag")  # any page of ours may import the module
    rng = random.Random(11)
    given = [random_points(rng) for _ in range(200)]
    grid = [-16 + 16 * i / 64 for i in range(65)]
    script = f"""async (given, grid) => {{
        {MATHS}
        return given.map((each) => {{
            const points = each.map(([x_pct, y_pct]) => ({{ x_pct, y_pct }}));
            const why = m.problem(points);
            return why ? null : grid.map((u) => m.at(m.pieces(points), u));
        }});
    }}"""
    found = page.call(script, given, grid)
    drawn = 0
    for one, values in zip(given, found, strict=True):
        try:
            curve = Transfer(tuple(one))
        except BadRequest:
            assert values is None, one
            continue
        drawn += 1
        right = [at(curve, u) for u in grid]
        assert values == pytest.approx(right, rel=1e-9, abs=1e-9), one
        engine = curves.transfer(mx.array([grid]), [curve]).tolist()
        assert values == pytest.approx(engine[0], rel=1e-3, abs=2e-3), one
    assert 40 < drawn < 190


def test_tone_curves_are_the_engines(page: Page, stage: LiveApp) -> None:
    page.goto(stage.url + "/dag")
    grid = [-16 + 16 * i / 64 for i in range(65)]
    for width, shoulder, toe, offset, temperature in (
        (4, 4, 6, 6, 0.7), (2, 1.5, 3, 4, 1), (0, 0.5, 0, 2, 1.5), (1, 0, 2, 3, 1), (8, 0, 0, 1, 2),
    ):  # fmt: skip
        knobs = {"width": width, "shoulder": shoulder, "toe": toe, "pivot_offset": offset}
        script = f"async (k, grid) => {{ {MATHS} return grid.map((u) => m.hlg(u, k, 0)); }}"
        found = page.call(script, {**knobs, "temperature": temperature}, grid)
        curve = curves.Hlg(width=width, shoulder=shoulder, toe=toe, pivot_offset=offset)
        right: Any = curves.tone(mx.array([grid]), [curve], [temperature]).tolist()
        moved = [value - found[-1] + right[0][-1] for value in found]  # only differences count
        assert moved == pytest.approx(right[0], abs=1e-3)
        # As points: a curve that the server takes, and near the tone curve where tokens are.
        script = f"async (k) => {{ {MATHS} return m.hlgPoints(k, 0); }}"
        made = page.call(script, {**knobs, "temperature": temperature})
        drawn = Transfer(tuple((point["x_pct"], point["y_pct"]) for point in made))
        for u, value in zip(grid, moved, strict=True):
            if u > math.log(1e-6) and value - moved[-1] > -18:
                assert at(drawn, u) == pytest.approx(value - moved[-1], abs=0.6)


# ---------------------------------------------------------------------------------- designer


def test_a_point_is_dragged_with_the_mouse(page: Page, stage: LiveApp, shoot: Shoot) -> None:
    designer(page, stage)
    before = points(page), attribute(page, ".curve", "d"), attribute(page, ".share-after", "d")
    shoot("curves-start")
    drag(page, 1, 30, 60)
    after = points(page), attribute(page, ".curve", "d"), attribute(page, ".share-after", "d")
    assert all(one != other for one, other in zip(before, after, strict=True))
    (x0, y0), (x1, y1) = before[0][1], after[0][1]
    assert x1 > x0 and y1 < y0, "right and down"
    assert after[0][0] == before[0][0] and after[0][2] == before[0][2], "the others stay"
    assert "rises everywhere" in page.text(CHECK)
    values = page.run("[...document.querySelectorAll('.point-table input')].map((i) => +i.value)")
    assert values == [number for point in points(page) for number in point]
    shoot("curves-dragged")


def test_a_point_cannot_pass_its_neighbour_or_leave_the_plot(page: Page, stage: LiveApp) -> None:
    designer(page, stage)
    drag(page, 1, 2000, -2000)
    found = points(page)
    assert found == sorted(found) and found[1][0] < found[2][0] and found[1][1] == 100
    drag(page, 0, -500, 900)
    assert points(page)[0] == (0.0001, 1e-7)


def test_a_curve_that_falls_is_shown_as_wrong(page: Page, stage: LiveApp, shoot: Shoot) -> None:
    designer(page, stage)
    drag(page, 1, 0, 250)
    assert "falls" in page.text(CHECK)
    assert page.run(f"document.querySelector('{GO}').disabled")
    assert page.run("document.querySelector('.curve').classList.contains('is-wrong')")
    assert page.run("document.querySelectorAll('.handle.is-wrong').length") == 2
    shoot("curves-falls")
    drag(page, 0, 0, 200)
    assert "rises" in page.text(CHECK)
    assert not page.run(f"document.querySelector('{GO}').disabled")


def test_a_finger_drags_too(page: Page, stage: LiveApp) -> None:
    page.resize(360, 800)
    page.send("Emulation.setTouchEmulationEnabled", enabled=True)
    designer(page, stage)
    before = points(page)
    page.run("document.querySelector('.handle').scrollIntoView({ block: 'center' })")
    x, y = middle(page, 1)
    page.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    for step in range(1, 9):
        at_ = [{"x": x, "y": y + 5 * step}]
        page.send("Input.dispatchTouchEvent", type="touchMove", touchPoints=at_)
    page.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.wait_for(lambda: points(page)[1][1] < before[1][1] / 2, "the point to follow")


def test_keys_move_add_and_remove(page: Page, stage: LiveApp) -> None:
    designer(page, stage)
    page.run("document.querySelectorAll('.handle')[1].focus()")
    before = points(page)
    page.press("ArrowUp")
    page.press("ArrowRight")
    page.press("ArrowRight", "Shift")
    after = points(page)
    assert math.log(after[1][1] / before[1][1]) == pytest.approx(0.1, abs=1e-3)
    assert math.log(after[1][0] / before[1][0]) == pytest.approx(0.12, abs=1e-3)
    said = page.run("document.activeElement.getAttribute('aria-valuetext')")
    assert said == "0.11 % counts as 0.11 %"
    page.press("Backspace")
    assert len(points(page)) == 2
    assert page.run("document.activeElement.classList.contains('handle')"), "focus is not lost"
    page.press("Backspace")
    assert len(points(page)) == 2, "a curve has two points"
    page.click("#add")
    assert len(points(page)) == 3
    label = page.run("document.activeElement.getAttribute('aria-label')")
    assert label == "Point 2 of 3"


def test_numbers_can_be_typed(page: Page, stage: LiveApp) -> None:
    designer(page, stage)
    field = "document.querySelectorAll('.point-table input')[3]"
    page.run(f"{field}.focus(); {field}.select()")
    page.type("0.02")
    page.press("Tab")
    assert points(page)[1] == (0.1, 0.02)
    page.run(f"{field}.focus(); {field}.select()")
    page.type("5000")
    page.press("Tab")
    assert points(page)[1] == (0.1, 100), "brought into its range"


def test_a_press_on_the_curve_adds_a_point(page: Page, stage: LiveApp) -> None:
    designer(page, stage)
    (x0, y0), (x1, y1) = middle(page, 1), middle(page, 2)
    at_ = {"x": (x0 + x1) / 2, "y": (y0 + y1) / 2, "button": "left", "clickCount": 1}
    page.send("Input.dispatchMouseEvent", type="mousePressed", **at_)
    page.send("Input.dispatchMouseEvent", type="mouseReleased", **at_)
    assert len(points(page)) == 4
    x, y = points(page)[2]
    assert math.log(y / x) == pytest.approx(0, abs=0.1)
    x, y = middle(page, 1)
    for count in (1, 2):  # a double click on another removes that one
        at_ = {"x": x, "y": y, "button": "left", "clickCount": count}
        page.send("Input.dispatchMouseEvent", type="mousePressed", **at_)
        page.send("Input.dispatchMouseEvent", type="mouseReleased", **at_)
    page.wait_for(lambda: len(points(page)) == 3, "a point to go")
    assert points(page)[1][0] > 0.1


def test_the_histogram_follows_the_prompt(page: Page, stage: LiveApp) -> None:
    designer(page, stage)
    before = attribute(page, ".bars", "d")
    page.run("document.querySelector('#prompt').select()")
    page.click("#prompt")
    page.run("document.querySelector('#prompt').select()")
    page.type("the quick brown fox")
    page.wait_for(lambda: attribute(page, ".bars", "d") != before, "another histogram")
    right = stage.ask("POST", "/signal", {"prompt": "the quick brown fox"}).json()["bins"]
    shown = page.run(
        "[...document.querySelectorAll('.bars')][0].getAttribute('d').split('M').length - 1"
    )
    assert shown == sum(count > 0 for count in right)
    page.click("#shares summary")
    page.wait("document.querySelectorAll('#shares tbody tr').length")
    rows = page.texts("#shares tbody tr td:nth-child(2)")
    assert sum(int(row.replace(",", "")) for row in rows) == 512


def test_samples_side_by_side(page: Page, stage: LiveApp, shoot: Shoot) -> None:
    designer(page, stage)
    page.run("document.querySelector('#prompt').value = 'hello'")
    drag(page, 1, 0, 40)
    curve = {"points": [{"x_pct": x, "y_pct": y} for x, y in points(page)]}
    page.click(GO)
    page.wait("document.querySelectorAll('.sample-text').length === 6")
    body = {"prompt": "hello", "n": 3, "max_tokens": 48, "seed": 1}
    left, right = (
        [sample["text"] for sample in stage.ask("POST", "/generate", more).json()["samples"]]
        for more in ({**body, "curve": curve}, {**body, "default": True})
    )
    found = page.run("[...document.querySelectorAll('.sample-text')].map((p) => p.textContent)")
    assert found == [*left, *right]
    assert page.texts(".sample-column h3") == ["By the curve", "By the server's recipe"]
    assert "temperature 0.7" in page.text(".sample-column:last-child .note")
    shoot("curves-samples")


def test_what_a_model_writes_stays_text(page: Page, stage: LiveApp) -> None:
    designer(page, stage)
    hostile = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
    answer = {"mode": "curve", "n": 1, "seed": 1, "samples": [{"text": hostile, "junk": True}]}
    page.call(
        "(answer) => { const real = fetch; window.fetch = (path, ...rest) => path === '/generate'"
        " ? Promise.resolve(new Response(JSON.stringify(answer))) : real(path, ...rest); }",
        {**answer, "recipe": {"temperature": 1, "topP": 0, "topK": 0}},
    )
    page.click(GO)
    page.wait("document.querySelectorAll('.sample-text').length === 2")
    assert page.texts(".sample-text") == [hostile] * 2
    assert page.run("document.querySelectorAll('#samples img, #samples script').length") == 0
    assert not page.run("window.hit")


def test_presets_and_the_tone_curve(page: Page, stage: LiveApp, shoot: Shoot) -> None:
    designer(page, stage)
    for name in ("Temperature 0.7", "Temperature 1.5", "No tail", "Level top", "Diagonal"):
        page.call(
            "(name) => [...document.querySelectorAll('#presets button')]"
            ".find((b) => b.textContent === name).click()",
            name,
        )
        Transfer(tuple(points(page)))
        assert "rises" in page.text(CHECK)
    diagonal = points(page)
    page.click(".tones summary")
    page.wait_for(lambda: attribute(page, ".ghost", "d"), "the tone curve as a dashed line")
    assert complaints(page) == []
    dashed = attribute(page, ".ghost", "d")
    page.call(
        "() => { const s = document.querySelector('.tones input'); s.value = 1;"
        " s.dispatchEvent(new Event('input')); }"
    )
    assert attribute(page, ".ghost", "d") != dashed
    assert "at most" in page.text("#shares-note")
    shoot("curves-tone")
    page.click(".tones > .row:last-child button")
    assert points(page) != diagonal and "rises" in page.text(CHECK)
    page.click(".tones summary")
    page.wait_for(lambda: not attribute(page, ".ghost", "d"), "the dashed line to go")
    kept = points(page)
    page.reload()  # at once
    page.wait(READY)
    assert points(page) == kept, "the curve is there again"


def test_a_server_with_a_key_asks_for_it(browser: Browser, tiny_folder: Path) -> None:
    with LiveApp(tiny_folder, api_key="secret") as server:
        page = browser.page()
        page.goto(server.url + "/curves")
        page.wait("document.querySelector('dialog input[type=password]')")
        page.type("secret")
        page.press("Enter")
        page.wait(READY)
        page.close()


# ------------------------------------------------------------------------- terrain and /dag


def picture(page: Page) -> str:
    """The canvas as it is after the next frame."""
    found: str = page.run(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() =>"
        " done(document.querySelector('#terrain').toDataURL()))))"
    )
    return found


def test_the_terrain_of_an_answer(page: Page, stage: LiveApp, shoot: Shoot) -> None:
    page.goto(stage.url + "/curve-terrain")
    page.wait("document.querySelector('#so-far').textContent")
    empty = picture(page)
    page.run("document.querySelector('#limit').value = 12")
    page.click("#go")
    page.wait("document.querySelector('#state').textContent.endsWith('steps.')")
    count = len(page.texts("#table tbody tr"))
    assert 1 <= count <= 12 and page.text("#state") == f"{count} steps."
    assert page.text("#step-shown") == f"{count} of {count}"
    first = picture(page)
    assert first != empty
    prompt = page.run("document.querySelector('#prompt').value")
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 12, "seed": 1, "temperature": 0.7, "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    reply = stage.ask("POST", "/v1/chat/completions", body)
    entries = reply.json()["choices"][0]["logprobs"]["content"]
    assert len(entries) == count
    shares = page.texts("#table tbody tr td:nth-child(4)")
    for entry, share in zip(entries, shares, strict=True):
        assert float(share) == pytest.approx(100 * math.exp(entry["logprob"]), rel=0.06)
    page.run("document.querySelector('#terrain').focus()")
    page.press("ArrowLeft")
    turned = picture(page)
    assert turned != first
    page.call(
        "() => { const s = document.querySelector('#step'); s.value = 1;"
        " s.dispatchEvent(new Event('input')); }"
    )
    assert page.text("#here-title") == "Step 1" and len(page.texts("#here tbody tr")) in (20, 21)
    page.call(
        "() => { const s = document.querySelector('#height'); s.value = 'log';"
        " s.dispatchEvent(new Event('change')); }"
    )
    assert picture(page) != turned
    shoot("terrain")


def test_boxes_say_what_happens_there(page: Page, stage: LiveApp, shoot: Shoot) -> None:
    page.goto(stage.url + "/dag#prefix")
    page.wait("document.querySelectorAll('.dag-panel h3').length === 2")
    assert page.texts(".dag-panel h3") == ["Text", "Prompt cache"], "the address chooses"
    assert page.run("document.querySelectorAll('details[open]').length") == 0
    for index, title in enumerate(page.texts(".dag-node strong")):
        page.call("(n) => document.querySelectorAll('.dag-node')[n].click()", index)
        assert title in page.texts(".dag-panel h3")
    assert page.run("document.querySelectorAll('.dag-node[aria-pressed=true]').length") == 2
    assert page.run("document.querySelectorAll('.dag-edge.is-near').length") >= 4
    edges = page.run("[...document.querySelectorAll('.dag-edge')].map((e) => e.getAttribute('d'))")
    assert all(edges) and "NaN" not in "".join(edges)
    # A long text beside them must not move the arrows away from their boxes.
    page.run("document.querySelector('.dag-node#draw').click()")
    heights = page.run(
        "[...document.querySelectorAll('.dag-drawing')]"
        ".map((one) => [one.offsetHeight, one.querySelector('ol').offsetHeight])"
    )
    assert all(drawing == boxes for drawing, boxes in heights), heights
    shoot("dag")


@pytest.mark.parametrize("path", ["/curves", "/curve-terrain", "/dag"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_everybody_can_use_them(
    page: Page, stage: LiveApp, shoot: Shoot, path: str, width: int, scheme: str
) -> None:
    page.resize(width, 1400)
    page.prefer(color_scheme=scheme)
    page.goto(stage.url + path)
    if path == "/curves":
        page.wait(READY)
        page.click("#shares summary")
    elif path == "/curve-terrain":
        page.run("document.querySelector('#limit').value = 5")
        page.click("#go")
        page.wait("document.querySelectorAll('#table tbody tr').length")
    else:
        page.wait("document.querySelector('.dag-panel h3')")
    assert complaints(page) == []
    shoot(f"{path[1:]}-{width}-{scheme}")
