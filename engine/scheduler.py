"""Continuous batching: which rows are fed in a step, who is admitted, who gives way, what is kept."""

from __future__ import annotations

import logging
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from engine.admin import admin
from engine.api import (
    PAGE,
    Admin,
    AdminReply,
    Admitted,
    Done,
    EngineConfig,
    ErrorKind,
    Failed,
    FinishReason,
    ModelInfo,
    Reply,
    Request,
    Stats,
    Tokens,
)
from engine.grammar import GrammarError, Grammars, Vocabulary
from engine.loading import Engine, OpenStore, load_engine
from engine.memory.restore import RestoreFailed
from engine.memory.resume import Plan
from engine.memory.states import Want
from engine.models.model import Progress
from engine.pace import Pace
from engine.refusal import refuse
from engine.sampling import Logits, Row, check_scores, whole
from engine.sequence import AHEAD, TIP, Sequence, Snapshot
from engine.watching import Watching

_log = logging.getLogger(__name__)

Observer = Callable[[str, int, Logits], None]
"""Told (request id, position, logits [vocab]) of every token before it is sampled."""

_COUNTERS = ("restored_unused", "failed_restores", "overlapped_restores", "background_tokens")


class Scheduler:
    """Single-threaded. Every request gets Admitted, then Tokens as they are sampled, then Done; or Failed."""

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        self.info: ModelInfo = engine.info
        self.memory = engine.memory
        self.partition = engine.partition
        self._longest = engine.longest
        self.runner = engine.runner
        self._grid = engine.runner.model.manifest.grid
        self._config = config
        self._chunk = config.chunk_tokens or engine.chunk_tokens
        self._observer = observer
        self._clock = clock
        self._grammars = grammars
        self._running: list[Sequence] = []
        self._restoring: list[Sequence] = []
        """Admitted, and waiting for the store."""
        self._waiting: deque[Sequence] = deque()
        self._outbox: list[Reply] = []
        self._later: list[Callable[[], None]] = []
        self._order = 0
        self._counts = Counter(dict.fromkeys(_COUNTERS, 0))
        self.pace = Pace()
        self._watching = Watching(engine.memory, engine.runner.mover.copy_state)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        progress: Progress,
        observer: Observer | None = None,
        open_store: OpenStore | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
    ) -> Scheduler:
        """Raises engine.weights.errors.CheckpointError, and whatever ``open_store`` does."""
        engine = load_engine(config, progress, open_store)
        return cls(engine, config, observer, grammars=vocabulary and Grammars(vocabulary, engine.info.vocab_size))

    @property
    def idle(self) -> bool:
        return not (self._running or self._restoring or self._waiting or self._outbox or self.memory.busy)

    def submit(self, request: Request) -> None:
        """Queue a request; its replies come out of ``step``. An impossible one yields Failed there."""
        self._counts["requests"] += 1
        waiting = sum(one.request.background == request.background for one in self._waiting)
        failure = refuse(request, self.info, waiting, self._config.queue, grammars=self._grammars is not None)
        if failure is not None:
            self._counts["failed"] += 1
            self._outbox.append(failure)
            return
        guide = self._grammars.guide(request.sampling) if self._grammars is not None else None
        self._waiting.append(Sequence.of(request, self._order, self.info.context_length, guide))
        self._order += 1

    def abort(self, request_id: str) -> None:
        """End a request now; what it computed is kept. Unknown ids are ignored: it may just have ended."""
        for sequence in (*self._running, *self._restoring, *self._waiting):
            if sequence.request.id == request_id:
                self._finish(sequence, "abort")
                return

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[Reply]:
        """Admissions, or else one forward and sampling. [] when there was nothing to do. To be called now and then
        while idle, too: what has settled goes to the store. ``meanwhile`` is called once, while a device computes if
        one does: what need not be done before the next tokens are fed."""
        self._later = [meanwhile]
        try:
            return self._step()
        finally:
            self._meanwhile()

    def _step(self) -> list[Reply]:
        if self._running:  # what it hands over comes after the forward then, on the device, too
            self._later.append(lambda: self.memory.tick(self._clock()))
        else:
            self.memory.tick(self._clock())
        self.partition.tick(self._clock(), self.pace.token_seconds)
        if foreground := any(not one.request.background for one in (*self._running, *self._restoring, *self._waiting)):
            for sequence in [one for one in (*self._running, *self._restoring) if one.request.background]:
                self._preempt(sequence)
        self._take_restored()
        self._admit(foreground)
        # What was just read for a background request is built on at once: in the next step it may have to give way.
        replied = self._outbox and not any(one.unused and one.request.background for one in self._running)
        if not (replied or self._forward() or self._overlap()):
            self._meanwhile()
            self._wait_for_reads()
        replies, self._outbox = self._outbox, []
        return replies

    def _meanwhile(self) -> None:
        while self._later:
            self._later.pop(0)()

    def close(self, timeout: float) -> None:
        """End everything; with a store, what is worth keeping is written, within ``timeout`` seconds or so."""
        for sequence in (*self._running, *self._restoring):
            self._release(sequence)
        store = self.memory.behind.store
        if store is not None:
            self.memory.behind.finish(timeout)
            store.close()
        self.runner.close()

    def stats(self) -> Stats:
        """Gauges of now and counters since the start; sizes in bytes."""
        manifest, gauges, store = self.runner.model.manifest, self.memory.gauges(), self.memory.behind.store
        return Stats(
            {
                "running": float(len(self._running)),
                "restoring": float(len(self._restoring)),
                "waiting": float(len(self._waiting)),
                "store_unavailable": float(store is None and self._config.store is not None),
                **gauges,
                "page_bytes": float(manifest.page_bytes(self.runner.dtype)),
                "checkpoint_slot_bytes": float(manifest.slot_bytes),
                "peak_resident_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
                **self.runner.gauges(),
                **{name: float(count) for name, count in self._counts.items()},
                **{f"store_{name}": value for name, value in ({} if store is None else store.stats()).items()},
            }
        )

    def admin(self, command: Admin) -> Callable[[], AdminReply]:
        """What is returned may take long and may be called in another thread."""
        answer = admin(self.memory, self.partition, command)
        if not self.partition.grows:
            self.info = replace(self.info, context_length=min(self._longest, (self.memory.pool.total - 1) * PAGE))
        return answer

    # ── admission ───────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self, foreground: bool) -> None:
        """Admit in order of arrival. Who waits for another's prefill, and a side request without room, is passed by;
        any other that does not fit yet is waited for. Background requests run while there is no other."""
        for sequence in [one for one in self._waiting if one.failure]:
            self._fail(sequence, sequence.failure, "invalid")
        for sequence in list(self._waiting):
            if len(self._running) + len(self._restoring) >= self._config.max_sequences:
                return
            request, fits = sequence.request, False
            if sequence.waiting or (request.background and foreground):
                continue
            modest = request.side or request.background
            if not self._running or sequence.refused != self.memory.pool.released:
                plan = self.memory.plan(sequence.encoded, request.namespace, sequence.reach)
                if any(sequence.shares(plan, other) for other in (*self._restoring, *self._running)):
                    continue
                fits = self.memory.fits(plan, sequence.pages_needed(), modest=modest)
            if not fits:
                sequence.refused = self.memory.pool.released
                busy = self._running or self._restoring or self.memory.draining
                if busy and modest:
                    continue
                if busy:
                    return
                if request.background or not self.memory.fits(plan, sequence.pages_needed(), modest=False):
                    self._waiting.remove(sequence)
                    self._fail(sequence, "attention pages ran out; raise kv_bytes")
                    continue
            self._waiting.remove(sequence)
            sequence.lease = self.memory.open(
                plan, request.session, side=request.side, background=request.background, last_resort=not fits,
                layered=self._hidden(sequence, plan),
            )  # fmt: skip
            sequence.started = sequence.started or time.monotonic()
            if sequence.lease.restore is None:
                sequence.place(plan, self._grid)
                self._start(sequence, plan)
            else:
                self._waste(sequence)
                sequence.plan = plan
                self._restoring.append(sequence)

    def _hidden(self, sequence: Sequence, plan: Plan) -> bool:
        """Whether the first forward can go along with the reads, and is long enough for that to pay. Not that of a
        background request, which gives way at once."""
        tokens = min(len(sequence.tokens) - plan.position, self._chunk)
        alone = not (self._running or sequence.request.background)
        return alone and self.pace.hides(plan.disk_bytes, tokens)

    def _start(self, sequence: Sequence, plan: Plan) -> None:
        """Everything up to the plan's position is there."""
        request, lease = sequence.request, sequence.leased
        released = self.memory.unpin(lease, sequence.tokens)
        for anchor in request.anchors:
            position = anchor.position // self._grid * self._grid
            want = Want(anchor.kind, anchor.priority, anchor.pinned)
            self.memory.renew(lease, sequence.tokens, position, want)
        self.memory.demote(released)
        self._running.append(sequence)
        self._running.sort(key=lambda one: one.order)
        if sequence.reuse is not None:
            self._counts["recomputed_tokens"] += len(sequence.tokens) - 1 - plan.position
            return
        reuse = sequence.reuse = replace(plan.reuse, cause="corrupt") if sequence.corrupt else plan.reuse
        self._outbox.append(Admitted(request.id, reuse))
        if not request.background:
            self._counts["prompt_tokens"] += sequence.prompt
            self._counts["resumed_tokens"] += reuse.resumed
            self._counts["replayed_tokens"] += reuse.replayed
            self._counts["new_tokens"] += reuse.new

    # ── restores ────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_restored(self) -> None:
        """Start the sequences whose reads have ended."""
        for sequence in list(self._restoring):
            restore = sequence.leased.restore
            if restore and restore.poll() and (plan := self._restored(sequence)) is not None:
                sequence.place(plan, self._grid)
                self._start(sequence, plan)

    def _restored(self, sequence: Sequence) -> Plan | None:
        """A sequence's reads have ended. Where something was wrong, it is planned again without that, and this is
        None; else its plan."""
        lease, plan = sequence.leased, sequence.plan
        size = lease.restore.size if lease.restore else 0
        if lease.restore and not (lease.restore.layered or self._running):
            self.pace.read(lease.restore.disk_bytes, lease.restore.seconds)
        self._restoring.remove(sequence)
        sequence.plan = None
        sequence.reach = self.memory.restored(lease, sequence.tokens)
        if sequence.reach is None:
            sequence.unused = size
            return plan
        self._counts["failed_restores"] += 1
        sequence.corrupt, sequence.lease = True, None
        self._waiting.appendleft(sequence)
        return None

    def _waste(self, sequence: Sequence) -> None:
        """What was read for it is of no use to it."""
        self._counts["restored_unused"] += sequence.unused
        sequence.unused = 0

    def _wait_for_reads(self) -> None:
        """Nothing can be computed before more was read, or a grammar or its next mask is there."""
        for sequence in (*self._running, *self._waiting):
            if sequence.guide is not None and (sequence.late or not sequence.guide.ready):
                return sequence.guide.wait()
        for lease in (*(one.leased for one in self._restoring), *self.memory.draining):
            if lease.restore is not None:
                return lease.restore.wait()

    # ── one forward ─────────────────────────────────────────────────────────────────────────────────────────────

    def _forward(self) -> bool:
        """False if no sequence could be fed, and no token drawn."""
        drawn = self._sample_late()
        shares = self._share_rows()
        if not shares:
            return drawn
        snapshots = [self._take_snapshots(sequence, count) for sequence, count in shares]
        parts = [one.rows(count, taken) for (one, count), taken in zip(shares, snapshots, strict=True)]
        start = time.perf_counter()
        scored = iter(self.runner.score(parts, meanwhile=self._meanwhile))
        answers = sum(one.decoding for one, _ in shares)
        self.pace.fed(sum(count for _, count in shares), time.perf_counter() - start, answers)
        self._counts["steps"] += 1
        for (sequence, count), taken in zip(shares, snapshots, strict=True):
            self._fed(sequence, count, taken, scored)
        return True

    def _fed(self, sequence: Sequence, count: int, taken: list[Snapshot], scored: Iterator[Row]) -> None:
        """A forward has fed ``count`` tokens more."""
        self._counts["decoded_tokens" if sequence.decoding else "prefilled_tokens"] += count
        if sequence.request.background:
            self._counts["background_tokens"] += count
        sequence.fed += count
        sequence.unused = 0
        self.memory.advance(sequence.leased, sequence.tokens, sequence.fed)
        for position, slot, want in taken:
            if self.memory.capture(sequence.leased, sequence.tokens, position, slot, want):
                sequence.kept.add(position)
        if sequence.remaining == 0:
            self._sample(sequence, next(scored))

    def _overlap(self) -> bool:
        """Feed the first chunk of a sequence that is still being restored, alone, each layer as soon as its part was
        read. Only when nothing else can be computed, for others would have to wait for the store, too. False if there
        is none, or if what was read turned out wrong; then nothing of it has happened."""
        going = (one for one in self._restoring if one.leased.layered and one.leased.right)
        sequence = None if self._running else next(going, None)
        if sequence is None or sequence.plan is None:
            return False
        lease, plan, kept = sequence.leased, sequence.plan, set(sequence.kept)
        count = min(len(sequence.tokens) - plan.position, self._chunk)
        if not self.memory.grow(lease, plan.position + count):
            return False
        sequence.place(plan, self._grid)
        wait = self.memory.overlap(lease)
        taken = self._take_snapshots(sequence, count)
        try:
            scored = self.runner.score([sequence.rows(count, taken)], wait, self._meanwhile)
        except RestoreFailed:
            for _, slot, _ in taken:
                self.memory.give_back(slot)
            sequence.unplace(kept)
            return False
        if lease.restore is None or not lease.restore.poll() or self._restored(sequence) is None:
            raise RuntimeError("a forward went on from what had not been read")
        self._counts["steps"] += 1
        self._counts["overlapped_restores"] += 1
        self._start(sequence, plan)
        self._fed(sequence, count, taken, iter(scored))
        return True

    def _share_rows(self) -> list[tuple[Sequence, int]]:
        """Each running sequence's rows of this step: one if it decodes, else a fair share of the chunk, which may be
        smaller beside those. Where pages run out, the youngest gives way."""
        feeding = [one for one in self._running if one.remaining]
        filling = sum(not one.decoding for one in feeding)
        decoding, chunk = len(feeding) - filling, self._chunk
        if decoding and filling:
            chunk = self.pace.beside(self._chunk)
            feeding = [one for one in feeding if chunk or one.decoding]
        budget = max(chunk - decoding, filling)
        shares: list[tuple[Sequence, int]] = []
        for sequence in feeding:
            if sequence not in self._running:
                continue
            count = 1
            if not sequence.decoding:
                count = min(sequence.remaining, -(-budget // filling))
                budget, filling = budget - count, filling - 1
            if self._make_room(sequence, sequence.fed + count):
                shares.append((sequence, count))
        return shares

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Pages for ``tokens`` tokens; False if the sequence itself had to stop, or has to wait for those that are
        reading and cannot give way yet."""
        while not self.memory.grow(sequence.leased, tokens):
            modest = sequence.request.side or sequence.request.background
            if len(self._running) > 1:
                self._preempt(sequence if modest else self._running[-1])
            elif self._restoring or self.memory.draining:
                return False
            elif sequence.request.side and not sequence.leased.last_resort:
                sequence.leased.last_resort = True
            elif len(sequence.tokens) > sequence.prompt:
                self._finish(sequence, "length")
            else:
                self._fail(sequence, "attention pages ran out; raise kv_bytes")
            if sequence not in self._running:
                return False
        return True

    def _take_snapshots(self, sequence: Sequence, count: int) -> list[Snapshot]:
        """The checkpoints to take within the next ``count`` tokens."""
        taken: list[Snapshot] = []
        for position in sorted(one for one in sequence.wanted if one <= sequence.fed + count):
            want = sequence.wanted.pop(position)
            slot = self.memory.reserve_slot(sequence.leased, want)
            if slot is not None:
                taken.append((position, slot, want))
            elif not self.memory.recurrent:
                sequence.kept.add(position)
        return taken

    def _sample_late(self) -> bool:
        """Draw the tokens whose masks came after their scores, which no other sequence waited for."""
        late = [one for one in self._running if one.late and one.sampler.ready]
        for sequence in late:
            self._sample(sequence, sequence.late.pop())
        return bool(late)

    def _sample(self, sequence: Sequence, row: Row) -> None:
        if not sequence.sampler.ready:
            sequence.late.append(whole(row))
            return
        if not sequence.prefilled:
            sequence.prefilled = time.monotonic()
        request, position = sequence.request, len(sequence.tokens)
        if self._observer is not None:
            self._observer(request.id, position, np.array(whole(row)))
        try:
            if sequence.limit == 0 or request.sampling.forced == ():
                check_scores(row, position)
                self._finish(sequence, "length" if sequence.limit == 0 else "stop")
                return
            token, logprob = sequence.sampler.next(row, position)
        except GrammarError as error:
            self._fail(sequence, str(error), "invalid")
            return
        except Exception as error:  # noqa: BLE001 - it touched this sequence's sampler only; the others can go on
            _log.exception("request %s: sampling failed", request.id)
            self._fail(sequence, f"sampling failed: {error!r}", "internal")
            return
        sequence.tokens.append(token)
        self._outbox.append(Tokens(request.id, (token,), () if logprob is None else (logprob,)))
        self._watching.sampled(sequence)
        reason = sequence.ended(token)
        if reason is not None:
            self._finish(sequence, reason)

    # ── endings ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._release(sequence)
        self._counts["aborted" if reason == "abort" else "finished"] += 1
        reuse = sequence.reuse or self.memory.plan(sequence.encoded, sequence.request.namespace).reuse
        kept = tuple(sorted(sequence.kept))
        times = (sequence.prefill_seconds, sequence.decode_seconds)
        self._outbox.append(Done(sequence.request.id, reason, reuse, kept, *times))

    def _fail(self, sequence: Sequence, message: str, kind: ErrorKind = "overloaded") -> None:
        self._release(sequence, useful=kind != "internal")
        self._waste(sequence)
        self._counts["failed"] += 1
        self._outbox.append(Failed(sequence.request.id, kind, message))

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue's head; its pages and state stay cached as far as memory allows."""
        self._release(sequence)
        self._waiting.appendleft(sequence)
        self._counts["background_preempted" if sequence.request.background else "preempted"] += 1

    def _release(self, sequence: Sequence, *, useful: bool = True) -> None:
        """Take its memory. ``useful``: whether the state it has reached is worth keeping."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence.lease is None:
            return
        if sequence in self._restoring:
            self._restoring.remove(sequence)
            self.memory.abandon(sequence.lease)
            sequence.lease = sequence.plan = None
            return
        for slot in sequence.begun.values():
            self.memory.give_back(slot)
        sequence.late.clear()
        sequence.begun.clear()
        sequence.wanted.clear()
        tip = AHEAD if sequence.request.background else TIP
        if self.memory.close(sequence.lease, sequence.tokens, sequence.fed, tip if useful else None):
            sequence.kept.add(sequence.fed)
        sequence.lease = None
        self._running.remove(sequence)
