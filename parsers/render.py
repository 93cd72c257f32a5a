"""Conversation to tokens with spans.

The checkpoint's template writes the text, ``turns`` finds the turns in it, and marks show which content of which turn
each of them holds. Each turn is written from the template's text, with these exceptions.

* **Splice.** An assistant turn with known tokens becomes header + all of them where the template keeps its thinking, or
  it has none (with the opener that stood before them in the prompt), header + the tokens after its thinking where it
  drops it. The rendering itself shows which. What the template writes as the end of the turn follows.
* **In place.** A ``system`` turn in mid-conversation or a user turn behind outputs that the template refuses, and an
  assistant turn that it cannot write without loss (``Traits.calls``), are written by the format where the template has
  their place.
* **Tools** that the template would move to the last query stay with the first one.
"""

from __future__ import annotations

import hashlib
import re
import sys
from bisect import bisect_right
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import accumulate, pairwise

from parsers.alternatives import alternatives
from parsers.conversation import Conversation, Sampled, Thinking, ToolCall
from parsers.encoders.message import Encoder
from parsers.format import Effort, Format
from parsers.guard import CONTINUED, OUTPUT, SYSTEM, THOUGHT, USER, Guard, visible
from parsers.memory import Memory
from parsers.messages import Item, Plan, Planner, RenderError, Traits, quoted
from parsers.prompt import Pieces, Prompt, Span, SpanKind, TurnKind, Writer
from parsers.rope import Rope
from parsers.stems import Draft, Mark, Stem, Stems
from parsers.template import ChatTemplate, TemplateRefusal
from parsers.tokens import Tokenizer
from parsers.turns import Block, Finder, Part, Parts, common
from parsers.write import ThinkingState, assistant_text, thinking_of
from parsers.written_ids import WrittenIds

__all__ = ["Prompt", "RenderError", "Renderer", "Span", "SpanKind", "Traits"]

_KINDS: dict[str, TurnKind] = {SYSTEM: "system", USER: "user", OUTPUT: "tool_output"}
_MARKED = re.compile(f"([{SYSTEM}{USER}{OUTPUT}])[^{SYSTEM}{USER}{OUTPUT}]*\\1")
_MEMORY = 32 << 20
_SampledParts = tuple[tuple[int, int, SpanKind], ...]


