"""From what a script says to the ids that are forced."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engine.weights.tiktoken import build_byte_tokenizer
from parsers.conversation import Conversation, Text, Thinking, Tool, ToolCall, Turn
from parsers.load import Family, load_family
from parsers.render import Prompt
from server.script import Raw, Script

TEMPLATE = Path(__file__).resolve().parents[2] / "engine" / "templates" / "qwen3_xml.jinja"
CALL = "<tool_call>\n<function=run>\n<parameter=b>\n1\n</parameter>\n<parameter=a>\nx\n</parameter>\n</function>\n"
CALL += "</tool_call>"
SCRIPT = Script(())


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    directory = tmp_path_factory.mktemp("family")
    build_byte_tokenizer(directory)
    shutil.copy(TEMPLATE, directory / "chat_template.jinja")
    return load_family(directory)


@pytest.fixture(scope="module")
def prompt(family: Family) -> Prompt:
    return family.render(Conversation((Turn("user", (Text("hi"),)),), (Tool("run"),)))


def test_blocks_are_what_a_perfect_model_would_sample(family: Family, prompt: Prompt) -> None:
    say = [Thinking("hm"), Text("ok"), ToolCall("", "run", '{"a": "x"}')]
    assert SCRIPT.tokens(family, prompt, say) == family.encode_output(prompt, say)


def test_raw_alone_is_spelled_as_it_is_and_ends_the_turn(family: Family, prompt: Prompt) -> None:
    ids = SCRIPT.tokens(family, prompt, [Raw(CALL)])
    assert ids == (*family.encode_raw(CALL), family.stop_tokens[0])
    assert family.tokenizer.decode(ids[:-1]) == CALL


def test_raw_after_blocks_goes_on_where_they_end(family: Family, prompt: Prompt) -> None:
    ids = SCRIPT.tokens(family, prompt, [Thinking("hm"), Raw(CALL)])
    text = family.tokenizer.decode(ids)
    assert text.startswith("hm\n</think>") and text.count("<|im_end|>") == 1
    assert text.removesuffix("<|im_end|>").endswith(CALL)


def test_raw_may_end_the_turn_itself(family: Family, prompt: Prompt) -> None:
    assert SCRIPT.tokens(family, prompt, [Raw("x<|im_end|>")]) == family.encode_raw("x<|im_end|>")
