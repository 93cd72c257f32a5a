"""What the template sees: a conversation as chat messages, in the shape that this checkpoint's template needs.

Every content is marked, so that the rendering shows where it ended up (``guard``). Text beside tool outputs in one
turn (harness reminders) is no user query: it is handed over as part of the output before it (or of the first output),
so that no template takes it for a new query and drops thinking because of it.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import groupby
from threading import Lock
from typing import Literal

from parsers.conversation import (
    Block,
    Conversation,
    Sampled,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolOutput,
    Turn,
    same_tools,
)
from parsers.format import LONGEST_NAME, CallIds, Format
from parsers.guard import CONTINUED, OUTPUT, SYSTEM, THOUGHT, USER, Fixed, Guard, around
from parsers.memory import Memory
from parsers.plain_schema import plain_schema
from parsers.prompt import TurnKind
from parsers.template import TemplateRefusal
from parsers.write import arguments_mapping, arguments_text, assistant_text, thinking_of, tool_descriptions, tools_text

NINE = re.compile("[A-Za-z0-9]{9}")
ThinkingField = Literal["", "reasoning_content", "reasoning", "thinking", "chunks"]
Calls = Literal["template", "rewritten", "rewritten_bare", "content"]
Message = dict[str, object]
_MEMORY = 64 << 20
_TOOLS = 16
"""Lists of tools whose descriptions are remembered."""


class RenderError(Exception):
    """The conversation cannot be rendered by this checkpoint's template; the message says why."""


@dataclass(frozen=True)
class Traits:
    """What the template needs and does, found by probing it."""

    arguments: Literal["text", "mapping"] = "text"
    """Call arguments are handed over as JSON text, verbatim, or decoded."""
    thinking: ThinkingField = "reasoning_content"
    """Where the template looks for thinking; "chunks" are parts of the content."""
    calls: Calls = "template"
    """Assistant turns with calls are written by the template; by the format, in the place where the template writes its
    own (some drop or move text, or lose types; "rewritten_bare": some want no content beside calls); or as content,
    because the template knows nothing of calls."""
    one_call: bool = False
    """A message may have only one call."""
    plain_schemas: bool = False
    """The template only understands schemas without references, unions and omissions."""
    declares_tools: bool = True
    """The template tells the model of tools; else the format does, in the system text."""
    system: Literal["anywhere", "first", "in_user"] = "first"
    """Where system turns may come. "in_user": the template has no place for system text, or one that moves as the
    conversation grows; the first user turn begins with it."""
    tools_move: bool = False
    """The template tells of tools before the last user turn, wherever that is. They stay before the first one instead,
    or each query would have all of the conversation read again."""
    users_in_a_row: bool = True
    """User turns may follow each other."""
    users_behind_outputs: bool = True
    """A user turn may follow tool outputs, or calls without any."""
    answers_in_a_row: bool = True
    """Assistant turns may come first, and follow each other. Else those that do are one, and an empty query stands
    before one that answers nothing."""
    thoughts_alone: bool = True
    """An answer may be thinking and nothing else, as after an interruption, wherever it stands. Else it says nothing:
    the template drops the thinking, and what is left of the turn is the end of one."""
    stub: str = ""
    """What stands between header and text where thinking was dropped."""


@dataclass(frozen=True)
class Item:
    """A turn, or a part of one, that the rendering must show. ``blocks`` of assistants are written by the format where
    the template does not, ``first_call`` being the number of their first call."""

    kind: TurnKind
    turn: int
    blocks: tuple[Block, ...] = ()
    first_call: int = 0
    sampled: Sampled | None = None


