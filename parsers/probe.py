"""Does a format fit a checkpoint, and what does its template do? Found at load by rendering, not kept in a table.

Four prompts of one conversation (query; call and output; another call and output; answer and a new query) show what the
template keeps. A format fits when its turns are found in the rendering and an assistant turn parses back to its blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from parsers.conversation import Conversation, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from parsers.events import TextDelta, ThinkingDelta, ToolArgsDelta, ToolCallStart
from parsers.format import Format
from parsers.render import Renderer, RenderError, Traits
from parsers.stream import StreamParser, Wire
from parsers.template import ChatTemplate
from parsers.tokens import Tokenizer

Survivor = Literal["assistant_header", "generation_prompt", "thinking", "turn_end"]

_TOOL = Tool(
    "find_probe",
    "Finds a probe.",
    {"type": "object", "properties": {"where": {"type": "string"}, "count": {"type": "integer"}}},
)
_ARGUMENTS = '{"where":  "deep below", "count": 7}'


@dataclass(frozen=True)
class Probe:
    """What survives of a prompt in the prompts that come after it.

    ``after_user`` and ``in_loop`` say which positions of an assistant turn a new user turn, and a further step of the
    tool loop, still share with the prompt before: the position before the assistant header, the end of the generation
    prompt, the end of the thinking, the end of the turn.
    """

    opener_prefilled: bool
    thinking_kept_in_loop: bool
    thinking_kept_after_user: bool
    in_loop: frozenset[Survivor]
    after_user: frozenset[Survivor]
    template_declares_tools: bool


class Mismatch(Exception):
    """Why a format does not fit."""


def examine(wire_format: Format, tokenizer: Tokenizer, template: ChatTemplate) -> tuple[Renderer, Probe]:
    """Raises Mismatch."""
    for text in (wire_format.turns.end, wire_format.turns.user, wire_format.turns.assistant):
        if not any(text.startswith(name) for name in tokenizer.control):
            raise Mismatch(f"the vocabulary has no control token that begins {text!r}")
    try:
        traits = _traits(wire_format, tokenizer, template)
        renderer = Renderer(wire_format, tokenizer, template, traits)
        _check_round_trip(renderer, tokenizer)
        return renderer, _probe(renderer, traits)
    except RenderError as error:
        raise Mismatch(str(error)) from error


def _conversation(steps: int, again: bool = False) -> Conversation:
    """A query, ``steps`` calls with outputs, and (``again``) an answer with a new query."""
    turns = [Turn("system", (Text("Probe system."),)), Turn("user", (Text("First query."),))]
    for step in range(steps):
        call = ToolCall(f"probe{step:04d}", _TOOL.name, _ARGUMENTS)
        turns.append(Turn("assistant", (Thinking(f"Thought {step}."), Text(f"Step {step}."), call)))
        turns.append(Turn("tool", (ToolOutput(call.id, f"Output {step}."),)))
    if again:
        turns.append(Turn("assistant", (Thinking("Last thought."), Text("The answer."))))
        turns.append(Turn("user", (Text("Second query."),)))
    return Conversation(tuple(turns), (_TOOL,))


def _traits(wire_format: Format, tokenizer: Tokenizer, template: ChatTemplate) -> Traits:
    traits = Traits()
    renderer = Renderer(wire_format, tokenizer, template, traits)
    first = _conversation(0)
    by_template = Renderer(replace(wire_format, tools_text=None), tokenizer, template, traits)
    declared = _TOOL.description in _text(by_template, first)
    if declared == (wire_format.tools_text is not None):
        raise Mismatch("the template declares tools itself" if declared else "the template does not declare tools")
    openers = []
    for thinking in (True, False):
        text = _text(renderer, first, thinking)
        _, found, opener = text.rpartition(wire_format.turns.assistant)
        if not found:
            raise Mismatch(f"the generation prompt has no {wire_format.turns.assistant!r}")
        openers.append(opener)
    think = wire_format.think
    if openers[0] and not (think and openers[0].startswith(think.open)):
        raise Mismatch(f"the generation prompt ends with {openers[0]!r}, which is not understood")
    traits = replace(traits, opener=openers[0], opener_off=openers[1])
    renderer = Renderer(wire_format, tokenizer, template, traits)
    try:
        verbatim = _ARGUMENTS in _text(renderer, _conversation(1))
    except RenderError:
        verbatim = False
    traits = replace(traits, arguments="text" if verbatim else "mapping")
    middle = _conversation(0)
    extra = (Turn("assistant", (Text("Yes."),)), Turn("system", (Text("Middle."),)), Turn("user", (Text("And?"),)))
    middle = replace(middle, turns=middle.turns + extra)
    try:
        anywhere = replace(traits, system_anywhere=True)
        Renderer(wire_format, tokenizer, template, anywhere).render(middle, thinking=True, remember=False)
    except RenderError:
        return traits
    return anywhere


def _text(renderer: Renderer, conversation: Conversation, thinking: bool = True) -> str:
    return renderer.text_of(renderer.messages(conversation), conversation, thinking)


def _check_round_trip(renderer: Renderer, tokenizer: Tokenizer) -> None:
    """An assistant turn inside the tool loop must parse back to what it was rendered from."""
    conversation = _conversation(1)
    prompt = renderer.render(conversation, thinking=True, remember=False)
    header = next(span for span in prompt.spans if span.kind == "assistant_header")
    turn = next(span for span in prompt.spans if span.kind == "assistant")
    parser = StreamParser(
        renderer.format, Wire.resolve(renderer.format, tokenizer), tokenizer, conversation.tools, thinking_open=False
    )
    events = [event for token in prompt.ids[header.end : turn.end] for event in parser.feed(token)]
    events += parser.finish("stop")
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    thinking = "".join(event.text for event in events if isinstance(event, ThinkingDelta))
    names = [event.name for event in events if isinstance(event, ToolCallStart)]
    arguments = "".join(event.fragment for event in events if isinstance(event, ToolArgsDelta))
    written = tokenizer.decode(prompt.ids[header.end : turn.end])
    if text != "Step 0." or names != [_TOOL.name] or thinking not in ("", "Thought 0."):
        raise Mismatch(f"an assistant turn does not parse back; the template writes {written!r}")
    if arguments == "" or json.loads(arguments) != json.loads(_ARGUMENTS):
        raise Mismatch(f"call arguments do not parse back; the template writes {written!r}")


def _probe(renderer: Renderer, traits: Traits) -> Probe:
    query, one, two, again = (
        _text(renderer, conversation)
        for conversation in (_conversation(0), _conversation(1), _conversation(2), _conversation(2, again=True))
    )
    header = renderer.format.turns.assistant
    think = renderer.format.think
    return Probe(
        opener_prefilled=bool(think and think.open in traits.opener),
        thinking_kept_in_loop="Thought 0." in two,
        thinking_kept_after_user="Thought 0." in again and "Last thought." in again,
        in_loop=_survivors(query, one, two, header),
        after_user=_survivors(query, two, again, header),
        template_declares_tools=renderer.format.tools_text is None,
    )


def _survivors(query: str, before: str, after: str, header: str) -> frozenset[Survivor]:
    """Which positions around the first assistant turn of ``before`` are also in ``after``.

    ``query`` is the prompt that the turn answered.
    """
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
    start = query.rindex(header)
    end_of_turn = before.index("Output 0.")
    thought = before.find("Thought 0.")
    found: set[Survivor] = set()
    if shared >= start and before.startswith(query[:start]):
        found.add("assistant_header")
    if after.startswith(query):
        found.add("generation_prompt")
    if thought >= 0 and shared >= thought + len("Thought 0."):
        found.add("thinking")
    if shared >= end_of_turn:
        found.add("turn_end")
    return frozenset(found)
