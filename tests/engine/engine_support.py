"""Driving a scheduler in tests, and counting what it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from engine.api import (
    Admitted,
    Anchor,
    Done,
    EngineConfig,
    Failed,
    Reply,
    Request,
    Reuse,
    Sampling,
    TokenLogprob,
    Tokens,
    Watch,
)  # fmt: skip
from engine.grammar import Grammars
from engine.loading import load_engine
from engine.memory.audit import audit, audit_at_rest
from engine.memory.memory import Memory
from engine.sampling import Logits
from engine.scheduler import Scheduler

ARCHITECTURES = ("qwen3_5_moe", "qwen3_moe", "qwen2_moe")
GREEDY = Sampling(max_tokens=8, temperature=0.0)


@dataclass
class Outcome:
    """What came back for one request. ``logits`` by position."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    admitted: Reuse | None = None
    done: Done | None = None
    failed: Failed | None = None
    logits: dict[int, Logits] = field(default_factory=dict)

    @property
    def reuse(self) -> Reuse:
        assert self.done is not None, self.failed
        return self.done.reuse


class Bench:
    """A scheduler with everything it said. ``made``: those of a test, which are checked when it ends."""

    made: ClassVar[list[Bench]] = []

    def __init__(
        self,
        directory: Path,
        store: Any = None,
        store_settings: Any = None,
        vocabulary: Any = None,
        machine: Any = None,
        **config: Any,
    ) -> None:
        defaults: dict[str, Any] = {"kv_bytes": 32 << 20, "checkpoint_bytes": 8 << 20, "threads": 1}
        self.config = EngineConfig(model=str(directory), store=store_settings, **{**defaults, **config})
        self.outcomes: dict[str, Outcome] = {}
        engine = load_engine(self.config, lambda *_: None, store if callable(store) else lambda *_: store, machine)
        self.now = 0.0
        grammars = vocabulary and Grammars(vocabulary, engine.info.vocab_size)
        self.scheduler = Scheduler(engine, self.config, self._observe, lambda: self.now, grammars)
        self.scheduler.pace.always = True  # not as the rates of this machine happen to be
        self._number = 0
        self.made.append(self)

    @property
    def memory(self) -> Memory:
        return self.scheduler.memory

    def _observe(self, request: str, position: int, logits: Logits) -> None:
        self.outcomes.setdefault(request, Outcome()).logits[position] = logits

    def submit(self, tokens: Any, sampling: Sampling = GREEDY, **options: Any) -> str:
        self._number += 1
        name = str(options.pop("id", f"r{self._number}"))
        self.outcomes[name] = Outcome()
        self.scheduler.submit(Request(name, tuple(tokens), sampling, **options))
        return name

    def step(self) -> list[Reply]:
        replies = self.scheduler.step()
        for reply in replies:
            match reply:
                case Admitted(id=name, reuse=reuse):
                    self.outcomes[name].admitted = reuse
                case Tokens(id=name, tokens=tokens, logprobs=logprobs):
                    self.outcomes[name].tokens += tokens
                    self.outcomes[name].logprobs += logprobs
                case Done(id=name):
                    self.outcomes[name].done = reply
                case Failed(id=name):
                    self.outcomes[name].failed = reply
                case _:
                    raise AssertionError(reply)
        return replies

    def run(self, until: Callable[[], bool] | None = None) -> None:
        for _ in range(100_000):
            if self.scheduler.idle or (until is not None and until()):
                return
            self.step()
        raise AssertionError("the scheduler does not come to rest")

    def ask(self, tokens: Any, sampling: Sampling = GREEDY, **options: Any) -> Outcome:
        """One request, alone, to its end."""
        name = self.submit(tokens, sampling, **options)
        self.run()
        return self.outcomes[name]

    def stats(self) -> dict[str, float]:
        return self.scheduler.stats().values

    def check(self) -> None:
        """All is accounted for, and nothing was read in vain."""
        self.audit()
        assert self.stats()["restored_unused"] == 0

    def audit(self) -> None:
        """Every page and slot is accounted for exactly once, and none is held when nothing runs."""
        audit(self.memory)
        if self.scheduler.idle:
            audit_at_rest(self.memory, self.config.max_sequences)


@pytest.fixture(autouse=True)
def accounted() -> Iterator[None]:
    """Whatever a test did: what its engines own adds up when it has ended."""
    yield
    engines, Bench.made = Bench.made, []
    for engine in engines:
        engine.audit()


def pending_slots(memory: Memory) -> int:
    """Checkpoint slots neither free nor in use: 0 when nothing runs."""
    return memory.checkpoints.total - memory.checkpoints.free - len(memory.checkpoints.all)


def same_bits(a: dict[int, Logits], b: dict[int, Logits]) -> bool:
    """Whether logits at all common positions (at least one) are equal bit for bit."""
    common = a.keys() & b.keys()
    return bool(common) and all(np.array_equal(a[at].view(np.uint32), b[at].view(np.uint32)) for at in common)


def prompt(seed: int, length: int, vocab: int = 256) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


__all__ = [
    "ARCHITECTURES", "GREEDY", "Anchor", "Bench", "Outcome", "Sampling", "Watch", "audit", "pending_slots",
    "prompt", "replace", "same_bits",
]  # fmt: skip
