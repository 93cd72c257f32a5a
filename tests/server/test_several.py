"""Several answers to one request, and what tokens they were made of."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from engine.api import Request
from parsers.load import Family
from tests.server.support import Answer, serving
from tests.server.test_chat import CALL, LS, USER

pytestmark = pytest.mark.anyio

ASK: Any = {"model": "local-moe", "messages": [USER]}


def numbered(request: Request) -> Answer:
    """Answers that differ with the seed, as sampled ones do."""
    seed = request.sampling.seed
    call = CALL if seed % 2 else ""
    return Answer(f"Thought {seed}.\n</think>\n\nAnswer {seed}{call}<|im_end|>", resumed=8)


async def test_whole(family: Family) -> None:
    async with serving(family, numbered) as server:
        made = await server.openai().chat.completions.create(**ASK, n=3, seed=6, tools=[LS])
        requests = server.worker.requests
        await server.idle()
        (session,) = server.state.sessions.list()
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert [choice.message.content for choice in made.choices] == ["Answer 6", "Answer 7", "Answer 8"]
    assert [choice.finish_reason for choice in made.choices] == ["stop", "tool_calls", "stop"]
    assert [bool(choice.message.tool_calls) for choice in made.choices] == [False, True, False]
    thoughts = [choice.message.model_dump()["reasoning_content"].strip() for choice in made.choices]
    assert thoughts == ["Thought 6.", "Thought 7.", "Thought 8."]
    assert {request.tokens for request in requests} == {requests[0].tokens}
    assert len({request.id for request in requests}) == 3
    assert made.usage is not None
    assert made.usage.prompt_tokens == len(requests[0].tokens)
    sampled = [len(family.encode_raw(numbered(request).text)) for request in requests]
    assert made.usage.completion_tokens == sum(sampled)
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens == 8
    assert session.requests == 3


async def test_streamed(family: Family) -> None:
    async with serving(family, numbered) as server:
        stream = await server.openai().chat.completions.create(
            **ASK, n=3, seed=6, tools=[LS], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        prompt = len(server.worker.requests[0].tokens)
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    for at in range(3):
        mine = [choice for choice in pieces if choice.index == at]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == f"Answer {6 + at}"
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == [("stop", "tool_calls")[at % 2]]
    assert [choice.index for choice in pieces if choice.delta.tool_calls][:1] == [1]
    assert [chunk.usage.prompt_tokens for chunk in chunks if chunk.usage] == [prompt]
    assert chunks[-1].choices == []


async def test_any_of_them_may_be_continued(family: Family) -> None:
    """With the tokens that it was sampled as."""
    async with serving(family, numbered) as server:
        create = server.openai().chat.completions.create
        made = await create(**ASK, n=3, seed=6)
        for choice in made.choices:
            said = {"role": "assistant", "content": choice.message.content}
            await create(model="local-moe", messages=[USER, said, {"role": "user", "content": "So?"}])
        continued = [family.tokenizer.decode(request.tokens) for request in server.worker.requests[3:]]
        assert server.state.sessions.stats()["echo_exact"] == 3
    assert ["Answer 6" in text for text in continued] == [True, False, False]
    assert ["Answer 7" in text for text in continued] == [False, True, False]


async def test_a_key_has_no_more_at_once_than_it_may(family: Family) -> None:
    async with serving(family, numbered, key_running=2) as server:
        create = server.openai().chat.completions.create
        assert len((await create(**ASK, n=2)).choices) == 2
        with pytest.raises(openai.BadRequestError, match="3 answers at once: this API key may have 2"):
            await create(**ASK, n=3)
        stats = server.state.limits.stats()[""]
    assert stats == {"requests": 2, "refused": 0, "running": 0, "waiting": 0}


async def test_whoever_goes_away_stops_them_all(family: Family) -> None:
    async with serving(family, Answer("</think>\n\nHi there", hold_at=4)) as server:
        async with server.openai() as client:
            stream = await client.chat.completions.create(**ASK, n=3, stream=True)
            async for _ in stream:
                break
            await stream.close()
        await server.idle()
    assert len(server.worker.aborted) == 3
    assert server.state.counters.open_generations == 0


SPOKEN = "Hm é.\n</think>\n\nSo é!"
ENTRIES = [("S", [83]), ("o", [111]), (" ", [32]), ("\\xc3", [195]), ("\\xa9", [169]), ("!", [33])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("behind", ["", "\n\n" + CALL, " STOP"])
async def test_logprobs_are_those_of_the_visible_text(family: Family, stream: bool, behind: str) -> None:
    """Not of thinking, calls, delimiters, or what a stop string takes off; half a code point has bytes."""
    async with serving(family, f"{SPOKEN}{behind}<|im_end|>") as server:
        made: Any = await server.openai().chat.completions.create(
            **ASK, tools=[LS], logprobs=True, top_logprobs=1, stop=" STOP", stream=stream
        )
        choices = [chunk.choices[0] async for chunk in made] if stream else [made.choices[0]]
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content or ()]
    assert [(entry.token, entry.bytes) for entry in entries] == ENTRIES
    assert [[(top.token, top.bytes) for top in entry.top_logprobs] for entry in entries] == [[one] for one in ENTRIES]
    for choice in choices if stream else ():
        if choice.logprobs:
            assert bytes(byte for entry in choice.logprobs.content for byte in entry.bytes).decode() == (
                choice.delta.content
            )


@pytest.mark.parametrize("ask", [{"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}])
async def test_logprobs_of_responses(family: Family, ask: Any) -> None:
    async with serving(family, f"{SPOKEN}<|im_end|>") as server:
        responses = server.openai().responses
        whole = await responses.create(model="local-moe", input="Hi", **ask)
        events = [event async for event in await responses.create(model="local-moe", input="Hi", stream=True, **ask)]
        last = whole.output[-1].model_dump()
        again = await responses.create(model="local-moe", previous_response_id=whole.id, input="So?")
    (part,) = last["content"]
    assert [(entry["token"], entry["bytes"]) for entry in part["logprobs"]] == ENTRIES
    alternatives = [len(entry["top_logprobs"]) for entry in part["logprobs"]]
    assert set(alternatives) == {ask.get("top_logprobs", 0)}
    deltas = [entry.token for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    done = [entry.token for event in events if event.type == "response.output_text.done" for entry in event.logprobs]
    assert deltas == done == [token for token, _ in ENTRIES]
    assert again.status == "completed"


async def test_responses_have_no_logprobs_unasked(family: Family) -> None:
    async with serving(family, f"{SPOKEN}<|im_end|>") as server:
        made = await server.openai().responses.create(model="local-moe", input="Hi")
        assert server.worker.requests[0].sampling.logprobs is None
    assert made.output[-1].model_dump()["content"][0]["logprobs"] == []


async def test_tokens_that_come_faster_than_anybody_reads_are_told_together(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first waits for nothing, and neither does the end."""
    monkeypatch.setattr("server.generation.PACE", 1000.0)
    text = "".join(str(number) for number in range(500))
    async with serving(family, f"{text}<|im_end|>") as server:
        stream = await server.openai().completions.create(
            model="local-moe", prompt="x", max_tokens=5000, logprobs=0, stream=True
        )
        chunks = [chunk.choices[0] async for chunk in stream]
    first, rest, end = chunks
    assert (first.text, first.text + rest.text, end.finish_reason) == ("0", text, "stop")
    assert rest.logprobs is not None
    assert "".join(rest.logprobs.tokens or ()) == rest.text


