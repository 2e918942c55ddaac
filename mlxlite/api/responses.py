"""OpenAI's Responses: objects, events, stored state (spec 70 section 6, clients.md, decision D15).

    event: response.output_text.delta
    data: {"type":"response.output_text.delta","sequence_number":5,"item_id":"msg_…",
           "output_index":0,"content_index":0,"delta":"Par","logprobs":[]}

The grammar of a stream. One item is open at a time: it closes when the next one opens or the answer
ends. Indices follow creation, sequence numbers rise from 0, ids stay the same from first to last.

    stream    = created queued? in_progress item* end     queued: in the background only
    item      = added body done
    reasoning = summary_part.added summary_text.delta* summary_text.done summary_part.done
    message   = content_part.added output_text.delta* output_text.done content_part.done
    call      = arguments.delta* arguments.done
    end       = completed | incomplete                  each with the full object, then the end
    (an error: `failed`, also with an item still open)

An answer without any item gets an empty message: clients look for one. The plain answer is the
object of the last event; there is no second code path. The body is read by `responses_request`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from mlxlite.api import responses_request as requests
from mlxlite.api.responses_items import Item, fresh_id, read_input
from mlxlite.constrain import warning_headers
from mlxlite.database import StoreFault
from mlxlite.errors import BadRequest, Cancelled, EngineFault, MlxliteError, NotFound
from mlxlite.http.routing import EventStream, Request, Response, encode_json, json_response
from mlxlite.service import Service
from mlxlite.store import Entry
from mlxlite.types import JSON, CallPiece, Delta, TokenLogprob, Usage

log = logging.getLogger(__name__)

Event = dict[str, Any]

# ---------------------------------------------------------------------------------- rendering


def render_usage(usage: Usage) -> dict[str, JSON]:
    found: dict[str, JSON] = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    return found if usage.fill is None else {**found, "fill": usage.fill}


def render_logprobs(
    spell: Callable[[int], bytes], entries: Sequence[TokenLogprob]
) -> list[dict[str, JSON]]:
    def one(token: int, logprob: float) -> dict[str, JSON]:
        raw = spell(token)
        # JSON has no minus infinity; OpenAI writes -9999 for what cannot come.
        value = max(logprob, -9999.0)
        return {"token": raw.decode("utf-8", "replace"), "logprob": value, "bytes": list(raw)}

    return [
        {**one(entry.id, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top]}
        for entry in entries
    ]


class Transcript:
    """One answer as it grows: deltas in, events out; `whole` is the response object.

    fields: of the object, as the request had them. spell: id -> bytes, for log-probabilities.
    """

    def __init__(self, fields: Mapping[str, JSON], spell: Callable[[int], bytes]) -> None:
        self.whole: dict[str, Any] = {
            "id": fresh_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "queued" if fields["background"] else "in_progress",
            "error": None,
            "incomplete_details": None,
            **fields,
            "output": [],
            "usage": None,
        }
        self._spell = spell
        self._names = requests.told_names(fields["tools"])
        self._sequence = 0
        self._kind = ""  # of the open item: reasoning, message, function_call; "": none is
        self._id = ""
        self._call: CallPiece | None = None  # the open call, without arguments
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[dict[str, JSON]] = []  # likewise
        self._held: list[TokenLogprob] = []  # of tokens whose text has not come yet

    # --------------------------------------------------------------------------- the events

    def render_opening(self) -> list[Event]:
        opening = dict(self.whole)
        created = self._event("response.created", response=opening)
        return [created, self._event(f"response.{opening['status']}", response=opening)]

    def render_delta(self, delta: Delta) -> list[Event]:
        """The events of one delta. The last delta closes the answer; its object is `whole`."""
        events: list[Event] = []
        if self.whole["status"] == "queued":
            self.whole["status"] = "in_progress"
            events.append(self._event("response.in_progress", response=dict(self.whole)))
        self._held += delta.logprobs
        if delta.reasoning:
            self._held.clear()  # only the text's own are reported
            events += self._opened("reasoning")
            events.append(self._grown("response.reasoning_summary_text.delta", delta.reasoning))
        if delta.text:
            events += self._opened("message")
            logprobs = render_logprobs(self._spell, self._held)
            self._held.clear()
            self._logprobs += logprobs
            event = self._grown("response.output_text.delta", delta.text)
            events.append({**event, "logprobs": logprobs})
        if (call := delta.call) is not None:
            self._held.clear()
            if self._call is None or self._call.index != call.index:
                events += self._opened("function_call", call)
            if call.arguments:
                events.append(self._grown("response.function_call_arguments.delta", call.arguments))
        if delta.finish is not None and delta.usage is not None:
            events += self._ended(delta.finish, delta.usage)
        return events

    def render_failure(self, error: MlxliteError, status: str = "failed") -> Event:
        """The last event of a stream that broke; what there is of the answer is in it."""
        if self._kind:
            self.whole["output"] = [*self.whole["output"], self._item("incomplete")]
        cause = {"code": "server_error", "message": error.message}
        self.whole.update(status=status, error=cause)
        return self._event("response.failed", response=self.whole)

    def _ended(self, finish: str, usage: Usage) -> list[Event]:
        is_cut = finish == "length"
        status = "incomplete" if is_cut else "completed"
        events = [] if self._kind or self.whole["output"] else self._opened("message")
        events += self._closed(status)
        self.whole.update(status=status, usage=render_usage(usage))
        if is_cut:
            self.whole["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.whole["completed_at"] = int(time.time())
        return [*events, self._event(f"response.{status}", response=self.whole)]

    # --------------------------------------------------------------------------- the items

    def _opened(self, kind: str, call: CallPiece | None = None) -> list[Event]:
        """Announce an item unless it is the open one, which closes first."""
        if kind == self._kind and call is None:
            return []
        events = self._closed("completed")
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        self._kind, self._id, self._call = kind, fresh_id(prefix), call
        item = self._item("in_progress")
        events.append(self._placed("response.output_item.added", item=item))
        if kind == "reasoning":
            part = self._summary_part()
            events.append(self._inside("response.reasoning_summary_part.added", part=part))
        elif kind == "message":
            events.append(self._inside("response.content_part.added", part=self._text_part()))
        return events

    def _closed(self, status: str) -> list[Event]:
        if not self._kind:
            return []
        text = "".join(self._texts)
        if self._kind == "reasoning":
            part = self._summary_part()
            events = [
                self._inside("response.reasoning_summary_text.done", text=text),
                self._inside("response.reasoning_summary_part.done", part=part),
            ]
        elif self._kind == "message":
            part = self._text_part()
            logprobs = list(self._logprobs)
            events = [
                self._inside("response.output_text.done", text=text, logprobs=logprobs),
                self._inside("response.content_part.done", part=part),
            ]
        else:
            assert self._call is not None
            name, _ = self._names.get(self._call.name, (self._call.name, ""))
            event = "response.function_call_arguments.done"
            events = [self._inside(event, name=name, arguments=text)]
        item = self._item(status)
        events.append(self._placed("response.output_item.done", item=item))
        self.whole["output"] = [*self.whole["output"], item]
        self._kind, self._call = "", None
        self._texts, self._logprobs = [], []
        return events

    def _item(self, status: str) -> Item:
        """The open item as it is now."""
        item: Item = {"id": self._id, "type": self._kind, "status": status}
        is_new = status == "in_progress"
        if self._kind == "reasoning":
            return {**item, "summary": [] if is_new else [self._summary_part()]}
        if self._kind == "message":
            parts = [] if is_new else [self._text_part()]
            return {**item, "role": "assistant", "content": parts}
        assert self._call is not None
        name, namespace = self._names.get(self._call.name, (self._call.name, ""))
        item.update(call_id=self._call.id, name=name, arguments="".join(self._texts))
        return {**item, "namespace": namespace} if namespace else item

    def _summary_part(self) -> Item:
        return {"type": "summary_text", "text": "".join(self._texts)}

    def _text_part(self) -> Item:
        text = "".join(self._texts)
        part = {"type": "output_text", "text": text, "annotations": []}
        return {**part, "logprobs": list(self._logprobs)}

    def _grown(self, kind: str, text: str) -> Event:
        self._texts.append(text)
        return self._inside(kind, delta=text)

    def _inside(self, kind: str, **fields: JSON) -> Event:
        """An event inside the open item."""
        index = {"reasoning": {"summary_index": 0}, "message": {"content_index": 0}}
        place: Mapping[str, JSON] = index.get(self._kind, {})
        return self._placed(kind, item_id=self._id, **place, **fields)

    def _placed(self, kind: str, **fields: JSON) -> Event:
        return self._event(kind, output_index=len(self.whole["output"]), **fields)

    def _event(self, kind: str, **fields: JSON) -> Event:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event


def _frame(event: Event) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + encode_json(event) + b"\n\n"


# ----------------------------------------------------------------------------------- handlers


class Turn:
    """A response being made: deltas in, events out, stored when it is whole.

    items: all that the model sees, history included.
    """

    def __init__(
        self,
        service: Service,
        items: list[Item],
        transcript: Transcript,
        pieces: AsyncGenerator[Delta, None],
    ) -> None:
        self._service = service
        self._items = items
        self.transcript = transcript
        self.pieces = pieces

    async def take(self, delta: Delta) -> list[Event]:
        """The events of a delta; with the last one the response is stored before anyone sees it, so
        that a client can go on from it at once."""
        events = self.transcript.render_delta(delta)
        whole = self.transcript.whole
        if delta.finish is not None and whole["store"]:
            whole["store"] = await self._keep(whole)
        return events

    async def _keep(self, whole: dict[str, JSON]) -> bool:
        """Store it. An answer that cannot be stored still is an answer, and says so."""
        try:
            is_kept = await self._service.stored(self._service.responses.keep(self.entry))
        except StoreFault as error:
            log.warning("%s: %s", whole["id"], error.message)
            return False
        if not is_kept:
            log.warning("%s is larger than the response store", whole["id"])
        return is_kept

    @property
    def entry(self) -> Entry:
        whole = self.transcript.whole
        return Entry(whole["id"], self._items, whole)

    async def whole(self) -> dict[str, JSON]:
        try:
            async for delta in self.pieces:
                await self.take(delta)
        finally:
            await self.pieces.aclose()
        return self.transcript.whole

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events. An error after the opening is `response.failed`, then the end."""
        try:
            for event in self.transcript.render_opening():
                yield _frame(event)
            async for delta in self.pieces:
                for event in await self.take(delta):
                    yield _frame(event)
        except MlxliteError as error:
            yield _frame(self.transcript.render_failure(error))
        except Exception:
            log.exception("%s failed in mid-stream", self.transcript.whole["id"])
            yield _frame(self.transcript.render_failure(EngineFault("internal error")))
        finally:
            await self.pieces.aclose()

    def render_cancelled(self) -> bytes:
        """The last frame of a job that was cancelled; the protocol has no event of that name."""
        error = Cancelled("the response was cancelled")
        return _frame(self.transcript.render_failure(error, "cancelled"))


