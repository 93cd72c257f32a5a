"""What the request handlers share."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field

from anyio import CapacityLimiter

from engine.api import Watch
from engine.client import Engine
from parsers.load import Family
from server.bodies import Bodies
from server.history import Stored
from server.idle import Idle
from server.keys import KeyRing
from server.limits import Limits
from server.logprobs import LogprobFormat, logprob_format
from server.script import Script
from server.settings import ServerSettings
from sessions.anchors import watch_points
from sessions.tracker import Reuse, Sessions


@dataclass
class Counters:
    """Events since the start of the server. ``sockets`` are those over which Responses was spoken. ``open_generations``
    is a gauge and must return to 0 when idle. ``host_tokens`` and ``disk_tokens`` are parts of ``resumed_tokens``."""

    requests: int = 0
    errors: int = 0
    disconnects: int = 0
    sockets: int = 0
    open_generations: int = 0
    prompt_tokens: int = 0
    resumed_tokens: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    replayed_tokens: int = 0
    output_tokens: int = 0
    tolerated: int = 0
    empty_answers: int = 0
    script_misses: int = 0

    def count(self, reuse: Reuse) -> None:
        """A prompt, by where its tokens came from."""
        self.prompt_tokens += reuse.prompt
        self.resumed_tokens += reuse.resumed
        self.host_tokens += reuse.host
        self.disk_tokens += reuse.disk
        self.replayed_tokens += reuse.replayed

    def values(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class ServerState:
    """One per application. ``tolerated`` counts by rule what the parser let pass. ``render_limiter`` lets one thread at
    a time render prompts, off the event loop."""

    engine: Engine
    family: Family
    sessions: Sessions
    settings: ServerSettings
    script: Script | None = None
    counters: Counters = field(default_factory=Counters)
    tolerated: Counter[str] = field(default_factory=Counter)
    render_limiter: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))
    started: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    idle: Idle = field(init=False)
    """Computes ahead in quiet moments."""
    keys: KeyRing = field(init=False)
    limits: Limits = field(init=False)
    logprobs: LogprobFormat = field(init=False)
    watches: tuple[Watch, ...] = field(init=False)
    """Of every request."""
    history: Stored = field(default_factory=Stored)
    bodies: Bodies = field(default_factory=Bodies)

    def forget_texts(self) -> None:
        """Empties the caches that only save time. Nobody knows whose texts they hold, so all of them go."""
        self.bodies.forget()
        self.family.forget()
        self.idle.forget()

    def __post_init__(self) -> None:
        settings = self.settings
        self.watches = tuple(Watch(one.tokens, one.kind, one.priority) for one in watch_points(self.family.watches))
        self.idle = Idle(self.engine, self.sessions, settings, self.render_limiter)
        self.logprobs = logprob_format(self.family.tokenizer.token_bytes)
        self.keys = KeyRing(settings.api_keys)
        self.limits = Limits(settings.key_running, settings.key_waiting, settings.key_wait_seconds)
