"""A client's conversation, through sessions, family and engine, without a wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from machine import Machine

from engine.api import Anchor, Watch
from parsers.conversation import Block, Conversation, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from parsers.load import Family
from server.blocks import Assembler
from server.generation import by_origin
from sessions.anchors import watch_points
from sessions.persist import Persist, PersistConfig
from sessions.tracker import RequestMeta, ReuseReport, Sessions

READ = Tool(
    "read",
    "Reads a file.",
    {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}},
)
SYSTEM = "You are a coding agent. " + "Be careful, and say what you did. " * 30


@dataclass(frozen=True)
class Reply:
    """``report`` is the session layer's, ``ids`` the prompt, ``sampled`` the answer."""

    report: ReuseReport
    ids: tuple[int, ...]
    sampled: tuple[int, ...]
    session: str


class House:
    """The API process and the worker behind it, over restarts of both."""

    def __init__(self, family: Family, machine: Machine, directory: Path) -> None:
        self.family = family
        self.machine = machine
        self._directory = directory
        self._life = 0
        self._open()

    def _open(self) -> None:
        self._persist = Persist(PersistConfig(self._directory / "sessions", commit_seconds=0.01))
        self.sessions = Sessions(self.family, clock=self.machine.clock, persist=self._persist)

    def restart(self, **changes: object) -> None:
        """Both end in good order and start again."""
        self.sessions.close()
        self._life += 1
        self.machine.restart(**changes)
        self._open()

    def close(self) -> None:
        self.sessions.close()

    def ask(
        self, meta: RequestMeta, conversation: Conversation, answer: Sequence[Block]
    ) -> tuple[Reply, tuple[Block, ...]]:
        """One request, and the answer's blocks as the client gets them."""
        visit = self.sessions.begin(meta, conversation, f"life {self._life}")
        prompt = self.family.render(visit.conversation)
        forced = self.family.encode_output(prompt, answer)
        done = self.machine.ask(
            prompt.ids,
            forced,
            anchors=[Anchor(a.position, a.kind, a.priority, a.pinned) for a in visit.anchors(prompt)],
            watches=tuple(Watch(w.tokens, w.kind, w.priority) for w in watch_points(self.family.watches)),
            session=visit.session_id,
            side=visit.side,
        )
        parser = self.family.parser(prompt, conversation.tools)
        assembler = Assembler(
            new_call_id=visit.new_call_id,
            new_ticket=visit.new_ticket,
            stops=(),
            freeform=frozenset(),
            parallel_calls=True,
        )
        for token in forced:
            assembler.feed(parser.feed(token))
        assembler.feed(parser.finish("stop"))
        assembler.close(complete=True)
        report = visit.report(prompt, by_origin(done.reuse), done.reuse.cause)
        visit.finish(prompt, forced, assembler.blocks, assembler.boundaries, report, complete=True)
        return Reply(report, prompt.ids, forced, visit.session_id), tuple(assembler.blocks)


@dataclass
class Dialogue:
    """``turns`` is what the client holds and sends; edit it as clients do."""

    house: House
    meta: RequestMeta = RequestMeta("anthropic")  # noqa: RUF009 (frozen)
    tools: tuple[Tool, ...] = (READ,)
    turns: list[Turn] = field(default_factory=lambda: [Turn("system", (Text(SYSTEM),))])

    def user(self, text: str) -> None:
        self.turns.append(Turn("user", (Text(text),)))

    def output(self, text: str) -> None:
        """What the tools answered that were called last."""
        calls = [block for block in self.turns[-1].blocks if isinstance(block, ToolCall)]
        self.turns.append(Turn("tool", tuple(ToolOutput(call.id, text) for call in calls)))

    def send(self, *answer: Block) -> Reply:
        """One request; its answer is appended as the client got it."""
        reply, blocks = self.house.ask(self.meta, Conversation(tuple(self.turns), self.tools), answer)
        self.turns.append(Turn("assistant", blocks))
        return reply

    def step(self, number: int, size: int = 200, *, thinking: bool = True) -> Reply:
        """A request that is answered by a call, and the call's output of about ``size`` bytes."""
        call = ToolCall("", "read", f'{{"path": "src/{number}.py", "limit": {number}}}')
        reply = self.send(*((Thinking(f"Look at file {number} next."),) if thinking else ()), call)
        self.output(f"file {number}: " + f"line {number} of the source. " * (size // 22))
        return reply
