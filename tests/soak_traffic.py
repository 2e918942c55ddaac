"""What the soak asks: random requests from a seed, how clients behave, what answers must hold.

No sockets and no clock here. A `Plan` is one request; `read` turns an answer's bytes into texts, or
says what is wrong with it.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tests.live import CHAT, frames

COMPLETIONS, RESPONSES = "/v1/completions", "/v1/responses"
MESSAGES, EMBEDDINGS = "/v1/messages", "/v1/embeddings"
NEVER = {"0": -100, "2": -100}  # the tiny models' end tokens: such an answer has all its tokens
NEAR_TIE = 1e-3  # logprobs; closer than that, the order of additions decides which is the best


class Expect(Enum):
    ANSWER = "answer"
    REFUSAL = "refusal"  # 400
    TOO_LONG = "too long"  # 400 with both numbers


class Manner(Enum):
    READ = "read"
    SLOW = "slow"  # a little at a time, behind a small window
    SILENT = "silent"  # nothing for a while, then all of it
    LEAVE = "leave"


@dataclass(frozen=True)
class Plan:
    path: str
    body: dict[str, Any]
    expect: Expect = Expect.ANSWER
    manner: Manner = Manner.READ
    frames: int = 0  # of LEAVE: frames to see first, of a stream
    wait_s: float = 0.0  # of LEAVE without frames, and of SILENT
    is_reset: bool = False  # of LEAVE: as a killed process
    is_exact: bool = False  # the same tokens each time
    times: int = 1  # asked one after the other: first computed, then from the prompt cache

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def key(self) -> str:
        """The same for the same question, streamed or not."""
        body = {name: value for name, value in self.body.items() if name != "stream"}
        return f"{self.path} {json.dumps(body, sort_keys=True)}"


# ------------------------------------------------------------------------------------- requests

BAD: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": "hello"}),
    (CHAT, {"messages": []}),
    (CHAT, {"temperature": -1}),
    (CHAT, {"temperature": "warm"}),
    (CHAT, {"top_p": 1.5}),
    (CHAT, {"top_k": 1.5}),
    (CHAT, {"max_tokens": -1}),
    (CHAT, {"n": 0}),
    (CHAT, {"n": 10**9}),
    (CHAT, {"seed": "one"}),
    (CHAT, {"stop": 5}),
    (CHAT, {"logit_bias": {"no": 1}}),
    (CHAT, {"logit_bias": {"99999": 1}}),
    (CHAT, {"top_logprobs": 21, "logprobs": True}),
    (CHAT, {"frequency_penalty": "much"}),
    (CHAT, {"hlg": {"width": -1}}),
    (CHAT, {"adapter": "none-such"}),
    (COMPLETIONS, {"prompt": None}),
    (COMPLETIONS, {"prompt": [1, "a"]}),
    (COMPLETIONS, {"prompt": [99999]}),
    (COMPLETIONS, {"logprobs": 21}),
    (COMPLETIONS, {"best_of": 3}),
    (COMPLETIONS, {"suffix": "end"}),
    (RESPONSES, {"input": 5}),
    (RESPONSES, {"max_output_tokens": "x"}),
    (MESSAGES, {"max_tokens": None}),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    (MESSAGES, {"stop_sequences": [5]}),
    (EMBEDDINGS, {"input": []}),
    (EMBEDDINGS, {"input": "a", "dimensions": 0}),
    (EMBEDDINGS, {"input": "a", "encoding_format": "text"}),
)


class Traffic:
    """Requests without end. The same seed asks the same.

    exact: how many questions there are whose answer must always be the same. silent_s: how long
    clients that do not read may do so; at 30 they are given up.
    """

    def __init__(
        self, seed: int, exact: int = 24, silent_s: tuple[float, ...] = (2.0, 10.0, 20.0)
    ) -> None:
        self._silent_s = silent_s
        self._pick = random.Random(seed)
        self._systems = [self._words(size) for size in (30, 60, 120, 200, 300, 380)]
        self.exact = [self._exact(number) for number in range(exact)]
        self._newest = self.exact[0]

    def next(self) -> Plan:
        chance = self._pick.random()
        if chance < 0.10:
            return self._refused()
        if chance < 0.13:
            return self._too_long()
        if chance < 0.18:
            return self._embedding()
        if chance < 0.20:
            return self._held()
        if chance < 0.45:
            if self._pick.random() < 0.5:  # else the same again, so that two run at a time
                self._newest = self._pick.choice(self.exact)
            plan, times = self._newest, self._pick.choice((1, 1, 3))
            return Plan(plan.path, self._streamed(plan.body), is_exact=True, times=times)
        plan = self._free()
        return plan if self._pick.random() < 0.7 else self._leaver(plan)

    def _words(self, count: int) -> str:
        return " ".join(f"word{self._pick.randrange(120)}" for _ in range(count))

    def _question(self) -> str:
        """Short, or behind one of a few long beginnings."""
        question = self._words(self._pick.choice((1, 2, 3, 8, 20)))
        if self._pick.random() < 0.6:
            return f"{self._pick.choice(self._systems)} {question}"
        return question

    def _body(self, path: str, question: str, limit: int) -> dict[str, Any]:
        if path == COMPLETIONS:
            return {"prompt": question, "max_tokens": limit}
        if path == RESPONSES:
            return {"input": question, "max_output_tokens": limit, "store": False}
        return {"messages": [{"role": "user", "content": question}], "max_tokens": limit}

    def _streamed(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**body, "stream": self._pick.random() < 0.5}

    def _surface(self) -> str:
        return self._pick.choice((CHAT, CHAT, CHAT, COMPLETIONS, COMPLETIONS, RESPONSES, MESSAGES))

    def _exact(self, number: int) -> Plan:
        path = (CHAT, COMPLETIONS, CHAT, RESPONSES, CHAT, MESSAGES)[number % 6]
        body = self._body(path, self._question(), self._pick.choice((8, 30, 60)))
        body["temperature"] = 0
        if path == CHAT:
            body |= {"logprobs": True, "top_logprobs": 2}
        if path != RESPONSES and number % 4 == 1:
            body |= {"temperature": 1.0, "seed": number, "top_p": 0.9}
        if path == CHAT and number % 4 == 2:
            body |= {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
        if path == CHAT and number % 12 == 4:
            body |= {"temperature": 0.8, "seed": number, "n": 3}
        return Plan(path, body, is_exact=True)

    def _free(self) -> Plan:
        pick, path = self._pick, self._surface()
        body = self._body(path, self._question(), pick.choice((1, 2, 5, 20, 20, 60, 150)))
        body["temperature"] = pick.choice((0, 0.7, 1.0, 1.5))
        body["top_p"] = pick.choice((1.0, 0.9, 0.5))
        if path in (CHAT, COMPLETIONS):
            some: list[dict[str, Any]] = [
                {"top_k": pick.choice((1, 5, 40))},
                {"min_p": 0.05},
                {"seed": pick.randrange(1000)},
                {"presence_penalty": 0.5},
                {"repetition_penalty": 1.3, "repetition_context_size": 0},
                {"xtc_probability": 0.5, "xtc_threshold": 0.1},
                {"logit_bias": {str(pick.randrange(512)): 5}},
                {"hlg": {"enabled": True}},
                {"n": pick.choice((2, 3, 6))},
                {"stop": pick.choice(("1", ["9", "say"], ["zzz", "o"]))},
                {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 3},
            ]
            for entry in pick.sample(some, pick.randrange(4)):
                body |= entry
            if path == COMPLETIONS and pick.random() < 0.2:
                body["echo"] = True
        if path == MESSAGES and pick.random() < 0.3:
            body["stop_sequences"] = ["1", "say"]
        return Plan(path, self._streamed(body))

    def _leaver(self, plan: Plan) -> Plan:
        body = dict(plan.body)
        if plan.path in (CHAT, COMPLETIONS):
            body |= {"max_tokens": 300, "logit_bias": NEVER}
        return Plan(
            plan.path,
            body,
            manner=Manner.LEAVE,
            frames=self._pick.choice((0, 0, 1, 2, 5, 20)) if plan.is_stream else 0,
            wait_s=self._pick.choice((0.0, 0.01, 0.1, 0.5)),
            is_reset=self._pick.random() < 0.5,
        )

    def _held(self) -> Plan:
        """More than the sockets and the session take, while it decodes or while its prompt is
        scored: the row is held until its client reads on."""
        if self._pick.random() < 0.5:
            body = self._body(CHAT, self._words(3), 850)
            body |= {"logprobs": True, "top_logprobs": 20, "n": self._pick.choice((1, 1, 2))}
        else:
            body = self._body(COMPLETIONS, self._words(450), 60)
            body |= {"logprobs": 20, "echo": True}
        body |= {"logit_bias": NEVER, "stream": True}
        manner = self._pick.choice((Manner.SLOW, Manner.SILENT, Manner.LEAVE))
        path = COMPLETIONS if "prompt" in body else CHAT
        return Plan(path, body, manner=manner, wait_s=self._pick.choice(self._silent_s))

    def _embedding(self) -> Plan:
        texts = [
            self._words(self._pick.choice((1, 5, 50))) for _ in range(self._pick.randint(1, 4))
        ]
        return Plan(EMBEDDINGS, {"input": texts})

    def _refused(self) -> Plan:
        path, wrong = self._pick.choice(BAD)
        body = {**self._body(path, "hello", 5), **wrong} if path != EMBEDDINGS else wrong
        return Plan(path, self._streamed(body), Expect.REFUSAL)

    def _too_long(self) -> Plan:
        path = self._surface()
        return Plan(path, self._streamed(self._body(path, self._words(700), 5)), Expect.TOO_LONG)


# -------------------------------------------------------------------------------------- answers


@dataclass
class Answer:
    """texts: one a choice. tokens: (id, logprob of the best, of the second) of chat answers that
    say so, one list a choice."""

    texts: list[str] = field(default_factory=list)
    tokens: list[list[tuple[int, float, float]]] = field(default_factory=list)


def read(plan: Plan, body: bytes) -> Answer:
    """A 200's body. Raises AssertionError unless the answer is whole."""
    if plan.path == EMBEDDINGS:
        rows = json.loads(body)["data"]
        assert len(rows) == len(plan.body["input"])
        assert all(abs(sum(x * x for x in row["embedding"]) - 1) < 1e-3 for row in rows)
        return Answer()
    if plan.path in (CHAT, COMPLETIONS):
        return _choices(plan, frames(body) if plan.is_stream else [json.loads(body)])
    if not plan.is_stream:
        parts = json.loads(body)
        blocks = parts["output"][0]["content"] if plan.path == RESPONSES else parts["content"]
        return Answer(["".join(block["text"] for block in blocks)])
    return _events(body)


