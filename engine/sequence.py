"""One request on its way through the scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.api import PAGE, FinishReason, Request, Reuse
from engine.grammar import Guide
from engine.memory.keys import common_tokens, encode
from engine.memory.memory import Lease
from engine.memory.resume import Plan
from engine.memory.states import Want
from engine.runner import Rows
from engine.sampling import Logits, Sampler

TIP = Want("tip", 60.0, tip=True)
"""Where a turn ended: the next turn most likely goes on here."""
AHEAD = Want("ahead", 60.0)
"""What a background request computed: a coming prompt may go on here."""
BRANCH = Want("branch", 40.0)
"""Where a prompt left what was computed before: others may leave it there too."""
Snapshot = tuple[int, int, Want]
"""A checkpoint to take in a forward: position, slot, what it is for."""


@dataclass(eq=False)
class Sequence:
    """``tokens``: prompt and sampled; the first ``fed`` of them are in the state. ``wanted``: checkpoints to take in
    prefill, by position. ``begun``: watches that may be going on, as (state before its first token, slot). ``waits``:
    for another to compute up to a position, where it was asked to leave a checkpoint. ``refused``: when it last did
    not fit, as the pool's ``released``. ``plan``: what it waits for while it is restored. ``reach``: how far the next
    plan may go, after a restore that failed (``corrupt``: one did)."""

    request: Request
    order: int
    limit: int
    """How many tokens may be sampled."""
    tokens: list[int]
    sampler: Sampler
    guide: Guide | None = None
    """The grammar of its output, if it has one."""
    fed: int = 0
    lease: Lease | None = None
    reuse: Reuse | None = None
    plan: Plan | None = None
    reach: int | None = None
    corrupt: bool = False
    unused: int = 0
    """Bytes that were read for it and not yet built on."""
    wanted: dict[int, Want] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    waits: tuple[Sequence, int] | None = None
    refused: int = -1
    late: list[Logits] = field(default_factory=list)
    """Scores of its next token, while that has no mask yet."""
    kept: set[int] = field(default_factory=set)
    """Positions at which checkpoints were kept."""
    started: float = 0.0
    prefilled: float = 0.0
    _encoded: bytes = b""

    @classmethod
    def of(cls, request: Request, order: int, context: int, guide: Guide | None = None) -> Sequence:
        limit = max(0, min(request.sampling.max_tokens, context - len(request.tokens)))
        return cls(request, order, limit, list(request.tokens), Sampler(request.sampling, request.tokens, guide), guide)

    @property
    def prompt(self) -> int:
        return len(self.request.tokens)

    @property
    def leased(self) -> Lease:
        """What it has while it runs or is restored."""
        if self.lease is None:
            raise RuntimeError("a sequence without memory cannot run")
        return self.lease

    @property
    def encoded(self) -> bytes:
        """All tokens, as page keys take them."""
        if len(self._encoded) < 4 * len(self.tokens):
            self._encoded += encode(self.tokens[len(self._encoded) // 4 :])
        return self._encoded

    @property
    def waiting(self) -> bool:
        """Whether what it waits for is still to come; an other that ends or gives way forgets its wishes."""
        if self.guide is not None and not self.guide.ready:
            return True
        return self.waits is not None and self.waits[1] in self.waits[0].wanted

    @property
    def failure(self) -> str:
        """Why there is no grammar for its output; "" while that is not known."""
        return self.guide.failure if self.guide is not None else ""

    @property
    def remaining(self) -> int:
        """Tokens not yet fed; 1 while decoding, 0 while the mask of the next one is waited for."""
        return len(self.tokens) - self.fed

    @property
    def decoding(self) -> bool:
        return self.remaining == 1 and len(self.tokens) > self.prompt

    @property
    def prefill_seconds(self) -> float:
        return max(0.0, self.prefilled - self.started) if self.started else 0.0

    @property
    def decode_seconds(self) -> float:
        return time.monotonic() - self.prefilled if self.prefilled else 0.0

    def rows(self, count: int, taken: list[Snapshot]) -> Rows:
        """The next ``count`` tokens to feed."""
        lease, fed = self.leased, self.fed
        snapshots = [(position - fed, slot) for position, slot, _ in taken]
        tokens, last, sampler = self.tokens[fed : fed + count], count == self.remaining, self.sampler
        mask = sampler.mask if last else None
        return Rows(tokens, fed, lease.table, lease.slot, snapshots, last, sampler.temperature, mask)

    def shares(self, plan: Plan, other: Sequence) -> bool:
        """Whether an other is reading what this one would read too, or its prefill is about to compute a page or more
        that this one could then reuse; if so it is asked to leave a checkpoint there."""
        if other.request.namespace != self.request.namespace:
            return False
        shared = min(common_tokens(self.encoded, other.encoded), len(self.tokens) - 1)
        position = shared // PAGE * PAGE
        if other.plan is not None:
            return bool(plan.stored) and min(position, other.plan.position) > PAGE * len(plan.pages)
        if other.remaining <= 1 or position < plan.position + PAGE or position <= other.fed:
            return False
        other.want(position, BRANCH)
        self.waits = other, position
        return True

    def place(self, plan: Plan, grid: int) -> None:
        """It goes on at the plan's position: choose what to keep in prefill."""
        self.fed, self.reach = plan.position, None
        self.plan_checkpoints(plan.position, plan.reuse.divergence, grid)

    def unplace(self, kept: set[int]) -> None:
        """It does not, after all; ``kept``: the checkpoints it had before."""
        self.fed, self.kept = 0, kept
        self.wanted.clear()

    def plan_checkpoints(self, resumed: int, divergence: int, grid: int) -> None:
        """Choose what to keep in prefill: anchors, moved down to the grid, and where the prompt diverged."""
        if resumed < divergence < self.prompt:
            self.want(divergence // grid * grid, BRANCH)
        for anchor in self.request.anchors:
            self.want(anchor.position // grid * grid, Want(anchor.kind, anchor.priority, anchor.pinned))

    def want(self, position: int, want: Want) -> None:
        """Ask for a checkpoint at a position still to come."""
        if not self.fed < position <= len(self.tokens):
            return
        old = self.wanted.get(position)
        if old is None or (want.pinned, want.priority) > (old.pinned, old.priority):
            self.wanted[position] = want

    def ended(self, token: int) -> FinishReason | None:
        """Whether the output ends with this token, just sampled."""
        sampling = self.request.sampling
        if token in sampling.stop_tokens:
            return "stop"
        if sampling.forced is not None and self.sampler.sampled >= len(sampling.forced):
            return "stop"
        return "length" if self.sampler.sampled >= self.limit else None

    def pages_needed(self) -> int:
        """Tokens that must have room before it starts: all known ones and the next."""
        return -(-(len(self.tokens) + 1) // PAGE) * PAGE