async def test_more_answers_than_may_ever_be_open_are_refused_for_good(family: Family) -> None:
    """Not with advice to ask again."""
    async with serving(family, numbered, max_open=4) as server:
        client = server.openai()
        assert len((await client.chat.completions.create(**ASK, n=4)).choices) == 4
        with pytest.raises(openai.BadRequestError, match="5 answers at once: this server may have 4 open"):
            await client.chat.completions.create(**ASK, n=5)
        with pytest.raises(openai.BadRequestError, match="6 answers at once"):
            await client.completions.create(model="local-moe", prompt=["a", "b", "c"], n=2)
        assert len(server.worker.requests) == 4


@pytest.mark.parametrize("chat", [True, False])
async def test_signs_of_life_are_of_answers_that_live(family: Family, chat: bool) -> None:
    """Nothing comes of an answer behind its end."""
    release = asyncio.Event()

    def answer(request: Request) -> Answer:
        held = request.sampling.seed == 7
        return Answer("</think>\n\nHi<|im_end|>", hold_at=2 if held else -1, release=release)

    async with serving(family, answer, keepalive_seconds=0.01) as server:
        client = server.openai()
        stream: Any = (
            await client.chat.completions.create(**ASK, n=2, seed=6, stream=True)
            if chat
            else await client.completions.create(model="local-moe", prompt="x", n=2, seed=6, stream=True)
        )
        seen = []
        async for chunk in stream:
            seen += [(choice.index, choice.finish_reason) for choice in chunk.choices]
            if (0, "stop") in seen and seen[-1] == (1, None):
                release.set()
    assert {index for index, _ in seen[seen.index((0, "stop")) + 1 :]} == {1}