@dataclass
class Plan:
    """What is handed to the template, and which items its output must consist of."""

    messages: list[Message] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    """The turn of each message."""
    refused: dict[int, list[tuple[TurnKind, int, str]]] = field(default_factory=dict)
    """(kind, turn, text) of turns that the template refuses, by the item before which they stand."""
    continues: bool = False
    """The last item is an answer that is to go on."""
    stem: Plan | None = None
    """How far this plan had come before the last answer: nothing that follows changes that."""
    turn: int = 0
    """Of a stem: that of the answer."""
    made: dict[str, _Made] = field(default_factory=dict)
    """Calls by the client's ids; ``count`` of them."""
    count: int = 0
    early: set[tuple[int, str]] = field(default_factory=set)
    """Outputs that stand directly behind their calls."""
    first: str = ""
    """System text that waits for the first user turn."""
    in_loop: bool = False
    """The last answer made calls."""

    def add(self, item: Item, message: Message) -> None:
        self.items.append(item)
        self.messages.append(message)
        self.origins.append(item.turn)

    def refusal(self, render: Callable[[Sequence[Message]], object], error: TemplateRefusal) -> RenderError:
        """The template's, with the turn without which it would not have refused, where there is one."""
        fewer, more = 0, len(self.messages)
        while more - fewer > 1:
            middle = (fewer + more) // 2
            try:
                render(self.messages[:middle])
            except TemplateRefusal as other:
                refused = str(other) == str(error)
            else:
                refused = False
            fewer, more = (fewer, middle) if refused else (middle, more)
        at = f" at turn {self.origins[fewer]}" if fewer and self.origins[fewer] >= 0 else ""
        return RenderError(f"the chat template refuses this conversation{at}: {error}")

    def copied(self, turn: int) -> Plan:
        """As far as it has come, for another one to go on."""
        other = copy(self)
        other.messages, other.items, other.origins = [*self.messages], [*self.items], [*self.origins]
        other.refused = {item: [*turns] for item, turns in self.refused.items()}
        other.made, other.early = {**self.made}, {*self.early}
        other.stem, other.turn = None, turn
        return other


