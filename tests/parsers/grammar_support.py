"""Random answers out of a grammar: one token after the other, each of them one that the mask allows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from engine.api import Sampling
from engine.grammar import Grammars, Guide, Vocabulary
from parsers.conversation import Tool
from parsers.format import Elements, Format, Literals, Tagged
from parsers.grammar import Demand, Tokens, constraint
from tests.parsers.wire_support import Machine, machine

LONG = 500
"""Tokens after which a walk looks for the end."""
GIVE_UP = 6000
HERMES = '<tool_call>\n{{"name": "probe", "arguments": {}}}\n</tool_call>'
"""A call in this format, around its arguments."""


def xml(**values: str) -> str:
    """A call in qwen3_xml's."""
    given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=probe>\n{given}</function>\n</tool_call>"


@cache
def grammars(name: str) -> Grammars:
    tokenizer = machine(name).tokenizer
    control = frozenset(tokenizer.control.values())
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    return Grammars(lambda: Vocabulary(tokens, control), tokenizer.vocab_size)


def stops(found: Machine) -> tuple[int, ...]:
    return tuple(found.tokenizer.control[end] for end in found.format.ends if end in found.tokenizer.control)


def grammar(name: str, tools: Sequence[Tool], demand: Demand, opener: str = "", thinking: bool = True) -> str:
    found = machine(name)
    tokens = Tokens(found.tokenizer.control, found.tokenizer.special)
    text = constraint(found.format, tokens, opener, thinking, tools, demand)
    assert text is not None
    return text


def guide(name: str, text: str) -> Guide:
    made = grammars(name).guide(Sampling(max_tokens=1, constraint=text, stop_tokens=stops(machine(name))))
    assert made is not None
    return made


def accepts(name: str, text: str, answer: str) -> bool:
    """Whether the grammar allows this answer, written in the format's own text, and an end behind it."""
    following, found, ends = guide(name, text), machine(name), stops(machine(name))
    tokens = found.tokenizer.encode_trusted(answer)
    size = next((number for number, token in enumerate(tokens) if token in ends), len(tokens))
    matcher = following._matcher.result()  # at once: a mask for every token takes a hundred times as long
    if matcher.validate_tokens(tokens[:size]) < size or not matcher.consume_tokens(tokens[:size]):
        return False
    return bool(following.allowed()[tokens[size : size + 1] or list(ends)].any())


def _closers(wire_format: Format, keys: Sequence[str]) -> list[str]:
    """What a random text has to be helped to."""
    call, codec = wire_format.call, wire_format.call.codec
    found: list[Any] = [pair.close for pair in (call.section, wire_format.think, wire_format.answer) if pair]
    found += [wire_format.frames.ends[0]] if wire_format.frames else []
    match codec:
        case Tagged():
            found.append(("\n" if codec.trim == "newline" else "") + codec.close)
        case Elements():
            found += [f"{codec.prefix}</{key}>" for key in (*keys, codec.item)]
        case Literals():
            found.append(codec.quote)
    return [text for text in found if text]


def walk(name: str, text: str, seed: int, keys: Sequence[str] = ()) -> list[int]:
    """An answer, its end included."""
    found, following, chance = machine(name), guide(name, text), random.Random(seed)
    ends = set(stops(found))
    closers = [found.tokenizer.encode_trusted(closer) for closer in _closers(found.format, keys)]
    out: list[int] = []
    aim: list[int] = []
    while len(out) < GIVE_UP:
        allowed = np.flatnonzero(following.allowed()).tolist()
        ending = [token for token in allowed if token in ends]
        going = [token for token in allowed if token not in ends]
        if ending and (not going or len(out) > LONG or chance.random() < 0.3):
            return [*out, chance.choice(ending)]
        if not aim and closers and chance.random() < (0.2 if len(out) < LONG else 0.8):
            aim = list(chance.choice(closers))
        if aim and aim[0] in going:
            token = aim.pop(0)
        else:
            aim = []
            token = _some(chance, going, len(out) > LONG)
        out.append(token)
        following.advance(token)
    raise AssertionError(f"no end in sight: {found.tokenizer.decode(out[-400:])!r}")


def _some(chance: random.Random, going: list[int], late: bool) -> int:
    control = [token for token in going if token > 255]
    if control and chance.random() < (0.9 if late else 0.3):
        return chance.choice(control)
    if chance.random() < 0.2:
        return chance.choice(going if len(going) < 8 else [token for token in going if token < 128 or token > 255])
    visible = [token for token in going if 32 <= token < 127 or token > 255] or going
    if late:
        visible = [token for token in visible if token > 255 or chr(token) in '<>/"}])'] or visible
    return chance.choice(visible)
