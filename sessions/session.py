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
TOKEN_BYTES = 12
"""About what a remembered token takes, with the text of the journal."""


@dataclass(frozen=True)
class Limits:
    """Bounds of memory. ``max_tokens`` counts remembered tokens over all sessions (``TOKEN_BYTES`` each),
    ``session_tokens`` those of one session's journal."""

    max_sessions: int = 1000
    max_tokens: int = 32_000_000
    session_tokens: int = 2_000_000
    branches: int = 64
    turns: int = 8192
    history: int = 256


@dataclass(frozen=True)
class RequestRecord:
    """One request of a session's timeline. Counts are in tokens, ``time`` in seconds of the given clock. ``device``,
    ``host``, ``disk`` and ``remote`` (a tier that a remote engine does not name) say where what was ``resumed`` came
    from."""

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
    device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0


@dataclass(frozen=True)
class SessionSummary:
    """``client_id`` is the session id the client gave, empty if it gave none. ``prompt`` is in tokens; ``kept_bytes``:
    about what is remembered of it, in memory or on disk. A ``pinned`` session is never dropped."""

    id: str
    client_id: str
    harness: str
    created: float
    last_used: float
    requests: int
    branches: int
    prompt: int
    kept_bytes: int
    pinned: bool


@dataclass(frozen=True)
class SessionDetail:
    summary: SessionSummary
    branches: tuple[str, ...]
    requests: tuple[RequestRecord, ...]


@dataclass(eq=False)
class Branch:
    """One thread of a session. ``tools``: the last ones it was sent with. ``keys``: its entries in the prefix index.
    ``number`` and, for each of ``pasts``, ``slots`` say where it is written."""

    name: str
    number: int = -1
    head: bytes = b""
    tools: tuple[Tool, ...] = ()
    pasts: tuple[Asked, ...] = ()
    slots: tuple[int, ...] = ()
    keys: dict[bytes, None] = field(default_factory=dict)

    def remember(self, asked: Asked) -> None:
        """Remembers a prompt, in place of one that it continues. A request for a summary replaces none: the
        conversation may go on as if it had not been sent. A replaced prompt hands on its slot, where most of what is
        written stays the same."""
        places = list(zip(self.slots, self.pasts, strict=True))
        continued = [
            slot
            for slot, past in places
            if asked.kind != "compaction" and common_prefix(past.tokens, asked.tokens) >= past.length
        ]
        kept = [place for place in places if place[0] not in continued][-(PASTS - 1) :]
        free = [slot for slot in range(PASTS) if all(slot != taken for taken, _ in kept)]
        places = [*kept, ((continued or free)[-1], asked)]
        self.slots, self.pasts = (tuple(slot for slot, _ in places), tuple(past for _, past in places))

    def forget(self) -> None:
        """All but what the prefix index and its name need."""
        self.tools, self.pasts, self.slots = (), (), ()

    @property
    def tokens(self) -> int:
        return sum(past.length + TURN_TOKENS * len(past.turns) for past in self.pasts)


class Session:
    """Mutable, owned by ``Sessions``; all calls come from one thread. One that is ``asleep`` has its branches by name
    only; the rest is on disk."""

    def __init__(self, id: str, client_id: str, namespace: str, harness: str, limits: Limits, now: float) -> None:
        self.id = id
        self.client_id = client_id
        self.namespace = namespace
        self.harness = harness
        self.branches: OrderedDict[str, Branch] = OrderedDict()
        self.created = self.last_used = now
        self.requests = 0
        self.prompt = 0
        self.pinned = False
        self.asleep = False
        self.stored_tokens = 0
        """Tokens on disk while it is asleep."""
        self.dropped: list[int] = []
        """Numbers of branches that are still on disk."""
        self._limits = limits
        self.empty()

    def empty(self) -> None:
        """Forgets what can be read from disk again."""
        self.journal = Journal(self._limits.session_tokens)
        self.history: deque[RequestRecord] = deque(maxlen=self._limits.history)
        for branch in self.branches.values():
            branch.forget()

    def branch(self, name: str, dropped: Callable[[Branch], None]) -> Branch:
        """The branch of that name, made if it is new; ``dropped`` is told of one that had to go for it."""
        branch = self.branches.get(name)
        if branch is None:
            taken = {branch.number for branch in self.branches.values()} | set(self.dropped)
            number = next(number for number in range(len(taken) + 1) if number not in taken)
            branch = self.branches[name] = Branch(name, number)
        self.branches.move_to_end(name)
        if len(self.branches) > self._limits.branches:
            surplus = self.branches.popitem(last=False)[1]
            self.dropped.append(surplus.number)
            dropped(surplus)
        return branch

    @property
    def tokens(self) -> int:
        """Those held in memory."""
        return self.journal.tokens + sum(branch.tokens for branch in self.branches.values())

    def summary(self) -> SessionSummary:
        return SessionSummary(
            id=self.id,
            client_id=self.client_id,
            harness=self.harness,
            created=self.created,
            last_used=self.last_used,
            requests=self.requests,
            branches=len(self.branches),
            prompt=self.prompt,
            kept_bytes=TOKEN_BYTES * (self.stored_tokens if self.asleep else self.tokens),
            pinned=self.pinned,
        )

    def detail(self) -> SessionDetail:
        return SessionDetail(self.summary(), tuple(self.branches), tuple(self.history))
