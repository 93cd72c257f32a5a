"""What the session layer stands between: families, a perfect engine, and a harness that keeps its own history."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.weights.tiktoken import build_byte_tokenizer
from parsers.conversation import Block, Conversation, Text, Thinking, Tool, ToolCall, ToolOutput, Turn
from parsers.events import Boundary, Event, TextDelta, ThinkingDelta, ToolArgsDelta, ToolCallStart
from parsers.format import Effort
from parsers.load import Family, Probe, Prompt, Span, load_family
from parsers.tokens import Tokenizer
from sessions.digest import pack
from sessions.persist import Persist, PersistConfig
from sessions.session import Limits
from sessions.tracker import RequestMeta, Reuse, ReuseReport, Sessions, Visit
from tests.sessions.persist_support import Open

WORD = re.compile(r"<[/a-z_]+>|\w+|\s+|[^\w\s]")


@dataclass
class FakeFamily:
    """Words are tokens. The opener of the thinking is prefilled, and, if ``strips``, thinking is dropped from turns
    before the last user message: the way of most current families."""

    strips: bool = True
    words: dict[str, int] = field(default_factory=dict)
    watches: tuple[tuple[tuple[int, ...], str], ...] = (((1,), "thinking_end"), ((2, 3), "tool_call_start"))

    identity: bytes = b"a fake family's."

    @property
    def probe(self) -> Probe:
        keeps = not self.strips
        return Probe(True, True, keeps, True, keeps, keeps)

    @property
    def tokenizer(self) -> FakeFamily:
        return self

    def encode(self, text: str) -> list[int]:
        return [self.words.setdefault(word, len(self.words)) for word in WORD.findall(text)]

    def render(self, conversation: Conversation, *, thinking: bool = True, effort: Effort | None = None) -> Prompt:
        ids: list[int] = []
        spans: list[Span] = []
        last_user = max((i for i, turn in enumerate(conversation.turns) if turn.role == "user"), default=-1)

        def put(new: Sequence[int], kind: str, turn: int) -> None:
            spans.append(Span(len(ids), len(ids) + len(new), kind, turn))
            ids.extend(new)

        if effort:
            ids.extend(self.encode(f"<effort>{effort}<end>"))
        if conversation.tools:
            spelled = json.dumps([(tool.name, tool.description, tool.parameters) for tool in conversation.tools])
            put(self.encode(f"<tools>{spelled}</tools>"), "tools", -1)
        for index, turn in enumerate(conversation.turns):
            if turn.role == "assistant":
                start = len(ids)
                put(self.encode("<assistant>"), "assistant_header", index)
                keeps = not self.strips or index > last_user
                for kind, piece in self._answer(turn, keeps):
                    put(piece, kind, index)
                ids.extend(self.encode("<eol>"))
                spans.append(Span(start, len(ids), "assistant", index))
            else:
                kind = {"tool": "tool_output"}.get(turn.role, turn.role)
                text = "".join(_text(block) for block in turn.blocks)
                put(self.encode(f"<{turn.role}>{text}<end><eol>"), kind, index)
        put(self.encode("<assistant><think>"), "generation_prompt", -1)
        return Prompt(pack(ids), tuple(spans), True, thinking, effort)

    def _answer(self, turn: Turn, keeps: bool) -> list[tuple[str, Sequence[int]]]:
        if turn.sampled is not None:
            opener = self.encode("<think>") if keeps else []
            ids = turn.sampled.ids if keeps else turn.sampled.ids[turn.sampled.thinking_end :]
            return [("text", [*opener, *ids])]
        pieces = [("thinking", self.encode("<think>" + _thinking(turn.blocks) + "</think>"))] if keeps else []
        for block in turn.blocks:
            if not isinstance(block, Thinking):
                kind = "tool_call" if isinstance(block, ToolCall) else "text"
                pieces.append((kind, self.encode(_text(block))))
        return [*pieces, ("text", self.encode("<end>"))]

    def sample(self, prompt: Prompt, blocks: Sequence[Block], tools: Sequence[Tool], cut: int) -> Answer:
        thinking = self.encode(_thinking(blocks) + "</think>")
        rest = "".join(_text(block) for block in blocks if not isinstance(block, Thinking))
        ids = (*thinking, *self.encode(rest), *self.encode("<end>"))
        return Answer(ids[: len(ids) - cut], tuple(blocks), (Boundary("thinking_end", len(thinking)),))


@dataclass
class RealFamily:
    """A family as the parsers load it; ``sample`` writes like a perfect model and reads it back like the server."""

    family: Family

    @property
    def probe(self) -> Probe:
        return self.family.probe

    @property
    def tokenizer(self) -> Tokenizer:
        return self.family.tokenizer

    @property
    def watches(self) -> Any:
        return self.family.watches

    @property
    def identity(self) -> bytes:
        return self.family.identity

    def render(self, conversation: Conversation, *, thinking: bool = True, effort: Effort | None = None) -> Prompt:
        return self.family.render(conversation, thinking=thinking, effort=effort)

    def sample(self, prompt: Prompt, blocks: Sequence[Block], tools: Sequence[Tool], cut: int) -> Answer:
        ids = self.family.encode_output(prompt, blocks)
        ids = ids[: len(ids) - cut]
        parser = self.family.parser(prompt, tools)
        events = [event for token in ids for event in parser.feed(token)] + parser.finish("abort" if cut else "stop")
        return Answer(ids, tuple(_blocks(events)), tuple(event for event in events if isinstance(event, Boundary)))


@dataclass(frozen=True)
class Answer:
    ids: tuple[int, ...]
    blocks: tuple[Block, ...]
    boundaries: tuple[Boundary, ...]


def _blocks(events: Sequence[Event]) -> list[Block]:
    """Deltas of one kind in a row are one block."""
    blocks: list[Block] = []
    for event in events:
        last = blocks[-1] if blocks else None
        match event:
            case TextDelta(text):
                blocks[len(blocks) - isinstance(last, Text) :] = [
                    Text(last.text + text if isinstance(last, Text) else text)
                ]
            case ThinkingDelta(text):
                before = last.text if isinstance(last, Thinking) else ""
                blocks[len(blocks) - isinstance(last, Thinking) :] = [Thinking(before + text)]
            case ToolCallStart(_, name):
                blocks.append(ToolCall("", name, ""))
            case ToolArgsDelta(_, fragment) if isinstance(last, ToolCall):
                blocks[-1] = replace(last, arguments=last.arguments + fragment)
    return blocks


def _thinking(blocks: Sequence[Block]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, Thinking))


def _text(block: Block) -> str:
    if isinstance(block, ToolCall):
        return f"<call>{block.name} {block.arguments}</call>"
    if isinstance(block, ToolOutput):
        return f"<response>{block.text}</response>"
    return block.text


@dataclass
class FakeEngine:
    """Remembers every token it computed and resumes anywhere; a restart forgets all."""

    incarnation: str = "one"
    fingerprint: str = "these weights"
    known: list[tuple[int, ...]] = field(default_factory=list)

    def divergence(self, ids: Sequence[int]) -> int:
        return min(max((shared(ids, known) for known in self.known), default=0), len(ids) - 1)

    def restart(self) -> None:
        self.known.clear()
        self.incarnation += "+"


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    return next((index for index in range(length) if one[index] != other[index]), length)


@dataclass(frozen=True)
class Outcome:
    visit: Visit
    prompt: Prompt
    report: ReuseReport
    answer: Turn
    kept: float
    """Share of the client's previous prompt and answer that this prompt begins with."""


