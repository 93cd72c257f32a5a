"""Does a format fit a checkpoint, and what does its template do? Found at load by rendering, not kept in a table.

Prompts of one conversation (query; calls and outputs; answer and a new query) show what the template keeps. A format
fits when its turns are found in the rendering and an assistant turn parses back to its blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from parsers.conversation import Conversation, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from parsers.events import TextDelta, ThinkingDelta, ToolArgsDelta, ToolCallStart
from parsers.format import Format
from parsers.render import Renderer, RenderError, Traits
from parsers.stream import StreamParser, Wire
from parsers.template import ChatTemplate
from parsers.tokens import Tokenizer

_TOOL = Tool(
    "find_probe",
    "Finds a probe.",
    {"type": "object", "properties": {"where": {"type": "string"}, "count": {"type": "integer"}}},
)
_ARGUMENTS = '{"where":  "deep below", "count": 7}'


@dataclass(frozen=True)
class Probe:
    """What the template keeps. ``..._survives``: does it still stand where it stood when a new user turn follows?

    ``header_survives`` is about the position before an assistant header (after the system turn and the query before
    it), ``prompt_end_survives`` about the end of the generation prompt, ``turn_end_survives`` about whole assistant
    turns, ``thinking_survives`` about their thinking. ``thinking_in_loop``: thinking stays while tools are called.
    """

    opener_prefilled: bool
    thinking_in_loop: bool
    thinking_survives: bool
    header_survives: bool
    prompt_end_survives: bool
    turn_end_survives: bool


class Mismatch(Exception):
    """Why a format does not fit."""


def examine(wire_format: Format, tokenizer: Tokenizer, template: ChatTemplate) -> tuple[Renderer, Probe]:
    """Raises Mismatch."""
    for text in (wire_format.turns.assistant.close, wire_format.turns.user.open, wire_format.turns.assistant.open):
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
        _, found, opener = text.rpartition(wire_format.turns.assistant.open)
        if not found:
            raise Mismatch(f"the generation prompt has no {wire_format.turns.assistant.open!r}")
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
    query, loop, again = (
        _text(renderer, _conversation(steps, last)) for steps, last in ((0, False), (2, False), (2, True))
    )
    think = renderer.format.think
    return Probe(
        opener_prefilled=bool(think and think.open in traits.opener),
        thinking_in_loop="Thought 0." in loop,
        thinking_survives="Thought 0." in again and "Last thought." in again,
        header_survives=again.startswith(query[: query.rindex(renderer.format.turns.assistant.open)]),
        prompt_end_survives=again.startswith(query),
        turn_end_survives=again.startswith(loop[: loop.index("Output 0.")]),
    )