async def create(service: Service, request: Request) -> Response | EventStream:
    """POST /v1/responses"""
    body = await request.json()
    items = await service.in_pool(_read, body)
    is_background = bool(body.get("background"))
    if is_background and body.get("store") is False:
        raise BadRequest("background needs store: nobody waits for the answer", param="background")
    history: list[Item] = []
    instructions = body.get("instructions")
    if (previous_id := body.get("previous_response_id")) is not None:
        previous = await service.stored(service.responses.find(previous_id))
        if previous is None:
            raise NotFound(
                f"previous_response_id '{previous_id}' not found or expired",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        history = [*previous.input, *previous.response["output"]]
        if instructions is None:
            instructions = previous.response["instructions"]
    items = [*history, *await _resolved(service, items, history)]
    ask = await service.in_pool(requests.parse_response, body, items, instructions)
    try:
        prepared = await service.prepare(ask)
    except BadRequest as error:
        raise requests.in_our_words(error) from None
    tokenizer = (await service.preparation()).tokenizer
    echoed = await service.in_pool(requests.echo, body, instructions)
    shown = {"model": service.model_id, **echoed}
    transcript = Transcript(shown, tokenizer.bytes_of)
    pieces = await service.run(prepared, f"{request.request_id} responses")
    turn = Turn(service, items, transcript, pieces)
    heartbeat_s = service.settings.heartbeat_s
    headers = warning_headers(prepared.warnings)
    if is_background:
        lease = service.leases.acquire()
        job = service.jobs.start(turn.entry, turn.frames(), turn.render_cancelled, lease)
        if ask.stream:
            return EventStream(job.read(), headers=headers, heartbeat_s=heartbeat_s)
        return json_response(turn.transcript.whole, headers=headers)
    if ask.stream:
        return EventStream(turn.frames(), headers=headers, heartbeat_s=heartbeat_s)
    return json_response(await turn.whole(), headers=headers)


def _read(body: Mapping[str, JSON]) -> list[Item]:
    """The items of a body, all of which is checked; a long one takes long."""
    requests.check_body(body)
    return read_input(body)


async def _resolved(service: Service, items: list[Item], history: list[Item]) -> list[Item]:
    """The items, with what they refer to in place of the references; 404 for what is gone.

    What the history already holds is not said twice.
    """
    wanted = [item["id"] for item in items if item["type"] == "item_reference"]
    if not wanted:
        return items
    near = {item["id"]: item for item in [*history, *items] if item["type"] != "item_reference"}
    far = [item_id for item_id in wanted if item_id not in near]
    found = await service.stored(service.responses.find_items(far)) if far else {}
    resolved = []
    for n, item in enumerate(items):
        if item["type"] != "item_reference":
            resolved.append(item)
        elif item["id"] in found:
            resolved.append(found[item["id"]])
        elif item["id"] not in near:
            raise NotFound(
                f"input[{n}]: item '{item['id']}' not found or expired", param=f"input[{n}].id"
            )
    return resolved


async def retrieve(service: Service, request: Request) -> Response | EventStream:
    """GET /v1/responses/{id}; with `stream=true` the events of a job, from `starting_after` on."""
    entry = await _entry(service, request)
    if request.query.get("stream", "false").lower() in ("false", "0", ""):
        return json_response(entry.response)
    job = service.jobs.find(entry.id)
    if job is None:
        raise BadRequest("stream: a response that is over has no stream", param="stream")
    after = request.query.get("starting_after", "-1")
    if not after.removeprefix("-").isdecimal() or len(after) > 9:
        raise BadRequest("starting_after must be a sequence number", param="starting_after")
    frames = job.read(max(int(after) + 1, 0))
    return EventStream(frames, heartbeat_s=service.settings.heartbeat_s)


async def delete(service: Service, request: Request) -> Response:
    """DELETE /v1/responses/{id}; what still runs is cancelled."""
    response_id = request.params["id"]
    job = service.jobs.find(response_id)
    if job is not None:
        await job.cancel()
        service.jobs.forget(response_id)
    if not await service.stored(service.responses.delete(response_id)) and job is None:
        raise _unknown(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def cancel(service: Service, request: Request) -> Response:
    """POST /v1/responses/{id}/cancel: only what runs in the background can be cancelled; a second
    time, or too late, it changes nothing."""
    entry = await _entry(service, request)
    if not entry.response["background"]:
        raise BadRequest("Cannot cancel a synchronous response.")
    if (job := service.jobs.find(entry.id)) is not None:
        await job.cancel()
    return json_response(entry.response)


async def input_items(service: Service, request: Request) -> Response:
    """GET /v1/responses/{id}/input_items: newest first unless `order=asc`, in pages."""
    query = request.query
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 100):
        raise BadRequest("limit must be a whole number from 1 to 100", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("order must be one of asc, desc", param="order")
    items = list((await _entry(service, request)).input)
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        at = next((n for n, item in enumerate(items) if item["id"] == after), None)
        if at is None:
            raise BadRequest(f"after: there is no item '{after}' in this response", param="after")
        items = items[at + 1 :]
    page = items[: int(limit)]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
    )


async def _entry(service: Service, request: Request) -> Entry:
    response_id = request.params["id"]
    if (job := service.jobs.find(response_id)) is not None:
        return job.entry
    found = await service.stored(service.responses.find(response_id))
    if found is None:
        raise _unknown(response_id)
    return found


def _unknown(response_id: str) -> NotFound:
    return NotFound(f"response '{response_id}' not found or expired")
