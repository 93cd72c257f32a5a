"""Models with random weights that are made to say something that makes sense, over HTTP, with the official SDKs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.checkpoint import write_tiny
from engine.weights.tiktoken import build_byte_tokenizer
from launchers.child_server import ChildServer
from parsers.ranks import bytes_to_unicode

MODEL = "local-moe"
TEMPLATES = Path(__file__).resolve().parents[2] / "engine" / "templates"
OTHERS = ("<|im_end|>", "<|endoftext|>")
CONTROL = {
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    "deepseek_v4": (
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *("<think>", "</think>", "｜DSML｜"),
    ),
}
FAMILIES = ("qwen3_xml", *(pytest.param(name, marks=pytest.mark.deep) for name in ("hermes", *CONTROL)))
PROPERTIES: dict[str, Any] = {
    "city": {"enum": ["Oslo", "Rome", "New\nYork"]},
    "days": {"type": "integer", "minimum": 1, "maximum": 14},
    "note": {"type": "string", "maxLength": 6},
    "hourly": {"type": ["boolean", "null"]},
    "wind": {
        "type": "object",
        "properties": {
            "unit": {"enum": ["kn", "m/s"]},
            "gusts": {"type": "array", "maxItems": 2, "items": {"const": 1}},
        },
        "required": ["unit"],
        "additionalProperties": False,
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": PROPERTIES,
    "required": ["city", "days"],
    "additionalProperties": False,
}
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
DESCRIPTION = "Tells the weather."


def check(value: dict[str, Any]) -> None:
    """Whether it is what the schema says, told without a library for schemas."""
    assert value.keys() <= PROPERTIES.keys() and value.keys() >= {"city", "days"}
    assert value["city"] in PROPERTIES["city"]["enum"]
    assert type(value["days"]) is int and 1 <= value["days"] <= 14
    assert isinstance(value.get("note", ""), str) and len(value.get("note", "")) <= 6
    assert value.get("hourly") in (True, False, None)
    wind = value.get("wind", {"unit": "kn"})
    assert wind["unit"] in ("kn", "m/s") and wind.keys() <= {"unit", "gusts"} and set(wind.get("gusts", [])) <= {1}


@dataclass
class House:
    server: ChildServer

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="local", max_retries=0)

    @property
    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.server.url, api_key="local", max_retries=0)


def model(directory: Path, family: str) -> Path:
    """A tiny checkpoint that speaks the family's format over bytes."""
    if family in CONTROL:
        letters = bytes_to_unicode()
        fast = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        tags = ("<think>", "</think>", "｜DSML｜")
        names = (*CONTROL[family], *OTHERS)
        fast.add_tokens([AddedToken(text, special=text not in tags, normalized=False) for text in names])
        (directory / "tokens").mkdir()
        fast.save(str(directory / "tokens" / "tokenizer.json"))
        (directory / "tokens" / "tokenizer_config.json").write_text("{}")
    else:
        build_byte_tokenizer(directory / "tokens")
    made = write_tiny("qwen3_5_moe", directory / "model", hidden=32, tokenizer=str(directory / "tokens"))
    (made / "chat_template.jinja").unlink()
    if family not in CONTROL:
        shutil.copy(TEMPLATES / f"{family}.jinja", made / "chat_template.jinja")
    return made


@pytest.fixture(scope="module", params=FAMILIES)
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory = tmp_path_factory.mktemp(request.param)
    arguments = ["--model", str(model(directory, request.param)), "--family", request.param, "--threads", "1"]
    with ChildServer(arguments, directory / "life", ready_seconds=120.0) as server:
        yield House(server)


def tool(name: str, parameters: dict[str, Any], **options: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **options}}


USER: Any = {"role": "user", "content": "How will it be?"}


@pytest.mark.parametrize("seed", range(2))
def test_a_required_call_is_one_that_the_schema_allows(house: House, seed: int) -> None:
    answer = house.openai.chat.completions.create(
        model=MODEL,
        messages=[USER],
        tools=[tool("weather", SCHEMA, strict=True), tool("now", NONE)],
        tool_choice="required",
        seed=seed,
        max_tokens=6000,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert choice.message.tool_calls
    for called in choice.message.tool_calls:
        arguments = json.loads(called.function.arguments)  # type: ignore[union-attr]
        assert arguments == {} or called.function.name == "weather"  # type: ignore[union-attr]
        if called.function.name == "weather":  # type: ignore[union-attr]
            check(arguments)


def test_the_model_thinks_before_the_call_as_long_as_it_likes(house: House) -> None:
    thoughts = 0
    for seed in range(4):
        answer = house.openai.chat.completions.create(
            model=MODEL,
            messages=[USER],
            tools=[tool("now", NONE)],
            tool_choice={"type": "function", "function": {"name": "now"}},
            parallel_tool_calls=False,
            seed=seed,
            max_tokens=6000,
        )
        message = answer.choices[0].message
        assert [called.function.name for called in message.tool_calls or ()] == ["now"]  # type: ignore[union-attr]
        thoughts += bool(getattr(message, "reasoning_content", ""))
    assert thoughts


def test_the_named_tool_is_called_once_and_nothing_else(house: House) -> None:
    tools: Any = [
        {"name": "weather", "description": DESCRIPTION, "input_schema": SCHEMA},
        {"name": "now", "input_schema": NONE},
    ]
    with house.anthropic.messages.stream(
        model=MODEL,
        messages=[USER],
        tools=tools,
        max_tokens=2000,
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    ) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use"
    (block,) = message.content
    assert block.type == "tool_use" and block.name == "weather"
    check(dict(block.input))


def test_any_call_will_do(house: House) -> None:
    message = house.anthropic.messages.create(
        model=MODEL,
        messages=[USER],
        tools=[{"name": "now", "input_schema": NONE}],
        max_tokens=2000,
        tool_choice={"type": "any"},
    )
    assert {block.type for block in message.content} == {"tool_use"} and message.stop_reason == "tool_use"


def test_text_that_a_schema_describes(house: House) -> None:
    answer = house.openai.chat.completions.create(
        model=MODEL,
        messages=[USER],
        response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA, "strict": True}},
        reasoning_effort="none",
        seed=1,
        max_tokens=2000,
    )
    assert answer.choices[0].finish_reason == "stop"
    check(json.loads(answer.choices[0].message.content or ""))
    message = house.anthropic.messages.create(
        model=MODEL,
        messages=[USER],
        max_tokens=2000,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    )
    check(json.loads("".join(block.text for block in message.content if block.type == "text")))


