"""Conversation to tokens with spans.

The checkpoint's template writes the text; control tokens in it can only be the template's own (``guard``), so the turns
are found exactly by their headers. Each turn is then encoded by itself. Turns begin and end with control tokens, hence
this equals encoding the whole; the one deliberate cut is behind an assistant header, where every prompt ends that is
followed by a sampled turn.

* **Splice.** An assistant turn with known tokens becomes header + all of them where the template keeps its thinking
  (with the opener the generation prompt would have had), header + the tokens after its thinking where it drops it. The
  rendering itself shows which. What the template writes behind the end of the turn follows.
* **Refused turns.** Where the template refuses a ``system`` turn in mid-conversation, it is left out of what the
  template sees and written in its place by the format.
* **Text beside tool outputs** in one turn (harness reminders) is no user query: it is handed over as part of the output
  before it (or of the first output), so that no template takes it for a new query and drops thinking because of it.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal

from parsers.conversation import Conversation, Sampled, Text, ToolCall, ToolOutput, Turn
from parsers.format import Format
from parsers.guard import MARK, Guard, around
from parsers.template import ChatTemplate, TemplateRefusal
from parsers.tokens import Tokenizer
from parsers.write import arguments_mapping, arguments_text, assistant_text, thinking_of, tool_descriptions, tools_text

TurnKind = Literal["system", "user", "assistant", "tool_output"]
PartKind = Literal["tools", "assistant_header", "thinking", "text", "tool_call", "generation_prompt"]
SpanKind = TurnKind | PartKind


class RenderError(Exception):
    """The conversation cannot be rendered by this checkpoint's template; the message says why."""


@dataclass(frozen=True)
class Span:
    """A token range of the final ids. ``turn`` indexes the conversation's turns; -1 where there is none.

    "system", "user", "assistant" and "tool_output" are whole turns, header to end of turn; the others lie inside.
    """

    start: int
    end: int
    kind: SpanKind
    turn: int


