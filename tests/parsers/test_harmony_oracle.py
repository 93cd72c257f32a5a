"""gpt-oss's turns against its own reference implementation, over its own vocabulary: what that writes we read, and what
we write that reads."""

from __future__ import annotations

import json
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from openai_harmony import Message, Role

from parsers.conversation import Block, Text, Thinking, Tool, ToolCall
from parsers.events import TextDelta, ThinkingDelta, ToolArgsDelta, ToolCallEnd, ToolCallStart
from parsers.families.harmony import HARMONY
from parsers.guard import Guard
from parsers.stream import StreamParser
from parsers.tokens import Tokenizer
from parsers.wire import Wire
from parsers.write import assistant_text
from tests.parsers import vocabularies

TOOLS = (Tool("probe", "", {"type": "object"}), Tool("find.it", "", {"type": "object"}))
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<|"), min_size=1, max_size=30).filter(str.strip)
ARGUMENTS = st.dictionaries(WORDS, st.one_of(WORDS, st.integers(), st.booleans(), st.none()), max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)
TURNS = st.tuples(
    st.lists(WORDS.map(Thinking), max_size=1),
    st.one_of(
        WORDS.map(lambda text: [Text(text)]),
        st.builds(lambda name, args: [ToolCall("", name, args)], st.sampled_from(["probe", "find.it"]), ARGUMENTS),
    ),
).map(lambda parts: (*parts[0], *parts[1]))


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(vocabularies.o200k_description())


@cache
def wire() -> Wire:
    return Wire.resolve(HARMONY, tokenizer())


def their_messages(blocks: tuple[Block, ...]) -> list[Message]:
    messages = []
    for block in blocks:
        match block:
            case Thinking(text):
                messages.append(Message.from_role_and_content(Role.ASSISTANT, text).with_channel("analysis"))
            case Text(text):
                messages.append(Message.from_role_and_content(Role.ASSISTANT, text).with_channel("final"))
            case ToolCall(_, name, arguments):
                call = Message.from_role_and_content(Role.ASSISTANT, arguments).with_channel("commentary")
                messages.append(call.with_recipient(f"functions.{name}").with_content_type("<|constrain|>json"))
    return messages


def read(ids: list[int]) -> tuple[str, str, list[tuple[str, str]]]:
    """Thinking, text, and the complete calls."""
    parser = StreamParser(HARMONY, wire(), tokenizer(), TOOLS, False)
    thinking, text, names, arguments = "", "", [], {}
    done: set[int] = set()
    for event in [event for token in ids for event in parser.feed(token)] + parser.finish("stop"):
        match event:
            case ThinkingDelta(part):
                thinking += part
            case TextDelta(part):
                text += part
            case ToolCallStart(index, name):
                names.append(name)
                arguments[index] = ""
            case ToolArgsDelta(index, part):
                arguments[index] += part
            case ToolCallEnd(index, True):
                done.add(index)
    return thinking, text, [(name, arguments[index]) for index, name in enumerate(names) if index in done]


def meant(blocks: tuple[Block, ...]) -> tuple[str, str, list[tuple[str, str]]]:
    return (
        "".join(block.text for block in blocks if isinstance(block, Thinking)),
        "".join(block.text for block in blocks if isinstance(block, Text)),
        [(block.name, block.arguments) for block in blocks if isinstance(block, ToolCall)],
    )


@settings(max_examples=60)
@given(TURNS)
def test_what_the_reference_writes_is_read(blocks: tuple[Block, ...]) -> None:
    encoding = vocabularies.harmony()
    ids = [token for message in their_messages(blocks) for token in encoding.render(message)]
    header = encoding.encode("<|start|>assistant", allowed_special="all")
    assert ids[: len(header)] == header
    assert read(ids[len(header) :]) == meant(blocks)


@settings(max_examples=60)
@given(TURNS)
def test_the_reference_reads_what_we_write(blocks: tuple[Block, ...]) -> None:
    text = assistant_text(HARMONY, Guard(tokenizer().control), blocks, "unopened")
    ids = tokenizer().encode_trusted(text if text.endswith(HARMONY.ends) else text + HARMONY.ends[0])
    found = vocabularies.harmony().parse_messages_from_completion_tokens(ids, Role.ASSISTANT)
    theirs = [(m.channel, m.recipient, m.content[0].to_dict()["text"]) for m in found]
    expected = [(m.channel, m.recipient, m.content[0].to_dict()["text"]) for m in their_messages(blocks)]
    assert theirs == expected