def _choices(plan: Plan, found: list[Any]) -> Answer:
    if plan.is_stream:
        assert found.pop() == "[DONE]", "a stream without its end"
    count = plan.body.get("n", 1)
    answer = Answer([""] * count, [[] for _ in range(count)])
    finishes: list[int] = []
    for frame in found:
        assert "error" not in frame, frame
        for choice in frame["choices"]:
            index = choice["index"]
            assert index not in finishes, "something comes after the finish"
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            answer.texts[index] += said.get("content") or ""
            answer.tokens[index] += _tokens(choice)
            if choice["finish_reason"] is not None:
                finishes.append(index)
    assert sorted(finishes) == list(range(count)), "not every choice has its end"
    return answer


def _tokens(choice: dict[str, Any]) -> list[tuple[int, float, float]]:
    entries = (choice.get("logprobs") or {}).get("content") or []
    pairs = [(entry["id"], [top["logprob"] for top in entry["top_logprobs"]]) for entry in entries]
    return [(token, *sorted(tops)[::-1][:2]) for token, tops in pairs if len(tops) >= 2]


def _events(body: bytes) -> Answer:
    """A stream of Responses or Messages."""
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    found = [json.loads(line) for line in lines]
    kinds = [event["type"] for event in found]
    ends = ("message_stop", "response.completed", "response.incomplete")
    assert kinds and kinds[-1] in ends, f"a stream that ends with {found[-1:]}"
    text = ""
    for event in found:
        if event["type"] == "response.output_text.delta":
            text += event["delta"]
        elif event["type"] == "content_block_delta":
            text += event["delta"]["text"]
    return Answer([text])


def differs(plan: Plan, first: Answer, second: Answer) -> str | None:
    """None, or "tie" if the answers part where two tokens were equally good, or "other"."""
    if first.texts == second.texts and [[t[0] for t in row] for row in first.tokens] == [
        [t[0] for t in row] for row in second.tokens
    ]:
        return None
    counts = [len(row) > 0 for row in first.tokens], [len(row) > 0 for row in second.tokens]
    if plan.body["temperature"] != 0 or not any(counts[0]) or counts[0] != counts[1]:
        return "other"
    for a, b in zip(first.tokens, second.tokens, strict=True):
        parted = next((pair for pair in zip(a, b, strict=False) if pair[0][0] != pair[1][0]), None)
        if parted is None:
            continue
        if parted[0][1] - parted[0][2] >= NEAR_TIE:
            return "other"
    return "tie"