@dataclass
class Agent:
    """A client with a history of its own. ``say`` runs one request on it and appends ``echo`` of the answer."""

    sessions: Sessions
    family: FakeFamily | RealFamily
    engine: FakeEngine
    meta: RequestMeta
    turns: list[Turn] = field(default_factory=list)
    tools: tuple[Tool, ...] = ()
    before: tuple[int, ...] = ()
    effort: Effort | None = None

    def user(self, text: str) -> Agent:
        self.turns.append(Turn("user", (Text(text),)))
        return self

    def outputs(self, *texts: str) -> Agent:
        calls = [block.id for block in self.turns[-1].blocks if isinstance(block, ToolCall)]
        blocks = tuple(ToolOutput(id, text) for id, text in zip(calls, texts, strict=True))
        self.turns.append(Turn("tool", blocks))
        return self

    def say(self, *blocks: Block, echo: Any = None, meta: RequestMeta | None = None, cut: int = 0) -> Outcome:
        outcome = self.ask(*blocks, meta=meta, cut=cut)
        self.turns.append((echo or (lambda turn: turn))(outcome.answer))
        return outcome

    def ask(
        self, *blocks: Block, meta: RequestMeta | None = None, tools: tuple[Tool, ...] | None = None, cut: int = 0
    ) -> Outcome:
        conversation = Conversation(tuple(self.turns), self.tools if tools is None else tools)
        visit = self.sessions.begin(meta or self.meta, conversation, self.engine.incarnation, self.engine.fingerprint)
        prompt = self.family.render(visit.conversation, effort=self.effort)
        divergence = self.engine.divergence(prompt.ids)
        report = visit.report(prompt, Reuse(divergence, 0, len(prompt) - divergence), "none")
        answer = self.family.sample(prompt, blocks, conversation.tools, cut)
        given, sampled = tuple(_named(block, visit) for block in answer.blocks), answer.ids
        visit.finish(prompt, sampled, given, answer.boundaries, report, cut == 0)
        self.engine.known.append((*prompt.ids, *sampled[:-1]))
        kept = shared(self.before, prompt.ids) / max(len(self.before), 1)
        self.before = (*prompt.ids, *sampled)
        return Outcome(visit, prompt, report, Turn("assistant", given), kept)

    def fork(self, **changes: Any) -> Agent:
        return replace(self, turns=list(self.turns), before=(), **changes)


