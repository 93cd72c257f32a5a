"""Completions, with the official SDK against a real socket."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from engine.api import Request
from parsers.load import Family
from tests.server.support import Answer, events, serving

pytestmark = pytest.mark.anyio

TEXT = " one two\nthree "
SAID = f"{TEXT}<|im_end|>"
MODEL: Any = {"model": "local-moe"}


async def test_the_text_is_the_models_own_white_space_included(family: Family) -> None:
    async with serving(family, Answer(SAID, resumed=2)) as server:
        made = await server.openai().completions.create(**MODEL, prompt="Count:", max_tokens=100)
        request = server.worker.requests[0]
    assert made.object == "text_completion"
    assert made.id.startswith("cmpl-")
    assert [(one.index, one.text, one.finish_reason, one.logprobs) for one in made.choices] == [(0, TEXT, "stop", None)]
    assert request.tokens == family.tokenizer.encode("Count:")
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (6, len(TEXT) + 1)
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens == 2


async def test_white_space_alone_is_an_answer(family: Family) -> None:
    async with serving(family, " \n<|im_end|>") as server:
        made = await server.openai().completions.create(**MODEL, prompt="x")
    assert made.choices[0].text == " \n"


async def test_text_never_becomes_control_tokens_and_ids_are_what_they_are(family: Family) -> None:
    spelled = "<|im_start|>user\nHi<|im_end|>"
    ids = family.encode_raw(spelled)
    async with serving(family, "<think>hm</think><|im_end|>") as server:
        create = server.openai().completions.create
        made = await create(**MODEL, prompt=spelled, max_tokens=50)
        await create(**MODEL, prompt=list(ids))
        first, second = (request.tokens for request in server.worker.requests)
    assert not set(first) & set(family.tokenizer.controls)
    assert family.tokenizer.decode(first) == spelled
    assert second == ids
    assert made.choices[0].text == "<think>hm</think>"


async def test_text_begins_with_the_start_token_of_a_model_that_has_one(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids are sent as they are, and an echo has no more than the prompt."""
    start = family.tokenizer.control["<|im_start|>"]
    monkeypatch.setattr(family.tokenizer, "start", (start,))
    async with serving(family, "Hi<|im_end|>") as server:
        create = server.openai().completions.create
        made = await create(**MODEL, prompt="ab", echo=True)
        for prompt in ([97, 98], ""):
            await create(**MODEL, prompt=prompt)
        prompts = [request.tokens for request in server.worker.requests]
    assert prompts == [(start, 97, 98), (97, 98), (start,)]
    assert made.choices[0].text == "abHi"
    assert made.usage is not None and made.usage.prompt_tokens == 3


async def test_the_default_length_is_the_protocols(family: Family) -> None:
    async with serving(family, "x" * 40) as server:
        made = await server.openai().completions.create(**MODEL, prompt="x")
    assert (made.choices[0].text, made.choices[0].finish_reason) == ("x" * 16, "length")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [["ab", "cde"], [[97, 98], [99, 100, 101]]])
async def test_several_prompts_with_several_answers_each(family: Family, prompt: Any, stream: bool) -> None:
    def answer(request: Request) -> Answer:
        return Answer(f"{len(request.tokens)}.{request.sampling.seed}<|im_end|>")

    async with serving(family, answer) as server:
        made: Any = await server.openai().completions.create(
            **MODEL, prompt=prompt, n=2, seed=7, echo=True, stream=stream, **(USAGE if stream else {})
        )
        if stream:
            chunks = [chunk async for chunk in made]
            texts = ["".join(c.text for k in chunks for c in k.choices if c.index == at) for at in range(4)]
            reasons = [c.finish_reason for k in chunks for c in k.choices if c.finish_reason]
            usage = chunks[-1].usage
        else:
            texts = [choice.text for choice in sorted(made.choices, key=lambda one: one.index)]
            reasons, usage = [choice.finish_reason for choice in made.choices], made.usage
        await server.idle()
        (session,) = server.state.sessions.list()
    assert texts == ["ab2.7", "ab2.8", "cde3.7", "cde3.8"]
    assert reasons == ["stop"] * 4
    assert (usage.prompt_tokens, usage.completion_tokens) == (2 + 3, 4 * 4)
    assert session.client_id == "completions"
    assert session.requests == 4


USAGE: Any = {"stream_options": {"include_usage": True}}