@dataclass(frozen=True)
class Prompt:
    """What the engine reads. ``thinking_open``: the generation prompt ends inside the thinking."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    thinking_open: bool
    thinking: bool


@dataclass(frozen=True)
class Traits:
    """What the template needs and does, found by probing it."""

    arguments: Literal["text", "mapping"] = "text"
    """Call arguments are handed over as JSON text, verbatim, or decoded."""
    system_anywhere: bool = False
    """System turns may come in mid-conversation."""
    opener: str = ""
    """What follows the assistant header in the generation prompt, with thinking."""
    opener_off: str = ""
    """The same without thinking."""


@dataclass(frozen=True)
class _Item:
    kind: TurnKind
    turn: int


@dataclass
class _Plan:
    """What is handed to the template, and which turns its output must consist of."""

    messages: list[dict[str, object]] = field(default_factory=list)
    items: list[_Item] = field(default_factory=list)
    refused: dict[int, list[tuple[int, str]]] = field(default_factory=dict)
    """(turn, text) of refused turns, by the item before which they stand."""

    def add(self, kind: TurnKind, turn: int, message: dict[str, object]) -> None:
        self.items.append(_Item(kind, turn))
        self.messages.append(message)


class Renderer:
    """Renders conversations with one checkpoint's template, tokenizer and format."""

    def __init__(self, wire_format: Format, tokenizer: Tokenizer, template: ChatTemplate, traits: Traits) -> None:
        self.format = wire_format
        self.guard = Guard((*tokenizer.control, *wire_format.structure))
        self._tokenizer = tokenizer
        self._template = template
        self._traits = traits
        turns = wire_format.turns
        self._roles: dict[str, TurnKind] = {
            turns.tools.open: "user",
            turns.system.open: "system",
            turns.user.open: "user",
            turns.assistant.open: "assistant",
        }
        headers = sorted(self._roles, key=len, reverse=True)
        self._header = re.compile("|".join(map(re.escape, headers)))
        call, think = wire_format.call, wire_format.think
        self._call_ids = (tokenizer.token_id(call.open), tokenizer.token_id(call.close))
        self._think_close = tokenizer.token_id(think.close) if think else None
        self._end_ids = tuple(tokenizer.token_id(end) for end in wire_format.ends)

    @property
    def identity(self) -> bytes:
        """16 bytes that are the same for the same format, tokenizer and template."""
        parts = (self.format.name.encode(), self._tokenizer.identity, self._template.source.encode())
        return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()

    def render(self, conversation: Conversation, *, thinking: bool, remember: bool) -> Prompt:
        """Raises RenderError."""
        plan = self._plan(conversation)
        text = self.text_of(plan.messages, conversation, thinking)
        writer = _Writer(self._tokenizer, remember)
        blocks = list(self._blocks(text))
        if not blocks or blocks[-1][0] != "assistant" or self.format.turns.assistant.close in blocks[-1][1]:
            raise RenderError("the chat template does not end with a generation prompt")
        writer.text(text[: len(text) - sum(len(block) for _, block in blocks)])
        position = 0
        for role, block in blocks[:-1]:
            position = self._turn(writer, conversation, plan, position, role, block)
        if position != len(plan.items):
            raise RenderError(f"the chat template left out turn {plan.items[position].turn}")
        self._write_refused(writer, plan, position)
        start = len(writer.ids)
        header, think = self.format.turns.assistant.open, self.format.think
        opener = blocks[-1][1].removeprefix(header)
        writer.text(header)
        writer.text(opener)
        writer.span(start, "generation_prompt", -1)
        spans = sorted(writer.spans, key=lambda span: (span.start, -span.end))
        thinking_open = think is not None and think.open in opener and think.close not in opener
        return Prompt(tuple(writer.ids), tuple(spans), thinking_open, thinking)

    def text_of(self, messages: Sequence[dict[str, object]], conversation: Conversation, thinking: bool) -> str:
        """The template's text, marks included. Raises RenderError."""
        tools = [] if self.format.tools_text else tool_descriptions(self.guard, conversation.tools)
        try:
            return self._template.render(messages, tools, thinking=thinking)
        except TemplateRefusal as refusal:
            raise RenderError(f"the chat template refuses this conversation: {refusal}") from refusal

    # ── what the template sees ────────────────────────────────────────────────────────────────────────────────────

    def messages(self, conversation: Conversation) -> list[dict[str, object]]:
        return self._plan(conversation).messages

    def _plan(self, conversation: Conversation) -> _Plan:
        plan = _Plan()
        written_tools = ""
        if self.format.tools_text and conversation.tools:
            descriptions = tool_descriptions(self.guard, conversation.tools)
            written_tools = tools_text(self.format.tools_text, descriptions)
            if not conversation.turns or conversation.turns[0].role != "system":
                plan.add("system", -1, {"role": "system", "content": written_tools})
        for index, turn in enumerate(conversation.turns):
            if any(isinstance(block, ToolOutput) for block in turn.blocks):
                self._add_outputs(plan, index, turn)
            elif turn.role == "assistant":
                plan.add("assistant", index, self._assistant_message(turn))
            elif turn.role != "system":
                plan.add("user", index, {"role": "user", "content": self._content(turn)})
            elif index == 0:
                content = self._content(turn)
                marked = around(content, MARK, MARK) if content.strip() and conversation.tools else content
                joined = "\n\n".join(part for part in (marked, written_tools) if part)
                plan.add("system", index, {"role": "system", "content": joined})
            elif self._traits.system_anywhere:
                plan.add("system", index, {"role": "system", "content": self._content(turn)})
            else:
                plan.refused.setdefault(len(plan.items), []).append((index, self._content(turn)))
        return plan

    def _content(self, turn: Turn) -> str:
        return self.guard.text("\n".join(block.text for block in turn.blocks if isinstance(block, Text)))

    def _add_outputs(self, plan: _Plan, index: int, turn: Turn) -> None:
        outputs: list[tuple[str, list[str]]] = []
        early: list[str] = []
        for block in turn.blocks:
            if isinstance(block, ToolOutput):
                outputs.append((block.call_id, [*early, block.text]))
                early = []
            elif isinstance(block, Text):
                (outputs[-1][1] if outputs else early).append(block.text)
        result = self.format.result
        for call_id, texts in outputs:
            content = self.guard.text("\n".join(texts))
            if self.format.tools_text:
                content = f"{result.open}{result.inner}{content}{result.inner}{result.close}"
                plan.add("tool_output", index, {"role": "user", "content": content})
            else:
                message = {"role": "tool", "content": content, "tool_call_id": self.guard.text(call_id)}
                plan.add("tool_output", index, dict(message))

    def _assistant_message(self, turn: Turn) -> dict[str, object]:
        if self.format.tools_text:
            content = assistant_text(self.format, self.guard, turn.blocks, "closed")
            return {"role": "assistant", "content": content}
        text = "".join(block.text for block in turn.blocks if isinstance(block, Text))
        message: dict[str, object] = {"role": "assistant", "content": self.guard.text(text)}
        thinking = thinking_of(turn.blocks)
        if not thinking.strip() and turn.sampled is not None and turn.sampled.thinking_end:
            thinking = "-"  # stands for the sampled thinking: the rendering shows whether it would be kept
        if thinking:
            message["reasoning_content"] = self.guard.text(thinking)
        calls = [block for block in turn.blocks if isinstance(block, ToolCall)]
        if calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": self.guard.text(call.id),
                    "function": {"name": self.guard.text(call.name), "arguments": self._arguments(call)},
                }
                for call in calls
            ]
        return message

    def _arguments(self, call: ToolCall) -> object:
        if self._traits.arguments == "text":
            return self.guard.text(arguments_text(call))
        return self.guard.value(arguments_mapping(call))

    # ── what the template wrote ───────────────────────────────────────────────────────────────────────────────────

    def _blocks(self, text: str) -> Iterator[tuple[TurnKind, str]]:
        """(role by header, text) of every turn in the rendered text."""
        starts = [(match.start(), self._roles[match[0]]) for match in self._header.finditer(text)]
        for (start, role), (end, _) in zip(starts, [*starts[1:], (len(text), "user")], strict=True):
            yield role, text[start:end]

    def _outputs(self, block: str) -> Iterator[int]:
        """Where the tool outputs of a rendered turn begin, layout included."""
        result = self.format.result
        at = block.find(result.open)
        while at >= 0:
            yield at - len(result.lead) if block.endswith(result.lead, 0, at) else at
            at = block.find(result.open, at + 1)

    def _turn(
        self, writer: _Writer, conversation: Conversation, plan: _Plan, position: int, role: TurnKind, block: str
    ) -> int:
        """Writes one rendered turn; returns the index of the next item."""
        item = plan.items[position] if position < len(plan.items) else None
        outputs = list(self._outputs(block)) if role == "user" else []
        if outputs:
            return self._write_outputs(writer, plan, position, block, outputs)
        if role == "system" and (item is None or item.kind != "system"):
            item = _Item("system", -1)  # tools without a system text, or the template's own default
        elif item is None or item.kind != role:
            expected = f"{item.kind} turn {item.turn}" if item else "the end"
            raise RenderError(f"the chat template writes a {role} turn where {expected} belongs")
        else:
            self._write_refused(writer, plan, position)
            position += 1
        start = len(writer.ids)
        if role == "assistant":
            self._write_assistant(writer, conversation.turns[item.turn], item.turn, block)
        else:
            writer.text(block)
            if role == "system" and conversation.tools and not writer.spans:
                self._tools_span(writer, start, block)
        writer.span(start, item.kind, item.turn)
        return position

    def _write_outputs(self, writer: _Writer, plan: _Plan, position: int, block: str, outputs: list[int]) -> int:
        """A turn of tool outputs, cut where each output begins; the first piece has the header, the last the end."""
        cuts = [0, *outputs[1:], len(block)]
        for number, (begin, end) in enumerate(pairwise(cuts)):
            item = plan.items[position] if position < len(plan.items) else None
            if item is None or item.kind != "tool_output":
                raise RenderError("the chat template writes a tool output where none belongs")
            if position in plan.refused:
                turns = self.format.turns
                if number:
                    writer.text(turns.tools.close + turns.tail)
                self._write_refused(writer, plan, position)
                if number:
                    writer.text(turns.tools.open)
            start = len(writer.ids)
            writer.text(block[begin:end])
            writer.span(start, "tool_output", item.turn)
            position += 1
        return position

    def _write_refused(self, writer: _Writer, plan: _Plan, position: int) -> None:
        """System turns that the template refuses, before the item at ``position``."""
        turns = self.format.turns
        for turn, text in plan.refused.get(position, ()):
            start = len(writer.ids)
            writer.text(f"{turns.system.open}{text}{turns.system.close}{turns.tail}")
            writer.span(start, "system", turn)

    def _tools_span(self, writer: _Writer, start: int, block: str) -> None:
        """The larger of what stands before and behind the system text."""
        before, _, rest = block.partition(MARK)
        system, _, after = rest.partition(MARK)
        whole = len(block.replace(MARK, ""))
        begin, end = (0, len(before)) if len(before) >= len(after) else (len(before) + len(system), whole)
        clean = block.replace(MARK, "")
        ids = writer.ids[start:]
        edges = [0, *accumulate(len(self._tokenizer.token_bytes(token)) for token in ids)]
        places = [bisect_right(edges, len(_visible(clean[:at]).encode())) - 1 for at in (begin, end)]
        writer.spans.append(Span(start + places[0], start + places[1], "tools", -1))

    def _write_assistant(self, writer: _Writer, turn: Turn, index: int, block: str) -> None:
        header = self.format.turns.assistant.open
        body = block.removeprefix(header)
        start = len(writer.ids)
        writer.text(header)
        writer.span(start, "assistant_header", index)
        kept = self.format.think is not None and body.startswith(self.format.think.open)
        if turn.sampled is None:
            begin = len(writer.ids)
            writer.text(body)
            thinking_end = self._thinking_end(writer.ids, begin) if kept else begin
            self._inner_spans(writer, begin, thinking_end, index)
        else:
            self._splice(writer, turn.sampled, index, body, kept)

    def _splice(self, writer: _Writer, sampled: Sampled, index: int, body: str, kept: bool) -> None:
        begin = len(writer.ids)
        if kept:
            writer.text(self._traits.opener if sampled.thinking_end else self._traits.opener_off)
            thinking_end = len(writer.ids) + sampled.thinking_end if sampled.thinking_end else begin
            writer.ids.extend(sampled.ids)
        else:
            writer.text(sampled.thinking_rest)
            writer.ids.extend(sampled.ids[sampled.thinking_end :])
            thinking_end = begin
        end = self.format.turns.assistant.close
        end_id = self._end_ids[0]
        if writer.ids[-1] in self._end_ids[1:]:
            writer.ids.pop()  # ended by another stop token: history has the regular one
        tail = body[body.rindex(end) + len(end) :] if end in body else ""
        if writer.ids[-1] != end_id:
            tail = end + tail
        writer.text(tail)
        self._inner_spans(writer, begin, min(thinking_end, len(writer.ids)), index)

    def _thinking_end(self, ids: list[int], begin: int) -> int:
        """Behind the thinking closer and the layout after it."""
        position = _find(ids, self._think_close, begin, len(ids))
        if position == len(ids):
            return begin
        position += 1
        while position < len(ids) and not self._tokenizer.token_bytes(ids[position]).strip(b"\n"):
            position += 1
        return position

    def _inner_spans(self, writer: _Writer, begin: int, thinking_end: int, index: int) -> None:
        """Thinking, text and calls of the assistant turn that was just written, by their single-token delimiters."""
        if thinking_end > begin:
            writer.spans.append(Span(begin, thinking_end, "thinking", index))
        ids = writer.ids
        opener, closer = self._call_ids
        end = _find(ids, self._end_ids[0], thinking_end, len(ids))
        at = thinking_end
        while at < end:
            start = _find(ids, opener, at, end)
            if start > at and self._visible_tokens(ids[at:start]):
                writer.spans.append(Span(at, start, "text", index))
            if start == end:
                return
            at = min(_find(ids, closer, start, end) + 1, end)
            writer.spans.append(Span(start, at, "tool_call", index))

    def _visible_tokens(self, ids: Sequence[int]) -> bool:
        return any(self._tokenizer.token_bytes(token).strip() for token in ids)


class _Writer:
    """Ids and spans as they grow."""

    def __init__(self, tokenizer: Tokenizer, remember: bool) -> None:
        self.ids: list[int] = []
        self.spans: list[Span] = []
        self._tokenizer = tokenizer
        self._remember = remember

    def text(self, text: str) -> None:
        if text:
            self.ids.extend(self._tokenizer.encode_trusted(text, self._remember))

    def span(self, start: int, kind: SpanKind, turn: int) -> None:
        """A span from ``start`` to here; outputs of one turn become one span."""
        last = self.spans[-1] if self.spans else None
        if kind == "tool_output" and last and (last.kind, last.turn, last.end) == (kind, turn, start):
            self.spans[-1] = Span(last.start, len(self.ids), kind, turn)
        else:
            self.spans.append(Span(start, len(self.ids), kind, turn))


def _visible(text: str) -> str:
    return re.sub("[\ud800-\udfff]", "", text)


def _find(ids: Sequence[int], token: int | None, start: int, end: int) -> int:
    """The first place of ``token`` in [start, end); ``end`` if there is none."""
    if token is None:
        return end
    try:
        return ids.index(token, start, end)
    except ValueError:
        return end