def test_responses_with_a_schema_and_with_a_grammar(house: House) -> None:
    answer = house.openai.responses.create(
        model=MODEL,
        input="How will it be?",
        text={"format": {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}},
        reasoning={"effort": "none"},
        max_output_tokens=2000,
    )
    assert answer.status == "completed"
    check(json.loads(answer.output_text))
    grammar = 'start: "say " word ("," word)* "!"\nword: /[a-c]{1,3}/ | "\\"x\\\\" LF\n%import common.LF'
    custom: Any = {
        "type": "custom",
        "name": "sing",
        "format": {"type": "grammar", "syntax": "lark", "definition": grammar},
    }
    called = house.openai.responses.create(
        model=MODEL,
        input="Sing.",
        tools=[custom],
        tool_choice={"type": "custom", "name": "sing"},
        parallel_tool_calls=False,
        reasoning={"effort": "none"},
        max_output_tokens=4000,
    )
    (item,) = called.output
    assert item.type == "custom_tool_call" and item.name == "sing"
    words = item.input.removeprefix("say ").removesuffix("!").split(",")
    assert item.input.startswith("say ") and item.input.endswith("!")
    assert all(word == '"x\\\n' or (0 < len(word) < 4 and set(word) <= set("abc")) for word in words)


def test_a_keyword_that_cannot_be_enforced_is_named(house: House) -> None:
    broken = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}},
    }
    with pytest.raises(openai.BadRequestError, match=r"answer's schema.*uniqueItems"):
        house.openai.chat.completions.create(
            model=MODEL,
            messages=[USER],
            response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": broken, "strict": True}},
        )
    with pytest.raises(anthropic.BadRequestError, match=r"bag.*uniqueItems") as caught:
        house.anthropic.messages.create(
            model=MODEL,
            messages=[USER],
            max_tokens=100,
            tools=[{"name": "bag", "input_schema": broken, "strict": True}],  # type: ignore[typeddict-unknown-key]
        )
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


@pytest.mark.parametrize("most", [25, 45, 60])
def test_a_call_that_is_cut_is_not_complete(house: House, most: int) -> None:
    tools: Any = [tool("weather", SCHEMA)]
    answer = house.openai.chat.completions.create(
        model=MODEL, messages=[USER], tools=tools, tool_choice="required", reasoning_effort="none", max_tokens=most
    )
    assert answer.choices[0].finish_reason == "length" and answer.usage and answer.usage.completion_tokens == most
    message = house.anthropic.messages.create(
        model=MODEL,
        messages=[USER],
        max_tokens=most,
        tools=[{"name": "weather", "input_schema": SCHEMA}],
        tool_choice={"type": "any"},
    )
    assert message.stop_reason == "max_tokens"
    response = house.openai.responses.create(
        model=MODEL,
        input="How will it be?",
        max_output_tokens=most,
        tools=[{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}],
        tool_choice="required",
        reasoning={"effort": "none"},
    )
    assert response.status == "incomplete" and response.incomplete_details
    assert all(item.status == "incomplete" for item in response.output if item.type == "function_call")


def test_neighbours_answer_as_they_do_alone(house: House) -> None:
    """Whoever follows a grammar beside them, or stops doing so."""

    def ask(bound: bool, seed: int) -> str:
        more: Any = {"tools": [tool("weather", SCHEMA)], "tool_choice": "required"} if bound else {}
        answer = house.openai.chat.completions.create(
            model=MODEL, messages=[USER], seed=seed, max_tokens=60, reasoning_effort="none", **more
        )
        return answer.choices[0].message.model_dump_json(exclude={"tool_calls": {"__all__": {"id"}}})

    wanted = [(False, 1), (True, 1), (True, 2), (False, 2)]
    alone = [ask(*one) for one in wanted]
    with ThreadPoolExecutor(len(wanted) + 1) as pool:
        stream = house.openai.chat.completions.create(
            model=MODEL, messages=[USER], tools=[tool("weather", SCHEMA)], tool_choice="required", stream=True
        )
        together = [pool.submit(ask, *one) for one in wanted]
        stream.close()
        assert [one.result() for one in together] == alone


def test_what_leads_nowhere_is_the_clients_fault(house: House) -> None:
    endless = {"type": "string", "pattern": "^(\\w{1,500}\\W{1,500}){1,500}$"}
    for inner in ({"type": "integer", "multipleOf": 1000003}, {"not": {"type": "string"}}, {"enum": []}, endless):
        schema = {"type": "object", "properties": {"a": inner, "b": {"$ref": "#/properties/a"}}, "required": ["a", "b"]}
        try:
            house.openai.chat.completions.create(
                model=MODEL,
                messages=[USER],
                tools=[tool("f", schema, strict=True)],
                tool_choice="required",
                max_tokens=60,
            )
        except openai.APIStatusError as error:
            assert error.status_code == 400, error
        else:
            assert inner is endless
