"""An engine with a store, from tokens to tokens, that checks every prediction: over the model of hashes, or over a real
tiny one on the CPU."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from hash_model import HashModel, Truth

from engine.api import Admitted, Anchor, Done, EngineConfig, Failed, ModelInfo, Request, Reuse, Sampling, Tokens
from engine.device.arena import FixedArena, Shapes
from engine.device.memory import Sizes, allocate
from engine.device.partition import Partition
from engine.layers.ops import CPU
from engine.layers.reference import ReferenceOps
from engine.loading import CHUNK, Engine
from engine.memory.memory import Memory
from engine.memory.restore import layer_groups
from engine.memory.store import StateStore
from engine.runner import Runner
from engine.sampling import Logits
from engine.scheduler import Scheduler
from sessions.store.config import StoreConfig
from sessions.store.files import Files
from sessions.store.store import Store, open_store

Kind = Literal["hash", "cpu"]
SEGMENT = 1 << 20
PAGE_BYTES, STATE_BYTES = 1 << 15, 16_896
"""Of the tiny real model."""
HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Setup:
    """``pages`` and ``checkpoints`` fit on the device. ``weights``: which fingerprint is served. ``options``: fields
    of StoreConfig. ``wrap``: what the engine sees of the store."""

    pages: int = 256
    checkpoints: int = 64
    live: int = 4
    chunk: int = 512
    context: int = 1 << 17
    weights: str = "A"
    store: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    files: Files | None = None
    wrap: Callable[[Store], StateStore] | None = None
    extra: bool = False
    vocab: int = 512


@dataclass
class Answer:
    """``logits`` by position, of all tokens that were computed to predict something."""

    tokens: list[int]
    reuse: Reuse
    logits: dict[int, Logits]


class Machine:
    """One directory, through any number of starts. ``model``: a checkpoint, for the real engine."""

    def __init__(self, directory: Path, model: Path | None = None, setup: Setup = Setup()) -> None:
        self.clock = Clock()
        self.setup = setup
        self.model = model
        self._directory = directory
        self._truth = Truth(setup.vocab, 3 if setup.extra else 2)
        self._number = 0
        self._lives = 0
        self._old: list[Store] = []
        self.start()

    # ── lives ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def directory(self) -> Path:
        """Where the store is now."""
        return self._directory / f"life{self._lives}"

    def start(self, **changes: Any) -> None:
        self.setup = replace(self.setup, **changes)
        self.store: Store | None = None
        self.running = True
        self.answers: dict[str, Answer] = {}
        self.failed: dict[str, Failed] = {}
        self.done: set[str] = set()
        config = EngineConfig(
            model=str(self.model or ""),
            max_sequences=self.setup.live,
            chunk_tokens=self.setup.chunk,
            kv_bytes=self.setup.pages * PAGE_BYTES,
            checkpoint_bytes=self.setup.checkpoints * STATE_BYTES,
            context_length=0 if self.model else self.setup.context,
            threads=1,
        )
        if self.model is None:
            self.scheduler = Scheduler(self._hash_engine(), config, self._observe, self.clock)
        else:
            self.scheduler = Scheduler.load(config, lambda *_: None, self._observe, open_store=self._open)
        self.scheduler.pace.always = True  # not as the rates of this machine happen to be

    def stop(self) -> None:
        """A clean end: what is worth keeping is written. The second time it does nothing."""
        if self.running:
            self.running = False
            self.scheduler.close(30.0)
            self.store = None

    def kill(self) -> None:
        """What kill -9 leaves: the files as they are now."""
        before = self.directory
        self._lives += 1
        if before.exists():
            shutil.copytree(before, self.directory)
        if self.store is not None:
            self._old.append(self.store)
        self.store, self.running = None, False

    def restart(self, *, kill: bool = False, **changes: Any) -> None:
        if kill:
            self.kill()
        else:
            self.stop()
        self.start(**changes)

    def close(self) -> None:
        self.stop()
        for store in self._old:
            store.close()

    def settle(self, seconds: float = 60.0) -> None:
        """Let time pass while nobody asks, until everything worth it is on disk."""
        self.clock.now += seconds
        for _ in range(10_000):
            self.scheduler.step()
            if self.scheduler.idle:
                break
        if self.store is not None:
            assert self.store.flush(30.0)

    def _hash_engine(self) -> Engine:
        setup = self.setup
        model = HashModel(setup.vocab, extra=setup.extra)
        sizes = Sizes(0, setup.pages, 1 + setup.live + setup.checkpoints)
        device = allocate(model.manifest, torch.float32, 0, sizes, CPU)
        runner = Runner(model, ReferenceOps(), torch.float32, cache=device.cache)
        components = model.manifest.page_components(torch.float32), model.manifest.state_components
        store = self._open(f"weights {setup.weights}", *components, False)
        memory = Memory(
            runner.mover,
            f"weights {setup.weights}",
            pages=setup.pages,
            live=setup.live,
            checkpoints=setup.checkpoints,
            recurrent=True,
            store=store,
            groups=layer_groups(model.manifest.page_layers, model.manifest.state_layers),
        )
        info = ModelInfo(
            path="",
            architecture="hash",
            fingerprint=f"weights {setup.weights}",
            vocab_size=setup.vocab,
            context_length=setup.context,
            recurrent=True,
            max_sequences=setup.live,
            instruction_set="none",
            dtype="float32",
            incarnation=f"{self._lives}",
        )
        partition = Partition(FixedArena(device, Shapes(model.manifest, torch.float32, 0), sizes), memory)
        return Engine(info, runner, memory, partition, setup.context, CHUNK)

    def _open(
        self, fingerprint: str, pages: tuple[int, ...], states: tuple[int, ...], hosted: bool
    ) -> StateStore | None:
        if not self.setup.store:
            return None
        options: dict[str, Any] = {
            "segment_bytes": SEGMENT, "quota_bytes": 1 << 28, "host_bytes": 1 << 26, "settle_seconds": 0.05,
            "clock": self.clock, **self.setup.options,
        }  # fmt: skip
        config = StoreConfig(self.directory, fingerprint, pages, states, **options)
        self.store = open_store(config, files=self.setup.files)
        return self.setup.wrap(self.store) if self.setup.wrap else self.store

    # ── requests ────────────────────────────────────────────────────────────────────────────────────────────────

    def ask(self, tokens: Sequence[int], say: Sequence[int] = (), **options: Any) -> Answer:
        """One request to its end; what it predicted is checked. ``say``: the answer's tokens, else one is sampled."""
        return self.finish(self.submit(tokens, say, **options))

    def submit(self, tokens: Sequence[int], say: Sequence[int] = (), **options: Any) -> str:
        self._number += 1
        name = f"r{self._number}"
        sampling = Sampling(max_tokens=len(say) or 1, temperature=0.0, forced=tuple(say) or None)
        anchors = tuple(_anchor(one) for one in options.pop("anchors", (len(tokens) - 1,)))
        options.setdefault("session", "main")
        self.answers[name] = Answer([*tokens], Reuse(0, 0, 0, 0, 0), {})
        self.scheduler.submit(Request(name, tuple(tokens), sampling, anchors=anchors, **options))
        return name

    def finish(self, name: str) -> Answer:
        for _ in range(100_000):
            if name in self.done or name in self.failed:
                break
            self.step()
        assert name not in self.failed, self.failed[name]
        answer = self.answers[name]
        self.check(answer)
        return answer

    def step(self) -> None:
        for reply in self.scheduler.step():
            match reply:
                case Admitted(id=name, reuse=reuse):
                    self.answers[name].reuse = reuse
                case Tokens(id=name, tokens=tokens):
                    self.answers[name].tokens += tokens
                case Done(id=name):
                    self.done.add(name)
                case Failed(id=name):
                    self.failed[name] = reply

    def check(self, answer: Answer) -> None:
        """Whatever was restored: every prediction is that of an engine that computed everything."""
        if self.model is None:
            truth = self._truth.after(answer.tokens, answer.logits)
            assert {at: int(row.argmax()) for at, row in answer.logits.items()} == truth

    def stats(self) -> dict[str, float]:
        return self.scheduler.stats().values

    def _observe(self, name: str, position: int, logits: Logits) -> None:
        self.answers[name].logits[position] = logits


Make = Callable[..., Machine]


def _anchor(one: int | Anchor) -> Anchor:
    return Anchor(one, "prompt_end", 1.0, pinned=True) if isinstance(one, int) else one


def tokens(seed: int, count: int, limit: int = 250) -> list[int]:
    """Some text."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, limit, (count,), generator=generator).tolist()
