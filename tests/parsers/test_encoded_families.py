"""Checkpoints without a template, from their files to spliced prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from parsers.conversation import Block, Conversation, Sampled, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from parsers.load import Family, FamilyError, load_family
from parsers.ranks import bytes_to_unicode
from tests.parsers.parsed import Parsed

DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>")
TAGS = ("<think>", "</think>", "｜DSML｜")
CONTROL = {
    **dict.fromkeys(("deepseek_v32", "deepseek_v4", "deepseek_v41"), DEEPSEEK + TAGS),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
}
TOOL = Tool("read", "Reads.", {"type": "object", "properties": {"path": {"type": "string"}}})
SYSTEM = Turn("system", (Text("Be brief."),))
QUERY = Turn("user", (Text("Read it."),))


def call(name: str) -> ToolCall:
    return ToolCall(name, "read", json.dumps({"path": f"{name} <｜User｜> <|sep|>"}))


def outputs(*names: str) -> Turn:
    return Turn("tool", tuple(ToolOutput(name, f"of {name}") for name in names))


def answer(*blocks: Block) -> Turn:
    return Turn("assistant", blocks)


LOOP = (SYSTEM, QUERY, answer(Thinking("Two."), Text("Yes."), call("a"), call("b")))
HISTORIES = {
    "query": (SYSTEM, QUERY),
    "no system": (QUERY,),
    "two queries": (SYSTEM, QUERY, Turn("user", (Text("Now!"),))),
    "outputs in another order": (*LOOP, outputs("b", "a")),
    "an output is missing": (*LOOP, outputs("b")),
    "outputs in turns of their own": (*LOOP, outputs("a"), outputs("b")),
    "interrupted": (*LOOP, outputs("a", "b"), Turn("user", (Text("Stop."),))),
    "told in the middle": (*LOOP, outputs("a", "b"), Turn("system", (Text("No tools."),))),
    "told before an answer": (SYSTEM, QUERY, Turn("system", (Text("Now."),)), answer(Text("Yes.")), QUERY),
    "two answers": (SYSTEM, QUERY, answer(Text("Yes.")), answer(Text("No.")), QUERY),
}


def checkpoint(directory: Path, model: str, control: Sequence[str]) -> Path:
    """Bytes and control tokens, and nothing that says how to use them."""
    letters = bytes_to_unicode()
    fast = FastTokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens([AddedToken(text, special=text not in TAGS, normalized=False) for text in control])
    fast.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": model}))
    return directory


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    @cache
    def load(name: str) -> Family:
        return load_family(checkpoint(Path(tmp_path_factory.mktemp(name)), name, CONTROL[name]))

    return load


@pytest.mark.parametrize("name", CONTROL)
def test_the_checkpoints_configuration_names_the_encoder(name: str, encoded: Callable[[str], Family]) -> None:
    family = encoded(name)
    assert family.name == name
    assert family.probe.opener_prefilled and family.probe.thinking_in_loop
    assert family.probe.thinking_survives == (name != "deepseek_v32")


def test_without_template_and_encoder_there_is_no_family(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="no chat template"):
        load_family(checkpoint(tmp_path, "unheard_of", CONTROL["deepseek_v4"]))
    assert load_family(tmp_path, "deepseek_v4").name == "deepseek_v4"


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("name", CONTROL)
def test_sampled_turns_are_spliced_behind_every_history(
    name: str, history: str, thinking: bool, encoded: Callable[[str], Family]
) -> None:
    family, turns = encoded(name), HISTORIES[history]
    prompt = family.render(Conversation(turns, (TOOL,)), thinking=thinking)
    shown = {span.turn for span in prompt.spans if span.kind in ("system", "user", "assistant", "tool_output")}
    assert shown - {-1} == set(range(len(turns)))
    sampled = family.encode_output(prompt, (Thinking("Hm."), Text("Ok."), call("c")))
    parser, parsed = family.parser(prompt, (TOOL,)), Parsed()
    for token in sampled:
        parsed.add(parser.feed(token))
    parsed.add(parser.finish("stop"))
    assert (parsed.text, parsed.thinking, parsed.tolerated) == ("Ok.", "Hm." if thinking else "", [])
    (made,) = parsed.calls
    assert json.loads(made[2]) == json.loads(call("c").arguments)
    end = next((boundary.token for boundary in parsed.boundaries if boundary.kind == "thinking_end"), 0)
    blocks = (*((Thinking("Hm."),) if thinking else ()), Text("Ok."), call("c"))
    later = (*turns, Turn("assistant", blocks, Sampled(tuple(sampled), end, opener=prompt.opener)), outputs("c"))
    after = family.render(Conversation(later, (TOOL,)), thinking=thinking)
    assert after.ids[: len(prompt.ids) + len(sampled)] == (*prompt.ids, *sampled)


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v41", "kimi_k3"])
def test_the_effort_is_said_in_the_prompt(name: str, encoded: Callable[[str], Family]) -> None:
    family, conversation = encoded(name), Conversation((SYSTEM, QUERY), (TOOL,))
    prompts = {effort: family.render(conversation, effort=effort) for effort in family.efforts}
    assert len({prompt.ids for prompt in prompts.values()}) == 4
    assert all(prompt.effort == effort for effort, prompt in prompts.items())
    assert family.render(conversation, effort="xhigh").ids == prompts["high"].ids
    assert family.render(conversation, thinking=False, effort="max").ids == prompts["none"].ids
    assert not prompts["none"].thinking_open and prompts["max"].thinking_open