class Planner:
    """Makes plans for one checkpoint. ``written_ids``: what the model wrote as the ids of a sampled turn's calls."""

    def __init__(
        self, wire_format: Format, guard: Guard, traits: Traits, written_ids: Callable[[Sampled], Sequence[str]]
    ) -> None:
        self.format, self.guard, self.traits, self.written_ids = wire_format, guard, traits, written_ids
        self._known: Memory[ToolCall, object] = Memory(_MEMORY, _size)
        self._tools: deque[tuple[Sequence[Tool], Fixed]] = deque(maxlen=_TOOLS)
        self._lock = Lock()

    def forget(self) -> None:
        self._known.forget()
        with self._lock:
            self._tools.clear()

    def tools(self, tools: Sequence[Tool]) -> Fixed:
        """The tools that the template is told of."""
        return self._described(tools) if self.traits.declares_tools and not self.traits.tools_move else Fixed()

    def moved_tools(self, tools: Sequence[Tool]) -> tuple[list[Message], list[dict[str, object]]]:
        """Messages and tools for the shortest prompt that tells of them."""
        return [{"role": "user", "content": self.marked("x", USER)}], self._described(tools)

    def plan(self, conversation: Conversation, stem: Plan | None = None) -> Plan:
        """``stem``: of a plan for the same tools and the same turns, up to one that is an answer here too. What came of
        it are the same objects again. Raises RenderError."""
        if stem is not None:
            return _Planning(self, conversation, stem).plan
        for tool in conversation.tools:
            if not self.format.can_call(tool.name):
                raise RenderError(
                    f"the tool {tool.name!r:.80}: a call of this name cannot be told from other text of this model; "
                    f"give it another one, of at most {LONGEST_NAME} characters"
                )
        return _Planning(self, conversation).plan

    def _described(self, tools: Sequence[Tool]) -> Fixed:
        """The same object for the same tools."""
        with self._lock:
            known = next((made for some, made in self._tools if same_tools(some, tools)), None)
        if known is None:
            known = Fixed(self._describe(tools))
            with self._lock:
                self._tools.append((tools, known))
        return known

    def _describe(self, tools: Sequence[Tool]) -> list[dict[str, object]]:
        if self.traits.plain_schemas:
            tools = [replace(tool, parameters=plain_schema(tool.parameters)) for tool in tools]
        return tool_descriptions(self.guard, tools)

    def marked(self, text: str, mark: str) -> str:
        return around(self.guard.text(text), mark, mark)

    def content(self, turn: Turn) -> str:
        return "\n".join(block.text for block in turn.blocks if isinstance(block, Text))

    def system(self, text: str, tools: Sequence[Tool]) -> str:
        marked = self.marked(text, SYSTEM)
        if not tools or self.traits.declares_tools or self.format.tools_text is None:
            return marked
        between = "\n\n" if text.strip() else ""
        return marked + between + tools_text(self.format.tools_text, self._described(tools))

    def assistant(self, item: Item, calls: Sequence[_Made], continues: bool) -> Message:
        sampled = item.sampled
        thought = sampled is not None and sampled.thinking_end > 0
        text = "".join(block.text for block in item.blocks if isinstance(block, Text))
        if sampled and not text and not calls:
            text = "-"  # where its tokens are put
        content: str | None = around(self.guard.text(text), "", CONTINUED) if continues else self.guard.text(text)
        if calls and self.traits.calls == "content":
            content = assistant_text(self.format, self.guard, item.blocks, "closed", item.first_call)
        elif calls and self.traits.calls != "template":
            content = "" if self.traits.calls == "rewritten" else None
        message: Message = {"role": "assistant", "content": content}
        thinking = thinking_of(item.blocks)
        if thinking.strip() or thought:
            self._put_thinking(message, self.marked(thinking, THOUGHT))
        if calls and self.traits.calls != "content":
            message["tool_calls"] = Fixed(
                {
                    "type": "function",
                    "id": self.guard.text(one.identity),
                    "function": {"name": self.guard.text(one.call.name), "arguments": self._arguments(one.call)},
                }
                for one in calls
            )
        return message

    def _put_thinking(self, message: Message, thinking: str) -> None:
        where = self.traits.thinking
        if where == "chunks":
            chunks = [{"type": "thinking", "thinking": thinking}]
            chunks += [{"type": "text", "text": str(message["content"])}] if message["content"] else []
            message["content"] = Fixed(chunks)
        elif where:
            message[where] = thinking

    def _arguments(self, call: ToolCall) -> object:
        if self.traits.arguments == "text":
            return self.guard.text(arguments_text(call))
        return self._known.of(call, lambda: self.guard.value(arguments_mapping(call)))

    def output(self, identity: str, texts: Sequence[str]) -> Message:
        content, result = self.marked("\n".join(texts), OUTPUT), self.format.result
        if self.traits.calls == "content" and not self.traits.declares_tools:
            content = f"{result.open}{result.inner}{content}{result.inner}{result.close}"
            return {"role": "user", "content": content}
        return {"role": "tool", "content": content, "tool_call_id": self.guard.text(identity)}


@dataclass(frozen=True)
class _Made:
    """A call of the conversation: its number, and its id as the template wants it."""

    call: ToolCall
    number: int
    identity: str


