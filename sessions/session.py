"""What is remembered of one session: its branches, their prompts, its journal and its timeline."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from parsers.conversation import Tool
from sessions.causes import Asked, Cause
from sessions.digest import common_prefix
from sessions.exact import Journal
from sessions.harness import Kind

PASTS = 4
"""Prompts remembered per branch; one that merely continues another takes its place."""
TURN_TOKENS = 64
"""What a remembered turn weighs beside its tokens, in tokens: its digests."""


@dataclass(frozen=True)
class Limits:
    """Bounds of memory. ``max_tokens`` counts remembered tokens over all sessions (about 12 bytes each with the text of
    the journal), ``session_tokens`` those of one session's journal."""

    max_sessions: int = 1000
    max_tokens: int = 32_000_000
    session_tokens: int = 2_000_000
    branches: int = 64
    turns: int = 8192
    history: int = 256


@dataclass(frozen=True)
class RequestRecord:
    """One request of a session's timeline. Counts are in tokens, ``time`` in seconds of the given clock."""

    number: int
    time: float
    branch: str
    kind: Kind
    prompt: int
    resumed: int
    replayed: int
    new: int
    cause: Cause
    sampled: int
    complete: bool


@dataclass(frozen=True)
class SessionSummary:
    """``client_id`` is the session id the client gave, empty if it gave none."""

    id: str
    client_id: str
    harness: str
    created: float
    last_used: float
    requests: int
    branches: int
    prompt: int
    tokens: int


@dataclass(frozen=True)
class SessionDetail:
    summary: SessionSummary
    branches: tuple[str, ...]
    requests: tuple[RequestRecord, ...]


@dataclass(eq=False)
class Branch:
    """One thread of a session. ``tools``: the last ones it was sent with. ``keys``: its entries in the prefix index."""

    name: str
    head: bytes = b""
    tools: tuple[Tool, ...] = ()
    pasts: tuple[Asked, ...] = ()
    keys: dict[bytes, None] = field(default_factory=dict)

    def remember(self, asked: Asked) -> None:
        """A request for a summary never takes a place: the conversation may go on as if it had not been."""
        kept = [
            past
            for past in self.pasts
            if asked.kind == "compaction" or common_prefix(past.tokens, asked.tokens) < past.length
        ]
        self.pasts = (*kept, asked)[-PASTS:]

    @property
    def tokens(self) -> int:
        return sum(past.length + TURN_TOKENS * len(past.turns) for past in self.pasts)


class Session:
    """Mutable, owned by ``Sessions``; all calls come from one thread."""

    def __init__(self, id: str, client_id: str, namespace: str, harness: str, limits: Limits, now: float) -> None:
        self.id = id
        self.client_id = client_id
        self.namespace = namespace
        self.harness = harness
        self.journal = Journal(limits.session_tokens)
        self.branches: OrderedDict[str, Branch] = OrderedDict()
        self.history: deque[RequestRecord] = deque(maxlen=limits.history)
        self.created = self.last_used = now
        self.requests = 0
        self._limits = limits

    def branch(self, name: str, dropped: Callable[[Branch], None]) -> Branch:
        """The branch of that name, made if it is new; ``dropped`` is told of one that had to go for it."""
        branch = self.branches.setdefault(name, Branch(name))
        self.branches.move_to_end(name)
        if len(self.branches) > self._limits.branches:
            dropped(self.branches.popitem(last=False)[1])
        return branch

    @property
    def tokens(self) -> int:
        return self.journal.tokens + sum(branch.tokens for branch in self.branches.values())

    def summary(self) -> SessionSummary:
        prompt = self.history[-1].prompt if self.history else 0
        return SessionSummary(
            self.id,
            self.client_id,
            self.harness,
            self.created,
            self.last_used,
            self.requests,
            len(self.branches),
            prompt,
            self.tokens,
        )

    def detail(self) -> SessionDetail:
        return SessionDetail(self.summary(), tuple(self.branches), tuple(self.history))
