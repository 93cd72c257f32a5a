"""Every protocol's own way to say how much thinking is wanted arrives at the family on one scale."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from parsers.conversation import Conversation
from parsers.format import EFFORTS
from parsers.load import Family
from parsers.render import Prompt
from server.protocols.anthropic import read_count
from tests.server.support import serving

pytestmark = pytest.mark.anyio

USER: Any = {"role": "user", "content": "Hi"}
ANSWER = "Hi<|im_end|>"


@pytest.fixture
def asked(family: Family, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, object]]:
    """(thinking, effort) of every rendering."""
    seen: list[tuple[object, object]] = []
    plain = family.render

    def render(conversation: Conversation, **options: Any) -> Prompt:
        seen.append((options["thinking"], options["effort"]))
        return plain(conversation, **options)

    monkeypatch.setattr(family, "render", render)
    return seen


async def ask(family: Family, protocol: str, fields: dict[str, Any]) -> None:
    async with serving(family, ANSWER) as server:
        match protocol:
            case "anthropic":
                await server.anthropic().messages.create(
                    model="local-moe", max_tokens=64, messages=[USER], extra_body=fields
                )
            case "chat":
                await server.openai().chat.completions.create(model="local-moe", messages=[USER], extra_body=fields)
            case "responses":
                await server.openai().responses.create(model="local-moe", input="Hi", extra_body=fields)


ADAPTIVE = {"thinking": {"type": "adaptive"}}


@pytest.mark.parametrize(
    ("protocol", "fields", "thinking", "effort"),
    [
        ("anthropic", {}, False, None),
        ("anthropic", ADAPTIVE, True, None),
        ("anthropic", {**ADAPTIVE, "output_config": {"effort": "high"}}, True, "high"),
        ("anthropic", {**ADAPTIVE, "output_config": {"effort": "max"}}, True, "max"),
        ("anthropic", {"output_config": {"effort": "low"}}, False, "low"),
        ("anthropic", {"thinking": {"type": "disabled"}}, False, None),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, True, "minimal"),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 4000}}, True, "low"),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 10000}}, True, "medium"),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 31999}}, True, "high"),
        ("anthropic", {"thinking": {"type": "enabled", "budget_tokens": 64000}}, True, "max"),
        (
            "anthropic",
            {"thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "high"}},
            True,
            "high",
        ),
        ("responses", {}, True, None),
        ("responses", {"reasoning": {"effort": None, "summary": "auto"}}, True, None),
        ("responses", {"reasoning": {"effort": "none"}}, False, "none"),
        ("responses", {"reasoning": {"effort": "xhigh", "summary": "auto"}}, True, "xhigh"),
        ("chat", {}, True, None),
        ("chat", {"reasoning_effort": "none"}, False, "none"),
        ("chat", {"reasoning_effort": "minimal"}, True, "minimal"),
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ("chat", {"chat_template_kwargs": {"thinking": False}, "reasoning_effort": "high"}, False, "high"),
        ("chat", {"chat_template_kwargs": {"enable_thinking": True, "add_vision_id": True}}, True, None),
    ],
)
async def test_efforts_of_every_protocol(
    family: Family,
    asked: list[tuple[object, object]],
    protocol: str,
    fields: dict[str, Any],
    thinking: bool,
    effort: str | None,
) -> None:
    await ask(family, protocol, fields)
    assert asked == [(thinking, effort)]


@pytest.mark.parametrize(
    ("protocol", "fields", "where"),
    [
        ("anthropic", {**ADAPTIVE, "output_config": {"effort": "huge"}}, "output_config.effort"),
        ("responses", {"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ("chat", {"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
)
async def test_an_unknown_effort_is_refused_with_the_known_ones(
    family: Family, protocol: str, fields: dict[str, Any], where: str
) -> None:
    with pytest.raises((anthropic.BadRequestError, openai.BadRequestError), match=where) as caught:
        await ask(family, protocol, fields)
    assert all(f"'{effort}'" in str(caught.value) for effort in EFFORTS)


async def test_counted_tokens_are_those_of_the_same_effort(family: Family, asked: list[tuple[object, object]]) -> None:
    body = {**ADAPTIVE, "output_config": {"effort": "low"}, "model": "local-moe", "messages": [USER]}
    assert read_count(body, {}, "")[2] == (True, "low")
    async with serving(family, ANSWER) as server:
        counted = await server.anthropic().messages.count_tokens(
            model="local-moe", messages=[USER], extra_body={**ADAPTIVE, "output_config": {"effort": "low"}}
        )
        answered = await server.anthropic().messages.create(
            model="local-moe",
            max_tokens=64,
            messages=[USER],
            extra_body={**ADAPTIVE, "output_config": {"effort": "low"}},
        )
    assert counted.input_tokens == answered.usage.input_tokens
    assert asked == [(True, "low")] * 2


async def test_the_models_list_says_which_efforts_make_a_difference(family: Family) -> None:
    async with serving(family, ANSWER) as server:
        model = await server.openai().models.retrieve("local-moe")
    assert model.model_extra is not None
    assert model.model_extra["reasoning_efforts"] == list(family.efforts) == ["none", "medium"]
