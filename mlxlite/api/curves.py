"""What the Curve Designer asks: the next token's distribution, and answers drawn by a curve.

    POST /signal    {"prompt": "Hi"}  → {"bins": [0, 3, …], "vocab": 49152}
    POST /generate  {"prompt": "Hi", "n": 2, "seed": 7, "curve": {"space": "logprob",
                     "points": [{"x_pct": 1, "y_pct": 1}, {"x_pct": 100, "y_pct": 100}]}}
        → {"mode": "curve", "n": 2, "seed": 7, "samples": [{"text": "…", "junk": false}, …]}

Spec 20 section 7, as the decisions have it: both batch like everything else (D6), the guard and its
key hold and CORS is `--cors-origin`'s (D13), and a value of a wrong type is a 400 that names it
(D12). Numbers are rounded down and brought into their range. Errors are `{"error": "text"}`.
"""

from __future__ import annotations

import math
import re
import time
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxlite import fields
from mlxlite.embedding import numbers
from mlxlite.errors import BadRequest, MlxliteError, TooLong
from mlxlite.fields import Field
from mlxlite.http.routing import Request, Response, json_response
from mlxlite.prepare import Preparation, Prepared
from mlxlite.service import Service
from mlxlite.together import fold_together
from mlxlite.transfer import Transfer
from mlxlite.types import JSON, Ask, EmbedSpec, Sampling

# Apart from the table in `fields`: these numbers are brought into their range, not refused.
PROMPT = Field("prompt", str, "the user's turn", "empty")
CURVE = Field("curve", dict, "space, points, monotonic: draw by it", "the server's recipe")
N = Field("n", float, "how many answers, from 1 to 8; answer i is drawn with seed + i", "3")
MAX_TOKENS = Field("max_tokens", float, "of each, from 1 to 256", "80")
SEED = Field("seed", float, "32 bits", "of the clock")
DEFAULT = Field("default", bool, "draw by the server's recipe, whatever the curve", "false")
GENERATE = (PROMPT, CURVE, N, MAX_TOKENS, SEED, DEFAULT)
SPACE = Field("space", str, "what the points are about", "logprob", choices=("logprob",))
POINTS = Field("points", list, "objects of x_pct and y_pct; less than two are no curve", "none")
MONOTONIC = Field("monotonic", bool, "always true", "true")
CURVE_PARTS = (SPACE, POINTS, MONOTONIC)
POINT_PARTS = (Field("x_pct", float, "in"), Field("y_pct", float, "out"))

BINS = 80
U_MIN = math.log(1e-6)  # nats; what is less likely falls into the first bin
_PORTION = 8192  # logits between two chances for another thread to have the GIL
_MOST_POINTS = 256  # of a curve; a hand draws a dozen
_JUNK_SHARE = 0.02  # of the letters
_UNUSED = re.compile(r"<unused\d+>")


@dataclass(frozen=True, slots=True)
class Lab:
    """The surface of one of the two routes: their errors are plain strings (spec 70 section 12)."""

    name: str

    def render_error(self, error: MlxliteError) -> dict[str, Any]:
        failed = f"{self.name} failed: " if error.status >= 500 else ""
        return {"error": failed + error.message}


SIGNAL, GENERATION = Lab("signal"), Lab("generation")


# ------------------------------------------------------------------------------------ signal