class _Planning:
    """One conversation as it becomes a plan."""

    def __init__(self, planner: Planner, conversation: Conversation, stem: Plan | None = None) -> None:
        self.plan = stem.copied(0) if stem is not None else Plan()
        self._planner = planner
        self._format, self._traits = planner.format, planner.traits
        self._conversation = conversation
        told = [turn.role for turn in conversation.turns[:1]] == ["system"]
        if stem is None and not self._traits.declares_tools and conversation.tools and not told:
            self._system(-1, planner.system("", conversation.tools))
        begin = stem.turn if stem else 0
        self._last = _last_answer(conversation, self._traits, begin)
        # An answer that says nothing is none: to some templates it is the end of a turn before it.
        turns = [
            one
            for one in enumerate(conversation.turns[begin:], begin)
            if not _is_answer(one) or has_content(one[1], self._traits)
        ]
        if not self._traits.answers_in_a_row:
            turns = [
                one for answers, run in groupby(turns, _is_answer) for one in (_joined([*run]) if answers else run)
            ]
        self.plan.continues = bool(turns) and not self._format.frames and _goes_on(turns[-1][1])
        self._continued = turns[-1][0] if self.plan.continues else -1
        for outputs, run in groupby(turns, lambda one: _has_outputs(one[1])):
            if outputs:
                self._outputs([(index, *one) for index, turn in run for one in _outputs(turn)])
            else:
                for index, turn in run:
                    if index == self._last:
                        self.plan.stem = self.plan.copied(index)
                    self._turn(index, turn)

    def _turn(self, index: int, turn: Turn) -> None:
        planner, plan = self._planner, self.plan
        if turn.role == "assistant":
            self._assistant(index, turn)
        elif turn.role != "system":
            self._user(index, planner.content(turn))
        elif index == 0:
            self._system(index, planner.system(planner.content(turn), self._conversation.tools))
        elif self._traits.system == "anywhere":
            content = planner.marked(planner.content(turn), SYSTEM)
            plan.add(Item("system", index), {"role": "system", "content": content})
        else:
            self._refused("system", index, planner.content(turn))

    def _refused(self, kind: TurnKind, index: int, text: str) -> None:
        refused = self.plan.refused.setdefault(len(self.plan.items), [])
        refused.append((kind, index, self._planner.guard.text(text)))

    def _system(self, index: int, content: str) -> None:
        if self._traits.system == "in_user":
            self.plan.items.append(Item("system", index))
            self.plan.first = content + "\n\n"
        else:
            self.plan.add(Item("system", index), {"role": "system", "content": content})

    def _user(self, index: int, text: str) -> None:
        plan = self.plan
        if not self._traits.users_behind_outputs and plan.items and plan.items[-1].kind != "user" and self.plan.in_loop:
            self._refused("user", index, text)
            return
        content, self.plan.first = self.plan.first + self._planner.marked(text, USER), ""
        if not self._traits.users_in_a_row and plan.items and plan.items[-1].kind == "user":
            plan.items.append(Item("user", index))
            plan.messages[-1]["content"] = f"{plan.messages[-1]['content']}\n\n{content}"
        else:
            plan.add(Item("user", index), {"role": "user", "content": content})

    def _assistant(self, index: int, turn: Turn) -> None:
        calls = [block for block in turn.blocks if isinstance(block, ToolCall)]
        before = next((item.kind for item in reversed(self.plan.items) if item.kind != "system"), "assistant")
        if not self._traits.answers_in_a_row and before == "assistant":
            self._user(-1, "")
        self.plan.in_loop = bool(calls)
        made = []
        written = self._planner.written_ids(turn.sampled) if turn.sampled else ()
        for number, call in enumerate(calls):
            identity = native_id(self._format.call_ids, call.id, call.name, self.plan.count)
            made.append(_Made(call, self.plan.count, written[number] if len(written) == len(calls) else identity))
            self.plan.made[call.id] = made[-1]
            self.plan.count += 1
        first = self.plan.count - len(calls)
        continues = index == self._continued
        sampled = None if continues else turn.sampled
        natives = iter(made)
        blocks = tuple(replace(b, id=next(natives).identity) if isinstance(b, ToolCall) else b for b in turn.blocks)
        item = Item("assistant", index, blocks, first, sampled)
        if not self._traits.one_call or len(calls) < 2 or sampled:
            # Where its tokens are known, the template only needs something to put them in place of.
            shown = made[:1] if self._traits.one_call else made
            self.plan.add(item, self._planner.assistant(item, shown, continues))
            return
        for number, one in enumerate(made):
            said = tuple(b for b in blocks if not isinstance(b, ToolCall)) if number == 0 else ()
            item = Item("assistant", index, (*said, replace(one.call, id=one.identity)), one.number)
            self.plan.add(item, self._planner.assistant(item, [one], continues=False))
            for later, output, texts in self._answers(index, one.call.id):
                self.plan.early.add((later, one.call.id))
                self._add_output(later, output.call_id, texts)

    def _answers(self, index: int, call_id: str) -> Iterator[tuple[int, ToolOutput, list[str]]]:
        """The outputs of a call before the next assistant turn."""
        for later, turn in enumerate(self._conversation.turns[index + 1 :], index + 1):
            if turn.role == "assistant":
                return
            yield from ((later, output, texts) for output, texts in _outputs(turn) if output.call_id == call_id)

    def _outputs(self, outputs: list[tuple[int, ToolOutput, list[str]]]) -> None:
        """Those that follow each other, in the order of their calls: many families have nothing else that tells which
        is whose."""
        for index, output, _ in outputs:
            if output.call_id not in self.plan.made:
                raise RenderError(
                    f"turn {index} has the output of call {output.call_id!r}, which no earlier turn has made: "
                    f"{output.text[:80]!r}"
                )
        outputs.sort(key=lambda one: self.plan.made[one[1].call_id].number)
        for index, output, texts in outputs:
            if (index, output.call_id) not in self.plan.early:
                self._add_output(index, output.call_id, texts)

    def _add_output(self, index: int, call_id: str, texts: Sequence[str]) -> None:
        self.plan.add(Item("tool_output", index), self._planner.output(self.plan.made[call_id].identity, texts))


