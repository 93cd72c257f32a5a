"""Does a format fit a checkpoint, and what does its template do? Found at load by rendering, not kept in a table.

Prompts of one conversation (query; calls and outputs; answer and a new query) show what the template keeps. A format
fits when its turns are found in the rendering and an assistant turn parses back to its blocks. Templates differ in what
they want to be handed (``Traits``): the ways are tried in order, and the first one that loses nothing is taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, get_args

from parsers.conversation import Block, Conversation, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from parsers.encoders.message import Encoder
from parsers.events import TextDelta, ThinkingDelta, ToolArgsDelta, ToolCallStart
from parsers.format import Format
from parsers.guard import SYSTEM, THOUGHT, USER, visible
from parsers.messages import Calls, RenderError, ThinkingField, Traits
from parsers.render import Renderer
from parsers.stream import StreamParser
from parsers.tokens import Tokenizer
from parsers.wire import Wire
from parsers.write import assistant_text

_TOOL = Tool(
    "find_probe",
    "Finds a probe.",
    {"type": "object", "properties": {"where": {"type": "string"}, "count": {"type": "integer"}}},
)
_ARGUMENTS = '{"where":  "deep below", "count": 7}'
_UNUSUAL = Tool(
    "unusual",
    "",
    {
        "$defs": {"place": {"type": "object", "properties": {"depth": {"type": ["integer", "null"]}}}},
        "properties": {
            "any": {},
            "place": {"$ref": "#/$defs/place"},
            "union": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            "kind": {"enum": ["a", 1]},
            "several": {"type": ["array", "null"], "items": {"type": "object"}},
        },
    },
)


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


@dataclass(frozen=True)
class Fit:
    """A format that fits. ``score`` compares fits: how much the template writes as the format says."""

    renderer: Renderer
    probe: Probe
    score: tuple[int, ...]


def examine(wire_format: Format, tokenizer: Tokenizer, template: Encoder) -> Fit:
    """Raises Mismatch."""
    if not any(end in tokenizer.control for end in wire_format.ends):
        raise Mismatch(f"the vocabulary has no control token {' or '.join(map(repr, wire_format.ends))}")
    examination = _Examination(wire_format, tokenizer, template)
    try:
        return examination.fit()
    except RenderError as error:
        raise Mismatch(str(error)) from error


def _conversation(steps: int, again: bool = False) -> Conversation:
    """A query, ``steps`` calls with outputs, and (``again``) an answer with a new query."""
    turns = [Turn("system", (Text("Probe system."),)), _user("First query.")]
    for step in range(steps):
        call = ToolCall(f"probe{step:04d}", _TOOL.name, _ARGUMENTS)
        turns.append(Turn("assistant", (Thinking(f"Thought {step}."), Text(f"Step {step}."), call)))
        turns.append(Turn("tool", (ToolOutput(call.id, f"Output {step}."),)))
    if again:
        turns.append(Turn("assistant", (Thinking("Last thought."), Text("The answer."))))
        turns.append(_user("Second query."))
    return Conversation(tuple(turns), (_TOOL,))


def _user(text: str) -> Turn:
    return Turn("user", (Text(text),))


class _Examination:
    """One format against one checkpoint."""

    def __init__(self, wire_format: Format, tokenizer: Tokenizer, template: Encoder) -> None:
        self._format, self._tokenizer, self._template = wire_format, tokenizer, template
        self._wire = Wire.resolve(wire_format, tokenizer)
        self._base = Renderer(wire_format, tokenizer, template, Traits())

    def fit(self) -> Fit:
        """Raises Mismatch, RenderError."""
        traits = self._head()
        self._check_openers(traits, _conversation(0))
        traits, score = self._calls(traits)
        self._check_openers(traits, _conversation(1))
        traits = replace(traits, stub=self._stub(traits))
        traits = self._odd_turns(traits)
        renderer = self._renderer(traits)
        return Fit(renderer, _probe(renderer), score)

    def _renderer(self, traits: Traits) -> Renderer:
        return self._base.with_traits(traits)

    def _head(self) -> Traits:
        """Where the template puts tools and system text."""
        first = _conversation(0)
        later = replace(first, turns=(*first.turns, Turn("assistant", (Text("Yes."),)), _user("And?")))
        for traits in (Traits(), Traits(system="in_user")):
            try:
                text, longer = (self._renderer(traits).text(one) for one in (first, later))
            except RenderError as error:
                refusal = error
                continue
            declares = _TOOL.description in visible(text)
            if not declares and self._format.tools_text is None:
                raise Mismatch("the template does not declare tools")
            if all(self._in_front(one) for one in (text, longer)):
                moves = declares and self._move(text, longer)
                return replace(traits, declares_tools=declares, tools_move=moves)
            refusal = RenderError("the chat template has no place for system text")
        raise refusal

    def _in_front(self, text: str) -> bool:
        """Does the system text come first, however the conversation goes on?"""
        system, user = text.find(SYSTEM), text.find(USER)
        return 0 <= system < user and text.count(SYSTEM) == 2

    def _move(self, text: str, longer: str) -> bool:
        """Do the tools stand before the last user turn, in a message of their own?"""
        own = any(header in text for header in self._format.turns.others)
        return own and visible(longer).find(_TOOL.description) > len(visible(longer[: longer.find(USER)]))

    def _check_openers(self, traits: Traits, conversation: Conversation) -> None:
        """Is it understood what the generation prompt has behind the assistant header? Raises Mismatch."""
        for thinking in (True, False):
            last = self._renderer(traits).blocks(conversation, thinking)[-1]
            if not last.assistant:
                raise Mismatch(f"the generation prompt has no {self._format.turns.assistant.open!r}")
            if not self._understood(last.body):
                raise Mismatch(f"the generation prompt ends with {last.body!r}, which is not understood")

    def _understood(self, opener: str) -> bool:
        think, answer = self._format.think, self._format.answer
        known = [part for pair in (think, answer) if pair for part in (pair.open, pair.close)]
        return not opener.strip() or any(opener.strip().startswith(part) for part in known)

    # ── assistant turns ───────────────────────────────────────────────────────────────────────────────────────────

    def _ways(self, traits: Traits) -> Iterator[Traits]:
        thinks = self._format.think is not None or self._format.frames is not None
        fields: tuple[ThinkingField, ...] = get_args(ThinkingField)[1:] if thinks else ("",)
        arguments: tuple[Literal["text", "mapping"], ...] = ("text", "mapping")
        for calls, arguments_as, field in product(get_args(Calls), arguments, fields):
            yield replace(traits, calls=calls, arguments=arguments_as, thinking=field)

    def _calls(self, traits: Traits) -> tuple[Traits, tuple[int, ...]]:
        """How calls and thinking are handed over, and how well that does. Raises Mismatch."""
        best: tuple[tuple[int, ...], Traits] | None = None
        problems: dict[str, None] = {}
        for way in self._ways(traits):
            try:
                score = self._try(way)
            except (Mismatch, RenderError) as problem:
                problems[str(problem)] = None
                continue
            if best is None or score > best[0]:
                best = score, way
            if (best[0][1] and way.arguments == "mapping") or way.calls != best[1].calls:
                break
        if best is None:
            raise Mismatch(max(problems, key=lambda problem: "parse back" in problem))  # the first, else
        return best[1], best[0]

    def _try(self, traits: Traits) -> tuple[int, ...]:
        """(who writes calls, thinking is kept, the template's text is what the format would write, arguments are
        verbatim). Raises Mismatch, RenderError."""
        renderer, conversation = self._renderer(traits), _conversation(1)
        block = next(block for block in renderer.blocks(conversation) if block.assistant)
        verbatim = _ARGUMENTS in visible(block.body)
        if traits.calls == "content":
            self._check_ignorance(traits)
        elif traits.arguments == "text" and not verbatim:
            raise Mismatch(f"arguments are not written as they are given; the template writes {visible(block.body)!r}")
        prompt = renderer.render(conversation, remember=False)
        header = next(span for span in prompt.spans if span.kind == "assistant_header")
        turn = next(span for span in prompt.spans if span.kind == "assistant")
        ids = prompt.ids[header.end : turn.end]
        blocks = conversation.turns[2].blocks
        self._check(ids, blocks)
        if traits.calls in ("rewritten", "rewritten_bare"):
            self._check(self._tokenizer.encode_trusted(block.body), blocks[2:], loosely=True)
        written = [assistant_text(self._format, renderer.guard, some, "unopened", 0) for some in (blocks, blocks[1:])]
        return (
            -get_args(Calls).index(traits.calls),
            THOUGHT in block.body,
            any(visible(block.body).strip().startswith(visible(text)) for text in written),
            verbatim,
        )

    def _check(self, ids: tuple[int, ...] | list[int], blocks: tuple[Block, ...], loosely: bool = False) -> None:
        """Do these ids parse back to the blocks? ``loosely``: are there such calls? Raises Mismatch."""
        parser = StreamParser(self._format, self._wire, self._tokenizer, (_TOOL,), thinking_open=False)
        events = [event for token in ids for event in parser.feed(token)] + parser.finish("stop")
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        thinking = "".join(event.text for event in events if isinstance(event, ThinkingDelta))
        names = [event.name for event in events if isinstance(event, ToolCallStart)]
        arguments = "".join(event.fragment for event in events if isinstance(event, ToolArgsDelta))
        wanted = "".join(block.text for block in blocks if isinstance(block, Text))
        written = self._tokenizer.decode(ids)
        if names != [_TOOL.name] or not (loosely or (text == wanted and thinking in ("", "Thought 0."))):
            raise Mismatch(f"an assistant turn does not parse back; the template writes {written!r}")
        if not loosely and _json(arguments) != json.loads(_ARGUMENTS):
            raise Mismatch(f"call arguments do not parse back; the template writes {written!r}")

    def _check_ignorance(self, traits: Traits) -> None:
        """Does the template know nothing of calls, and does the checkpoint know this family's? Raises Mismatch."""
        renderer = self._renderer(replace(traits, calls="template"))
        body = next(visible(block.body) for block in renderer.blocks(_conversation(1)) if block.assistant)
        if _TOOL.name in body:
            raise Mismatch(f"an assistant turn does not parse back; the template writes {body!r}")
        if self._format.tools_text:
            if traits.declares_tools:
                raise Mismatch("the template declares tools itself")
            return
        call = self._format.call
        marker = (call.section.open if call.section else "") or call.open
        if not marker or (marker not in self._tokenizer.control and marker not in renderer.text(_conversation(0))):
            raise Mismatch(f"neither the vocabulary nor the template's text has {marker!r}")

    # ── the rest ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _stub(self, traits: Traits) -> str:
        if self._format.frames:
            return ""
        first = _conversation(0)
        turns = (*first.turns, Turn("assistant", (Thinking("T"), Text("Old answer."))), _user("Q"))
        blocks = self._renderer(traits).blocks(replace(first, turns=turns))
        body = next((block.body for block in blocks[:-1] if block.assistant), "")
        return "" if THOUGHT in body else body.partition("Old answer.")[0]

    def _odd_turns(self, traits: Traits) -> Traits:
        """What the template takes beside the usual."""
        first, loop = _conversation(0), _conversation(1)
        if not self._renders(traits, replace(first, tools=(_TOOL, _UNUSUAL)), "unusual") or self._misreads(traits):
            traits = replace(traits, plain_schemas=True)
        *before, assistant, outputs = loop.turns
        second = ToolCall("probe0009", "unusual", _ARGUMENTS)
        turns = (*before, replace(assistant, blocks=(*assistant.blocks, second)), outputs)
        turns += (Turn("tool", (ToolOutput(second.id, "Output 9."),)),)
        both = replace(loop, turns=turns)
        if not self._renders(traits, both, "unusual" if traits.calls == "template" else ""):
            traits = replace(traits, one_call=True)
        if not self._renders(traits, replace(first, turns=(*first.turns, _user("More.")))):
            traits = replace(traits, users_in_a_row=False)
        if not self._renders(traits, replace(loop, turns=(*loop.turns, _user("More.")))):
            traits = replace(traits, users_behind_outputs=False)
        yes = Turn("assistant", (Text("Yes."),))
        system, query = first.turns
        for answers in ((system, query, yes, yes, _user("And?")), (system, yes, query)):
            if not self._renders(traits, replace(first, turns=answers)):
                traits = replace(traits, answers_in_a_row=False)
        thoughts = Turn("assistant", (Thinking("Hm."),))
        for so_far in (first.turns, loop.turns):
            if not self._renders(traits, replace(loop, turns=(*so_far, thoughts, _user("And?")))):
                traits = replace(traits, thoughts_alone=False)
        extra = (yes, Turn("system", (Text("Middle."),)), _user("And?"))
        anywhere = replace(traits, system="anywhere")
        middle = replace(first, turns=(*first.turns, *extra))
        last = replace(first, turns=(*first.turns, extra[1]))
        fits = self._renders(anywhere, middle, system=3) and self._renders(anywhere, last, system=2)
        return anywhere if traits.system == "first" and fits else traits

    def _misreads(self, traits: Traits) -> bool:
        """Is a list of types printed as Python has it? Then the template takes it for one type."""
        text = self._renderer(traits).text(replace(_conversation(0), tools=(_UNUSUAL,)))
        return bool(re.search(r"\['(integer|array)'", text, re.IGNORECASE))

    def _renders(self, traits: Traits, conversation: Conversation, name: str = "", system: int = -1) -> bool:
        """Is it rendered, with this name in it, and with a place of its own for this system turn?"""
        try:
            renderer = self._renderer(traits)
            prompt = renderer.render(conversation, remember=False)
        except RenderError:
            return False
        places = [span.turn for span in prompt.spans if span.kind in ("system", "user", "assistant")]
        return name in renderer.text(conversation) and (system < 0 or (system in places and places == sorted(places)))


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _probe(renderer: Renderer) -> Probe:
    query, loop, again = (
        visible(renderer.text(_conversation(steps, last))) for steps, last in ((0, False), (2, False), (2, True))
    )
    think = renderer.format.think
    last = renderer.blocks(_conversation(0))[-1]
    return Probe(
        opener_prefilled=bool(think and think.open in last.body),
        thinking_in_loop="Thought 0." in loop,
        thinking_survives="Thought 0." in again and "Last thought." in again,
        header_survives=again.startswith(query[: len(query) - len(last.text)]),
        prompt_end_survives=again.startswith(query),
        turn_end_survives=again.startswith(loop[: loop.index("Output 0.")]),
    )