async def signal(service: Service, request: Request) -> Response:
    """POST /signal: how likely the tokens are that could come next, as a histogram."""
    body = await _body(request)
    prompt = fields.take(body, PROMPT) or ""
    preparation = await service.preparation()
    spec = await service.in_pool(_signal_spec, preparation, prompt)
    (logits,) = await service.embed(spec, f"{request.request_id} signal")
    found = await service.in_pool(bins_of, numbers(logits))
    return json_response({"bins": found, "vocab": len(logits) // 4})


def _signal_spec(preparation: Preparation, prompt: str) -> EmbedSpec:
    """The logits of the whole vocabulary after the prompt. Raises BadRequest or TooLong."""
    ids = preparation.prompt(_conversation(prompt)).ids
    facts = preparation.facts
    if len(ids) > facts.max_context:
        raise TooLong(
            f"prompt is too long: it has {len(ids)} tokens, the context holds {facts.max_context}",
            param="prompt",
        )
    return EmbedSpec((tuple(ids),), logit_ids=tuple(range(facts.vocab_size)))


def bins_of(logits: Sequence[float]) -> list[int]:
    """How many log-probabilities fall into each of 80 equal bins over [ln 1e-6, 0]."""
    best = max(logits)
    starts = range(0, len(logits), _PORTION)
    masses = [math.fsum(math.exp(x - best) for x in logits[at : at + _PORTION]) for at in starts]
    floor = best + math.log(math.fsum(masses)) + U_MIN  # the logit that lies at U_MIN
    bins = [0] * BINS
    for logit in logits:
        place = BINS * (logit - floor) / -U_MIN
        bins[min(BINS - 1, int(max(place, 0.0)))] += 1
    return bins


# ---------------------------------------------------------------------------------- generate


async def generate(service: Service, request: Request) -> Response:
    """POST /generate: n answers to a prompt, drawn by a curve or by the server's own recipe."""
    body = await _body(request)
    prompt = fields.take(body, PROMPT) or ""
    n = _whole(body, N, 3, 1, 8)
    limit = _whole(body, MAX_TOKENS, 80, 1, 256)
    clock = int(time.time() * 1000)
    seed = _whole(body, SEED, clock, -math.inf, math.inf) & 0xFFFFFFFF
    is_default = fields.take(body, DEFAULT) is True
    points = take_points(body)
    curve = None
    if not is_default and len(points) >= 2:
        curve = Transfer(points)  # refuses what is no curve
    rows = await service.in_pool(
        _rows, await service.preparation(), prompt, curve, Ask(n=n, max_tokens=limit, seed=seed)
    )
    pieces = await service.run_together(rows, f"{request.request_id} generate")
    texts = [answer.text.strip() for answer in await fold_together(pieces, n)]
    junk = await service.in_pool(lambda: [is_junk(text) for text in texts])
    found: dict[str, Any] = {"mode": "default" if curve is None else "curve"}
    if curve is None:
        how = rows[0].spec.sampling
        found["recipe"] = {"temperature": how.temperature, "topP": how.top_p, "topK": how.top_k}
    samples = [{"text": text, "junk": bad} for text, bad in zip(texts, junk, strict=True)]
    return json_response({**found, "n": n, "seed": seed, "samples": samples})


def _rows(
    preparation: Preparation, prompt: str, curve: Transfer | None, wanted: Ask
) -> list[Prepared]:
    """The rows of a request; row i has seed + i. Raises BadRequest or TooLong.

    They start from token ids, so that thinking and calls stay in the text as they were written.
    """
    chat = replace(_conversation(prompt), seed=wanted.seed)
    ids = preparation.prompt(chat).ids
    how = preparation.sampling(chat)
    if curve is not None:
        how = Sampling(temperature=1.0, seed=how.seed, transfer=curve.points)
    rows = preparation.choices(replace(wanted, prompt=tuple(ids)))
    samplings = [replace(how, seed=row.spec.sampling.seed) for row in rows]
    return [
        replace(row, spec=replace(row.spec, sampling=sampling))
        for row, sampling in zip(rows, samplings, strict=True)
    ]


def take_points(body: Mapping[str, JSON]) -> tuple[tuple[float, float], ...]:
    """The points of a curve, in percent; none if there is no curve. Raises BadRequest."""
    curve = fields.take(body, CURVE)
    if curve is None:
        return ()
    for part in CURVE_PARTS:
        fields.take(curve, part, "curve.")
    if fields.take(curve, MONOTONIC, "curve.") is False:
        raise BadRequest("curve.monotonic must be true: no other curve is drawn", param="curve")
    points = fields.take(curve, POINTS, "curve.") or []
    if len(points) > _MOST_POINTS:
        why = f"curve.points must be at most {_MOST_POINTS}, not {len(points)}"
        raise BadRequest(why, param="curve.points")
    return tuple(_point(point, f"curve.points[{at}]") for at, point in enumerate(points))


def _point(point: JSON, at: str) -> tuple[float, float]:
    if not isinstance(point, dict):
        raise BadRequest(f"{at} must be of type object", param=at)
    x, y = (fields.take(point, part, f"{at}.") for part in POINT_PARTS)
    if x is None or y is None:
        raise BadRequest(f"{at} needs x_pct and y_pct", param=at)
    return x, y


def is_junk(text: str) -> bool:
    """Whether a sample of a language in Latin letters has fallen apart (spec 20 section 7.3)."""
    if "\ufffd" in text or _UNUSED.search(text):
        return True
    letters = [c for c in text if c.isalpha()]
    foreign = sum(not c.isascii() and "LATIN" not in unicodedata.name(c, "") for c in letters)
    return foreign > 0 and foreign >= _JUNK_SHARE * len(letters)


# -------------------------------------------------------------------------------------- both


async def _body(request: Request) -> dict[str, Any]:
    try:
        return await request.json()
    except BadRequest:
        raise BadRequest("invalid JSON") from None


def _conversation(prompt: str) -> Ask:
    return Ask(messages=({"role": "user", "content": prompt},))


def _whole(body: Mapping[str, JSON], field: Field, default: int, low: float, high: float) -> int:
    """The field, rounded down and brought into [low, high]. Raises BadRequest for no number."""
    value = fields.take(body, field)
    return default if value is None else math.floor(min(max(value, low), high))