def _last_answer(conversation: Conversation, traits: Traits, begin: int) -> int:
    """The last answer that is not the first turn, and has another's before it; -1 without one."""
    turns = conversation.turns
    for index in range(len(turns) - 1, max(begin, 1) - 1, -1):
        if turns[index].role == "assistant" and has_content(turns[index], traits):
            return index if turns[index - 1].role != "assistant" else -1
    return -1


def _is_answer(numbered: tuple[int, Turn]) -> bool:
    return numbered[1].role == "assistant"


def _goes_on(turn: Turn) -> bool:
    """An answer that the client has begun, or that was cut off: text at its end, and no calls that wait for outputs."""
    called = any(isinstance(block, ToolCall) for block in turn.blocks)
    return (
        turn.role == "assistant"
        and not called
        and any(isinstance(b, Text) and b.text.strip() for b in turn.blocks[-1:])
    )


def _joined(run: list[tuple[int, Turn]]) -> list[tuple[int, Turn]]:
    """Answers that follow each other as one, whose tokens nobody knows: thinking, text, calls."""
    if len(run) < 2:
        return run
    blocks = [block for _, turn in run for block in turn.blocks]
    texts = ["".join(block.text for block in turn.blocks if isinstance(block, Text)) for _, turn in run]
    thinking = [block for block in blocks if isinstance(block, Thinking)]
    text = Text("\n\n".join(text for text in texts if text.strip()))
    calls = [block for block in blocks if isinstance(block, ToolCall)]
    return [(run[-1][0], Turn("assistant", (*thinking, text, *calls)))]


def has_content(turn: Turn, traits: Traits) -> bool:
    """Does this answer say anything?"""
    says = (Text, Thinking) if traits.thoughts_alone else (Text,)
    return turn.sampled is not None or any(
        isinstance(block, ToolCall) or (isinstance(block, says) and block.text.strip()) for block in turn.blocks
    )


def quoted(turn: Turn) -> str:
    texts = (block.name if isinstance(block, ToolCall) else block.text for block in turn.blocks)
    return repr(" ".join(texts)[:80])


def _has_outputs(turn: Turn) -> bool:
    return any(isinstance(block, ToolOutput) for block in turn.blocks)


def _outputs(turn: Turn) -> list[tuple[ToolOutput, list[str]]]:
    """Each output with its texts and those beside it."""
    outputs: list[tuple[ToolOutput, list[str]]] = []
    early: list[str] = []
    for block in turn.blocks:
        if isinstance(block, ToolOutput):
            outputs.append((block, [*early, block.text]))
            early = []
        elif isinstance(block, Text):
            (outputs[-1][1] if outputs else early).append(block.text)
    return outputs


def _size(call: ToolCall, _: object) -> int:
    """Bytes that a call and its arguments, decoded, take up at most."""
    text = call.arguments
    return 4 * sys.getsizeof(text) + 200 * text.count("{") + 130 * sum(map(text.count, "[:,"))


def native_id(kind: CallIds, call_id: str, name: str, number: int) -> str:
    """The family's own id for a call; ``number`` counts calls over the conversation."""
    if kind == "numbered":
        return f"functions.{name}:{number}"
    if kind == "nine" and not NINE.fullmatch(call_id):
        known = (call_id or str(number)).encode("utf-8", "replace")
        return hashlib.blake2b(known, digest_size=8).hexdigest()[:9]
    return call_id
