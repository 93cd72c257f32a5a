"""What a contract test is: a feature of a protocol, asked for with the vendor's own SDK in every way that it has."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

import anthropic
import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

from engine.api import Request
from tests.server.support import Answer

Protocol = Literal["messages", "responses", "chat", "completions"]
Way = Literal["whole", "stream", "socket"]
WAYS: dict[Protocol, tuple[Way, ...]] = {
    "messages": ("whole", "stream"),
    "responses": ("whole", "stream", "socket"),
    "chat": ("whole", "stream"),
    "completions": ("whole", "stream"),
}
ASK: dict[Protocol, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 500},
    "responses": {"input": "Hi"},
    "chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "completions": {"prompt": "Once"},
}
RANDOM = {"id", "call_id", "first_id", "last_id", "previous_response_id", "created", "created_at", "completed_at"}
RANDOM |= {"signature", "encrypted_content"}
"""Fields that differ from answer to answer."""
Step = Callable[[Any, Any], Any]
"""(client, what came before) to the next call of the SDK."""


@dataclass(frozen=True)
class Case:
    """``ask`` are arguments of the SDK's ``create`` beside a plain question; the worker says ``answer``, or what it
    makes of the request. ``then`` follows, where one call is not all. ``holds`` gets what the SDK gives in the end.
    ``prompt`` is found in what the model was given last, in this order, and ``absent`` is not; ``sampled`` gets the
    last request to the engine. ``spliced``: the first answer, a call, stands in the last prompt as it was sampled.
    ``refused``: the words of the error that it is. ``only``: the ways that the protocol has for this, if not all."""

    protocol: Protocol
    feature: str
    ask: Mapping[str, Any] = field(default_factory=dict)
    answer: Answer | str | Callable[[Request], Answer] = "Hello<|im_end|>"
    holds: Callable[[Any], Any] = bool
    then: Sequence[Step] = ()
    prompt: Sequence[str] = ()
    absent: Sequence[str] = ()
    sampled: Callable[[Request], bool] | None = None
    spliced: bool = False
    refused: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    only: tuple[Way, ...] = ()

    @property
    def ways(self) -> tuple[Way, ...]:
        return self.only or WAYS[self.protocol]

    @property
    def fields(self) -> dict[str, Any]:
        return {"model": "local-moe", **ASK[self.protocol], **self.ask}

    @property
    def whole_ask(self) -> dict[str, Any]:
        return {**self.fields, "extra_headers": dict(self.headers)}


class RefusedOnSocket(Exception):
    """What a socket says where HTTP answers with a status."""


class Clients:
    """The SDKs' clients, synchronous and not, of one server; the latter live in ``loop``."""

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop) -> None:
        keyed: Any = {"api_key": "local", "max_retries": 0}
        self._loop = loop
        self._anthropic = anthropic.Anthropic(base_url=url, **keyed), anthropic.AsyncAnthropic(base_url=url, **keyed)
        self._openai = (
            openai.OpenAI(base_url=f"{url}/v1", **keyed),
            openai.AsyncOpenAI(base_url=f"{url}/v1", **keyed),
        )

    def close(self) -> None:
        for sync, other in (self._anthropic, self._openai):
            sync.close()
            asyncio.run_coroutine_threadsafe(other.close(), self._loop).result()

    def ask(self, case: Case, way: Way, *, sync: bool) -> Any:
        """What the SDK gives in the end."""
        one, other = self._anthropic if case.protocol == "messages" else self._openai
        if sync:
            return synchronous(one, case, way)
        return asyncio.run_coroutine_threadsafe(asynchronous(other, case, way), self._loop).result()


def interface(client: Any, protocol: Protocol) -> Any:
    match protocol:
        case "messages":
            return client.messages
        case "responses":
            return client.responses
        case "chat":
            return client.chat.completions
        case "completions":
            return client.completions


def synchronous(client: Any, case: Case, way: Way) -> Any:
    api, made = interface(client, case.protocol), None
    if way == "socket":
        with api.connect(extra_headers=dict(case.headers)) as talk:
            talk.response.create(**case.fields)
            made = next(filter(None, map(ended, talk)))
    elif way == "whole":
        made = api.create(**case.whole_ask)
    elif case.protocol == "messages":
        with api.stream(**case.whole_ask) as stream:
            made = stream.get_final_message()
    else:
        made = folded(case, list(api.create(stream=True, **streaming(case))))
    for step in case.then:
        made = step(client, made)
    return made


async def asynchronous(client: Any, case: Case, way: Way) -> Any:
    api, made = interface(client, case.protocol), None
    if way == "socket":
        async with api.connect(extra_headers=dict(case.headers)) as talk:
            await talk.response.create(**case.fields)
            async for event in talk:
                if made := ended(event):
                    break
    elif way == "whole":
        made = await api.create(**case.whole_ask)
    elif case.protocol == "messages":
        async with api.stream(**case.whole_ask) as stream:
            made = await stream.get_final_message()
    else:
        made = folded(case, [event async for event in await api.create(stream=True, **streaming(case))])
    for step in case.then:
        made = step(client, made)
        made = await made if inspect.isawaitable(made) else made
    return made


def streaming(case: Case) -> dict[str, Any]:
    """Only who asks for it is told the usage."""
    usage = {} if case.protocol == "responses" else {"stream_options": {"include_usage": True}}
    return {**case.whole_ask, **usage}


def ended(event: Any) -> Any:
    """The response, if this is the last event of a socket's answer."""
    if event.type == "error":
        raise RefusedOnSocket(event.error.message)
    return event.response if event.type in ("response.completed", "response.incomplete", "response.failed") else None


def folded(case: Case, events: list[Any]) -> Any:
    """A stream as the object that it stands for."""
    match case.protocol:
        case "responses":
            assert [event.sequence_number for event in events] == list(range(len(events)))
            return events[-1].response
        case "chat":
            state: Any = ChatCompletionStreamState()
            for event in events:
                state.handle_chunk(event)
            return state.current_completion_snapshot
    last, choices = events[-1], []
    parts = sorted((part for event in events for part in event.choices), key=lambda part: part.index)
    for _, group in groupby(parts, key=lambda part: part.index):
        pieces = list(group)
        text = "".join(piece.text for piece in pieces)
        logprobs = None
        if told := [piece.logprobs for piece in pieces if piece.logprobs]:
            lists = {name: [one for part in told for one in getattr(part, name)] for name in told[0].model_dump()}
            logprobs = told[0].model_copy(update=lists)
        choices.append(pieces[-1].model_copy(update={"text": text, "logprobs": logprobs}))
    return last.model_copy(update={"choices": choices})


def meaning(value: Any) -> Any:
    """What all ways to ask have to agree on. Streams number their calls, and begin with empty text."""
    value = value.model_dump() if hasattr(value, "model_dump") else value
    if isinstance(value, Mapping):
        left_out = RANDOM | ({"index"} if "type" in value else set())
        return {key: meaning(one) for key, one in value.items() if key not in left_out and one not in (None, "")}
    return [meaning(one) for one in value] if isinstance(value, list | tuple) else value