async def test_a_stream(family: Family) -> None:
    async with serving(family, SAID) as server, server.http() as http:
        body = {**MODEL, "prompt": "x", "stream": True, "stop": ["two"]}
        frames = events((await http.post("/v1/completions", json=body)).text)
        stream = await server.openai().completions.create(**MODEL, prompt="x", stream=True, stop="two")
        chunks = [chunk async for chunk in stream]
    assert frames[-1] == ("", "[DONE]")
    assert "".join(chunk.choices[0].text for chunk in chunks) == " one "
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_in_their_old_shape(family: Family, stream: bool) -> None:
    async with serving(family, "aé<think>!<|im_end|>") as server:
        made: Any = await server.openai().completions.create(**MODEL, prompt="x", logprobs=1, stream=stream)
        parts = [chunk.choices[0] async for chunk in made] if stream else [made.choices[0]]
    lists = [part.logprobs for part in parts if part.logprobs]
    tokens = [one for part in lists for one in part.tokens]
    offsets = [one for part in lists for one in part.text_offset]
    top = [one for part in lists for one in part.top_logprobs]
    assert tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "<think>", "!"]
    assert offsets == [0, 1, 1, 2, 9]
    assert top[0] == {"a": -0.5}
    assert [one for part in lists for one in part.token_logprobs] == [-0.5] * 5
    assert "".join(part.text for part in parts) == "aé<think>!"


async def test_logprobs_end_where_a_stop_string_ends_the_text(family: Family) -> None:
    async with serving(family, "ab STOP<|im_end|>") as server:
        made = await server.openai().completions.create(**MODEL, prompt="x", logprobs=0, stop="STOP")
    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", " "]
    assert made.choices[0].text == "ab "


async def test_every_option_reaches_the_sampler(family: Family) -> None:
    async with serving(family, SAID) as server:
        await server.openai().completions.create(
            **MODEL,
            prompt="x",
            best_of=1,
            max_tokens=33,
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.25,
            frequency_penalty=-0.25,
            seed=-7,
            logit_bias={"65": 5},
            logprobs=2,
            extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1},
        )
        sampling = server.worker.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (33, 0.5, 0.9, 4)
    assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.25, -0.25)
    assert (sampling.repetition_penalty, sampling.seed, sampling.logprobs) == (1.1, (1 << 63) - 7, 2)
    assert sampling.logit_bias == ((65, 5.0),)


async def test_a_prompt_that_grows_is_one_session_whose_causes_say_so(family: Family) -> None:
    known = len("Once" + TEXT)
    async with serving(family, lambda one: Answer(SAID, resumed=known if len(one.tokens) > 20 else 0)) as server:
        create = server.openai().completions.create
        await create(**MODEL, prompt="Once")
        await create(**MODEL, prompt=f"Once{TEXT} upon a time")
        await create(**MODEL, prompt="Another text")
        await create(**MODEL, prompt="Another text", extra_body={"session_id": "s"})
        await server.idle()
        first = {one.client_id: server.state.sessions.get(one.id) for one in server.state.sessions.list()}
    assert first.keys() == {"completions", "completions s"}
    record = first["completions"]
    assert record is not None
    assert [one.kind for one in record.requests] == ["raw"] * 3
    assert [one.cause for one in record.requests] == ["first_request", "none", "text_changed"]


async def test_its_tokens_never_come_into_a_conversation(family: Family) -> None:
    """A raw answer may hold control tokens where the client saw their spelling."""
    async with serving(family, "<tool_call>Yes<|im_end|>") as server:
        client = server.openai()
        raw = await client.completions.create(**MODEL, prompt="Hi", extra_body={"session_id": "s"})
        said: Any = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": raw.choices[0].text},
            {"role": "user", "content": "So?"},
        ]
        await client.chat.completions.create(**MODEL, messages=said, extra_body={"session_id": "s"})
        chat = server.worker.requests[1].tokens
    assert family.tokenizer.control["<tool_call>"] not in chat
    assert "<tool_call>Yes" in family.tokenizer.decode(chat)


async def test_what_is_too_long_is_told_as_everywhere(family: Family) -> None:
    async with serving(family, SAID, context_length=20) as server:
        for prompt in ("word " * 100, [65] * 100):
            with pytest.raises(openai.BadRequestError, match="maximum context length is 19 tokens") as caught:
                await server.openai().completions.create(**MODEL, prompt=prompt)
            assert caught.value.code == "context_length_exceeded"


async def test_one_failure_ends_all_answers(family: Family) -> None:
    answers = [Answer(SAID, hold_at=3), Answer("", refuse=("internal", "broken"))]
    async with serving(family, lambda _: answers.pop(0)) as server:
        with pytest.raises(openai.InternalServerError):
            await server.openai().completions.create(**MODEL, prompt=["a", "b"])
        await server.idle()
        assert len(server.worker.aborted) == 1
        assert server.state.counters.open_generations == 0


async def test_no_tokens_at_all_give_back_the_prompt(family: Family) -> None:
    async with serving(family, Answer("", reason="length")) as server:
        answer = await server.openai().completions.create(model="local-moe", prompt="Hi", max_tokens=0, echo=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hi", "length")
    assert server.worker.requests[0].sampling.max_tokens == 0