class Renderer:
    """Renders conversations with one checkpoint's template, tokenizer and format."""

    def __init__(self, wire_format: Format, tokenizer: Tokenizer, template: Encoder, traits: Traits) -> None:
        self.format = wire_format
        self.traits = traits
        self.guard = Guard((*tokenizer.control, *wire_format.structure()))
        self._written = WrittenIds(wire_format)
        self._planner = Planner(wire_format, self.guard, traits, self.written_ids)
        self.finder, self.part_finder = Finder(wire_format, tokenizer.control), Parts(wire_format)
        self.tokenizer, self._template = tokenizer, template
        self._pieces = Pieces(tokenizer)
        self._control_text = re.compile(alternatives(tokenizer.control))
        self.ends = {token: end for end in wire_format.ends if (token := tokenizer.token_id(end)) is not None}
        self._known: Memory[tuple[tuple[int, ...], bool], _SampledParts] = Memory(_MEMORY, lambda k, v: _size(k[0], v))
        self._ids: Memory[tuple[int, ...], Sequence[str]] = Memory(_MEMORY, _size)
        self._stems = Stems(traits)

    def with_traits(self, traits: Traits) -> Renderer:
        """A renderer with other traits that shares all that depends on the vocabulary."""
        other = copy(self)
        other.traits, other._planner = traits, Planner(self.format, self.guard, traits, self.written_ids)
        other._stems = Stems(traits)
        return other

    @property
    def source(self) -> str:
        """The template's."""
        return self._template.source

    @property
    def identity(self) -> bytes:
        """16 bytes that are the same for the same format, tokenizer and template, and way of remembering tokens."""
        parts = (b"openers", self.format.name.encode(), self.tokenizer.identity, self._template.source.encode())
        return hashlib.blake2b(b"\0".join(parts), digest_size=16).digest()

    def forget(self) -> None:
        own = (self._template,) if isinstance(self._template, ChatTemplate) else ()
        for memory in (self._known, self._ids, self.guard, self._planner, self._pieces, self._stems, *own):
            memory.forget()

    def text(self, conversation: Conversation, thinking: bool = True, effort: Effort | None = None) -> str:
        """The template's own text, marks included. Raises RenderError."""
        return str(self._text(self._planner.plan(conversation), conversation, thinking, effort))

    def blocks(self, conversation: Conversation, thinking: bool = True) -> list[Block]:
        """The turns of ``text``, the messages of an assistant turn in one. Raises RenderError."""
        *blocks, last = self.finder.blocks(self.text(conversation, thinking))
        joined: list[Block] = []
        for block in blocks:
            if self.format.frames and block.assistant and joined and joined[-1].assistant:
                joined[-1] = Block(joined[-1].text + block.text, joined[-1].header, True)
            else:
                joined.append(block)
        return [*joined, last]

    def render(
        self, conversation: Conversation, *, thinking: bool = True, effort: Effort | None = None, remember: bool = True
    ) -> Prompt:
        """Raises RenderError."""
        stem = self._stems.find(conversation, thinking, effort) if remember else None
        draft = self._draft(conversation, thinking, effort, stem)
        blocks = self._behind_stem(draft)
        if blocks is None:
            draft, blocks = replace(draft, stem=None), self.finder.blocks(str(draft.text))
        return self._write(draft, blocks, remember)

    def render_on(self, conversation: Conversation, thinking: bool, effort: Effort | None) -> Prompt | None:
        """The prompt, where it goes on from one that was rendered before and little is new, which takes a millisecond
        or two; else None. Raises RenderError."""
        stem = self._stems.find(conversation, thinking, effort)
        if stem is None or not stem.has_most(conversation):
            return None
        draft = self._draft(conversation, thinking, effort, stem)
        blocks = self._behind_stem(draft)
        return None if blocks is None else self._write(draft, blocks, remember=True)

    def _draft(self, conversation: Conversation, thinking: bool, effort: Effort | None, stem: Stem | None) -> Draft:
        """Raises RenderError."""
        plan = self._planner.plan(conversation, stem.plan if stem else None)
        text = self._text(plan, conversation, thinking, effort)
        return Draft(conversation, thinking, effort, plan, text, stem)

    def _write(self, draft: Draft, blocks: list[Block], remember: bool) -> Prompt:
        """``blocks``: those of the text behind the stem. Raises RenderError."""
        conversation, plan, stem = draft.conversation, draft.plan, draft.stem
        if plan.continues:
            *blocks, last = self._up_to_more(blocks, conversation)
        else:
            header = self.format.turns.assistant.open
            if self.format.turns.headless and self._ended(blocks[-1]):  # the next turn is not the template's to begin
                blocks.append(Block(header, header, True))
            *blocks, last = blocks
            if not last.assistant or self.finder.end(last.body)[1]:
                raise _no_answer(conversation)
        writer = Writer(self._pieces, remember, stem.mark.written) if stem else Writer(self._pieces, remember)
        rendering = _Rendering(self, draft, writer)
        rendering.write(blocks)
        start = writer.place()
        writer.text(last.header)
        behind_header = writer.cut()
        writer.text(last.body)
        writer.span(start, "generation_prompt", -1)
        packed, spans = writer.finish()
        if remember and rendering.mark is not None and plan.stem is not None:
            self._stems.keep(draft.stem_up_to(plan.stem, rendering.mark.of(packed)))
        think = self.format.think
        thinking_open = think is not None and think.open in last.body and think.close not in last.body
        opener = () if plan.continues else writer.ids(behind_header)
        open_now = thinking_open and not plan.continues
        return Prompt(packed, spans, open_now, draft.thinking, draft.effort, opener, plan.continues)

    def rendered_turns(self, conversation: Conversation) -> int:
        """How many of its turns were rendered before and are remembered."""
        return self._stems.turns(conversation)

    def _behind_stem(self, draft: Draft) -> list[Block] | None:
        """The blocks behind the stem; None without one, and where the text does not go on as it did."""
        text, stem = draft.text, draft.stem
        if stem is None or not text.begins_with(stem.text):
            return None
        block = stem.mark.block
        begin, size = max(0, block - self.finder.look_back), len(stem.text) - block
        blocks = self.finder.blocks(text.text(begin), block - begin)
        ends = [*accumulate(len(one.text) for one in blocks)]
        return blocks[ends.index(size) + 1 :] if size in ends[:-1] else None

    def _up_to_more(self, blocks: list[Block], conversation: Conversation) -> list[Block]:
        """The turns up to where the last answer goes on. Raises RenderError."""
        for number, block in enumerate(blocks):
            if CONTINUED in block.text and block.assistant:
                return [*blocks[:number], replace(block, text=block.text.partition(CONTINUED)[0])]
        raise _no_answer(conversation)

    def _text(self, plan: Plan, conversation: Conversation, thinking: bool, effort: Effort | None) -> Rope:
        template, variables = self._template, self.format.switches.variables(thinking, effort)
        messages, told = plan.messages, (self._planner.tools(conversation.tools), variables)
        try:
            if isinstance(template, ChatTemplate):
                return template.rope(messages, *told)
            return Rope(template.render(messages, *told))
        except TemplateRefusal as refusal:
            raise plan.refusal(lambda fewer: template.render(fewer, *told), refusal) from refusal

    def _ended(self, block: Block) -> bool:
        return block.assistant and bool(self.finder.end(block.body)[1])

    def moved_tools(self, conversation: Conversation) -> str:
        """The text that declares tools, where the template would move it."""
        if not self.traits.tools_move or not conversation.tools:
            return ""
        turns = self.format.turns
        text = self._template.render(
            *self._planner.moved_tools(conversation.tools), self.format.switches.variables(True)
        )
        begin = min(at for header in turns.others if (at := text.find(header)) >= 0)
        return text[begin : text.index(turns.user.open, begin)]

    def blank(self, text: str) -> bool:
        """Is it only control tokens and white space?"""
        return not self._control_text.sub("", visible(text)).strip()

    def parts(self, ids: tuple[int, ...], thinking_open: bool) -> _SampledParts:
        """(start, end, kind) of the parts of sampled ids, end of turn left out; remembered."""
        return self._known.of((ids, thinking_open), lambda: self._parts_of(ids, thinking_open))

    def _parts_of(self, ids: Sequence[int], thinking_open: bool) -> _SampledParts:
        text, starts = self._sampled_text(ids)
        body = text[: self.finder.end(text)[0]]
        parts = self.part_finder.of(body, thinking_open)

        def position(offset: int) -> int:
            return bisect_right(starts, len(visible(body[:offset]).encode())) - 1

        return tuple((position(part.start), position(part.end), part.kind) for part in parts)

    def _sampled_text(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """The text in which only control tokens read as such, and where each token begins, in visible bytes."""
        text, starts, run = "", [0], b""
        control = self.tokenizer.control
        for token in ids:
            piece = self.tokenizer.token_bytes(token)
            if control.get(name := piece.decode("utf-8", "replace")) == token:
                text, run = text + self.guard.text(run.decode("utf-8", "replace")) + name, b""
            else:
                run += piece
            starts.append(starts[-1] + len(piece))
        return text + self.guard.text(run.decode("utf-8", "replace")), starts

    def written_ids(self, sampled: Sampled) -> Sequence[str]:
        """What the model wrote as ids of its calls, one for each; nothing where the family has none of its own."""
        if self.format.call_ids == "any":
            return ()
        return self._ids.of(sampled.ids, lambda: self._written.of(self._sampled_text(sampled.ids)[0]))


class _Rendering:
    """A draft as it is written. ``mark``: what the next stem begins with."""

    def __init__(self, renderer: Renderer, draft: Draft, writer: Writer) -> None:
        conversation, stem = draft.conversation, draft.stem
        self._renderer, self._conversation, self._plan, self._writer = renderer, conversation, draft.plan, writer
        self._format, self._traits = renderer.format, renderer.traits
        self._finder = renderer.finder
        self.mark: Mark | None = None
        self._stem = stem
        self._position = len(stem.plan.items) if stem else 0
        self._moved = stem.mark.moved if stem else renderer.moved_tools(conversation)
        self._tools_found = stem.mark.tools_found if stem else not conversation.tools or bool(self._moved)
        names = (renderer.guard.text(tool.name) for tool in conversation.tools[:1])
        self._tool_name = next(names, "")

    def write(self, blocks: Sequence[Block]) -> None:
        """Raises RenderError."""
        number = 0
        while number < len(blocks):
            block, number = blocks[number], number + 1
            if not block.assistant:
                self._others(block, first=number == 1 and self._stem is None)
                continue
            if self._plan.stem is not None and self._position == len(self._plan.stem.items):
                self._mark(blocks[: number - 1])
            while self._format.frames and number < len(blocks) and blocks[number].assistant and not self._next_begins():
                block = Block(block.text + blocks[number].text, block.header, True)
                number += 1
            self._assistant_block(block)
        if self._position != len(self._plan.items) - self._plan.continues:
            raise self._misplaced(self._plan.items[self._position])
        self._refused()
        self._tell_tools()

    def _mark(self, before: Sequence[Block]) -> None:
        stem = self._stem
        if stem is not None and not before:
            self.mark = stem.mark
            return
        end = sum(len(block.text) for block in before) + (len(stem.text) if stem else 0)
        back = self._finder.steady(before)
        begin = end - back if back is not None else stem.mark.block if stem else None
        if begin is not None:
            self.mark = Mark(begin, end, self._writer.written(), self._moved, self._tools_found)

    def _tell_tools(self) -> None:
        """Writes what declares tools, where the template would put it elsewhere."""
        if self._moved:
            start = self._writer.place()
            self._writer.text(self._moved)
            self._writer.span(start, "tools", -1)
            self._moved = ""

    def _next_begins(self) -> bool:
        """Does another assistant turn follow directly?"""
        following = self._plan.items[self._position + 1 : self._position + 2]
        return bool(following) and following[0].kind == "assistant"

    def _item(self, kind: TurnKind) -> Item:
        """The next item, which must be of that kind."""
        items = self._plan.items
        item = items[self._position] if self._position < len(items) else None
        if item is None or item.kind != kind:
            raise self._misplaced(item)
        self._position += 1
        return item

    def _misplaced(self, item: Item | None) -> RenderError:
        """The error for an item that the template does not write where it stands, or for a turn that is no item."""
        if item is None or item.turn < 0:
            return RenderError("the chat template writes turns that nobody sent; use another template")
        turn = self._conversation.turns[item.turn]
        return RenderError(
            f"the chat template does not write turn {item.turn} of the conversation ({turn.role}: {quoted(turn)}) "
            "where it stands: leave that turn out, or send it elsewhere"
        )

    def _refused(self, between: bool = False) -> None:
        """Turns that the template refuses, before the next item. ``between`` outputs of one turn: it is closed and
        opened again."""
        turns, writer = self._format.turns, self._writer
        refused = self._plan.refused.get(self._position, ())
        if refused and between:
            writer.text(turns.tools.close + turns.tail)
        for kind, turn, text in refused:
            pair = turns.system if kind == "system" and turns.system.open else turns.user
            start = writer.place()
            writer.text(f"{pair.open}{text}{pair.close}{turns.tail}")
            writer.span(start, kind, turn)
        if refused and between:
            writer.text(turns.tools.open)

    # ── turns of others ───────────────────────────────────────────────────────────────────────────────────────────

    def _others(self, block: Block, first: bool) -> None:
        """A turn that is not the assistant's: those items whose contents it holds, or the template's own."""
        marks = list(_MARKED.finditer(block.text))
        if not marks:
            own = not first or not self._renderer.blank(block.text)
            self._piece(block.text, Item("system", -1) if own else None)
            return
        cuts = [
            0,
            *(self._cut(block.text, one.end(), other.start()) for one, other in pairwise(marks)),
            len(block.text),
        ]
        for number, (mark, (begin, end)) in enumerate(zip(marks, pairwise(cuts), strict=True)):
            kind = _KINDS[mark[1]]
            self._refused(between=number > 0)
            self._piece(block.text[begin:end], self._item(kind))

    def _cut(self, text: str, begin: int, end: int) -> int:
        """Where between two contents the next one begins: its own layout belongs to it."""
        close = self._format.result.close
        at = text.find(close, begin, end) if close else -1
        return at + len(close) if at >= 0 else begin

    def _piece(self, text: str, item: Item | None) -> None:
        writer = self._writer
        start = writer.place()
        if item and item.turn >= 0 and (item.kind == "user" or self._traits.system == "in_user"):
            self._tell_tools()
        if item and item.kind == "system" and not self._tools_found and self._tool_name in text:
            self._with_tools(text)
        else:
            writer.text(text)
        if item:
            writer.span(start, item.kind, item.turn)

    def _with_tools(self, text: str) -> None:
        """The tools are the larger of what stands before and behind the system text."""
        self._tools_found = True
        mark = _MARKED.search(text)
        before, after = (text[: mark.start()], text[mark.end() :]) if mark else (text, "")
        writer = self._writer
        if len(before) >= len(after):
            start = writer.place()
            writer.text(before)
            writer.span(start, "tools", -1)
            writer.text(text[len(before) :])
        else:
            writer.text(text[: len(text) - len(after)])
            start = writer.place()
            writer.text(after)
            writer.span(start, "tools", -1)

    # ── turns of the assistant ────────────────────────────────────────────────────────────────────────────────────

    def _assistant_block(self, block: Block) -> None:
        self._refused()
        item = self._item("assistant")
        writer = self._writer
        start, header = writer.place(), writer.place()
        end, closing = self._finder.end(block.body)
        body, tail = block.body[:end], block.body[end + len(closing) :]
        if item.sampled is not None:
            self._splice(block.header, item.sampled, item, body, closing, tail)
        else:
            writer.text(block.header)
            writer.span(header, "assistant_header", item.turn)
            writer.cut()
            self._body(self._written(item, body).removesuffix(closing), item.turn)
            writer.text(closing + tail)
        writer.span(start, "assistant", item.turn)

    def _written(self, item: Item, body: str) -> str:
        """The turn's text: the template's, or the format's in its place."""
        if self._traits.calls in ("template", "content") or not any(
            isinstance(block, ToolCall) for block in item.blocks
        ):
            return body
        kept = THOUGHT in body
        blocks = [block for block in item.blocks if kept or not isinstance(block, Thinking)]
        stub = "" if kept else self._stub(body)
        state: ThinkingState = "unopened" if kept else "closed"
        return stub + assistant_text(self._format, self._renderer.guard, blocks, state, item.first_call)

    def _body(self, body: str, turn: int) -> None:
        """The parts of a turn that the template or the format wrote."""
        writer, at = self._writer, 0
        for part in self._renderer.part_finder.of(body, thinking_open=False):
            writer.text(body[at : part.start])
            start = writer.place()
            writer.text(body[part.start : part.end])
            if part.kind != "thinking" or not self._empty_thinking(body, part):
                writer.span(start, part.kind, turn)
            at = part.end
        writer.text(body[at:])

    def _empty_thinking(self, body: str, part: Part) -> bool:
        think = self._format.think
        text = body[part.start : part.end]
        return think is not None and not text.strip().removeprefix(think.open).removesuffix(think.close).strip()

    def _splice(self, header: str, sampled: Sampled, item: Item, body: str, closing: str, tail: str) -> None:
        writer, end = self._writer, sampled.thinking_end
        thought = end > 0 and thinking_of(item.blocks).strip()
        dropped = bool(thought) and THOUGHT not in body
        ids = sampled.ids[end:] if dropped else sampled.ids
        if not (dropped and self._repeats(header, ids)):
            start = writer.place()
            writer.text(header)
            writer.span(start, "assistant_header", item.turn)
        writer.cut()
        opened = writer.place()
        if dropped:
            writer.text(self._stub(body) + sampled.thinking_rest)
        else:
            writer.tokens(sampled.opener)
        begin = writer.cut()
        if ids and self._renderer.ends.get(ids[-1], closing) != closing:
            ids = ids[:-1]  # ended by another stop token: history has the template's own end
        writer.tokens(ids)
        for start_at, end_at, kind in self._renderer.parts(ids, thinking_open=end > 0 and not dropped):
            first = opened if kind == "thinking" else writer.token_place(begin + start_at)
            until = begin + (min(end, len(ids)) if kind == "thinking" and end else end_at)
            writer.span(first, kind, item.turn, writer.token_place(until))
        writer.text(tail if self._closed(ids, closing) else closing + tail)

    def _stub(self, body: str) -> str:
        """What the template writes where it dropped thinking."""
        stub = self._traits.stub
        shared = common(stub, body)
        return shared if len(shared) >= len(stub.rstrip()) else ""

    def _closed(self, ids: Sequence[int], closing: str) -> bool:
        tokenizer = self._renderer.tokenizer
        if not closing or not ids or tokenizer.token_id(closing) is not None:
            return bool(closing and ids) and ids[-1] == tokenizer.token_id(closing)
        return tokenizer.decode(ids[-len(closing) :]).endswith(closing)

    def _repeats(self, header: str, ids: Sequence[int]) -> bool:
        """Do the sampled tokens bring the header themselves? Channel formats begin every message with one."""
        if not self._format.frames:
            return False
        wanted = self._renderer.tokenizer.encode_trusted(header)
        return list(ids[: len(wanted)]) == wanted


def _no_answer(conversation: Conversation) -> RenderError:
    last = quoted(conversation.turns[-1]) if conversation.turns else "there is none"
    return RenderError(f"this model cannot go on with the last turn: {last}; send a user turn behind it")


def _size(ids: tuple[int, ...], found: Sequence[object]) -> int:
    return sys.getsizeof(ids) + sum(map(sys.getsizeof, found))