def _named(block: Block, visit: Visit) -> Block:
    if isinstance(block, ToolCall) and not block.id:
        return replace(block, id=visit.new_call_id())
    if isinstance(block, Thinking) and not block.ticket:
        return replace(block, ticket=visit.new_ticket())
    return block


BASH = Tool(
    "Bash",
    "Run a command",
    {"properties": {"command": {"type": "string"}, "timeout": {"type": "number"}, "description": {"type": "string"}}},
)
EDIT = Tool(
    "Edit",
    "Edit a file",
    {
        "properties": {
            "replace_all": {"type": "boolean", "default": False},
            "file_path": {"type": "string"},
            "old_string": {"type": "string"},
            "new_string": {"type": "string"},
            "count": {"type": "number", "default": 7},
        }
    },
)
CLAUDE = RequestMeta("anthropic", {"user-agent": "claude-cli/2.1.332", "x-claude-code-session-id": "c1"})
CODEX = RequestMeta(
    "responses",
    {
        "user-agent": "codex_exec/0.169.0",
        "session-id": "k1",
        "thread-id": "k1",
        "x-codex-turn-metadata": '{"request_kind":"turn","thread_source":"user"}',
    },
    session_hint="k1",
)
CHAT = RequestMeta("chat")


@dataclass
class World:
    """One server. ``clock`` is what it takes for the time."""

    family: FakeFamily | RealFamily
    engine: FakeEngine
    sessions: Sessions
    clock: list[float]

    def agent(self, meta: RequestMeta, *, system: Sequence[str] = ("You are an agent.",)) -> Agent:
        turns = [Turn("system", tuple(Text(text) for text in system))] if system else []
        return Agent(self.sessions, self.family, self.engine, meta, turns, (BASH, EDIT))

    def claude(self) -> Agent:
        return self.agent(CLAUDE)

    def codex(self) -> Agent:
        return self.agent(CODEX)

    def chat(self) -> Agent:
        return self.agent(CHAT)


def make_world(
    limits: Limits | None = None,
    family: FakeFamily | RealFamily | None = None,
    persist: Persist | None = None,
    engine: FakeEngine | None = None,
) -> World:
    """With the same ``engine`` and directory of ``persist`` as another one: the same server, started again."""
    family, clock = family or FakeFamily(), [0.0]
    sessions = Sessions(family, limits=limits or Limits(), clock=lambda: clock[0], persist=persist)  # type: ignore[arg-type]
    return World(family, engine or FakeEngine(), sessions, clock)


TEMPLATES = Path(__file__).parents[2] / "engine" / "templates"


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], FakeFamily | RealFamily]]:
    made: dict[str, Callable[[], FakeFamily | RealFamily]] = {
        "strips": FakeFamily,
        "keeps": partial(FakeFamily, strips=False),
    }
    for name in ("qwen3_xml", "hermes"):
        directory = tmp_path_factory.mktemp(name)
        build_byte_tokenizer(directory)
        (directory / "chat_template.jinja").write_text((TEMPLATES / f"{name}.jinja").read_text())
        made[name] = partial(RealFamily, load_family(directory))
    return made


@pytest.fixture(params=["strips", "qwen3_xml", "hermes"])
def world(request: pytest.FixtureRequest, families: dict[str, Callable[[], FakeFamily | RealFamily]]) -> World:
    """Of a family that drops the thinking of earlier tool loops."""
    return make_world(family=families[request.param]())


@pytest.fixture
def keeping_world() -> World:
    """Of a family that keeps all thinking."""
    return make_world(family=FakeFamily(strips=False))


@pytest.fixture(scope="session")
def worlds() -> Any:
    return make_world


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens the one directory of a test; the next opening closes the one before."""
    made: list[Persist] = []

    def open_it(**changes: Any) -> Persist:
        for persist in made:
            persist.close()
        config = PersistConfig(tmp_path / "sessions", commit_seconds=0.001, clock=lambda: 0.0)
        made.append(Persist(replace(config, **changes)))
        return made[-1]

    yield open_it
    for persist in made:
        persist.close()
