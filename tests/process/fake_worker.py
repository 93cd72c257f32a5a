"""A worker process around a scheduler without a model: the tokens are a hash of the prompt and their position.

The first prompt token chooses what goes wrong: ``BOOM`` raises in a step, ``DIE`` ends the process in the middle of
one, ``SLOW`` makes one take ``SLOW_SECONDS``. The name of the model chooses what goes wrong at load: ``unservable``,
``crash``, ``hang``; a file named ``once`` loads the first time only. With ``flush``, ending takes longer than an
orphan's engine may take to stop.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from engine import worker
from engine.api import (
    Admin,
    AdminReply,
    Admitted,
    Done,
    EngineConfig,
    Failed,
    ModelInfo,
    Reply,
    Request,
    Reuse,
    Stats,
    Tokens,
)
from engine.worker import Progress, Unservable, main

VOCAB = 250
CONTEXT = 200_000
BOOM, DIE, SLOW = 900_001, 900_002, 900_003
SLOW_SECONDS = 1.5
ORPHAN_SECONDS, FLUSH_SECONDS = 0.3, 0.6


def token_at(prompt: tuple[int, ...], index: int) -> int:
    return zlib.crc32(repr((len(prompt), prompt[-1], index)).encode()) % VOCAB


class FakeScheduler:
    """One token per running request and step, first come first served."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._waiting: list[Request] = []
        self._running: dict[str, tuple[Request, int]] = {}
        self._replies: list[Reply] = []
        self._aborted = 0
        self.info = ModelInfo(
            path=config.model,
            architecture="fake",
            fingerprint="f",
            vocab_size=VOCAB,
            context_length=CONTEXT,
            recurrent=False,
            max_sequences=config.max_sequences,
            instruction_set="none",
            dtype="float32",
            incarnation=str(os.getpid()),
        )

    @property
    def idle(self) -> bool:
        return not (self._waiting or self._running or self._replies)

    def submit(self, request: Request) -> None:
        if len(request.tokens) > CONTEXT:
            self._replies.append(Failed(request.id, "context_length", "too long", CONTEXT))
        else:
            self._waiting.append(request)

    def abort(self, request_id: str) -> None:
        self._aborted += 1
        known = [r for r in self._waiting if r.id == request_id] or [r for r, _ in self._running.values()]
        self._waiting = [r for r in self._waiting if r.id != request_id]
        self._running.pop(request_id, None)
        if any(r.id == request_id for r in known):
            self._replies.append(Done(request_id, "abort", Reuse(0, 0, 0, 0, 0)))

    def step(self, meanwhile: Callable[[], None]) -> list[Reply]:
        meanwhile()
        replies, self._replies = self._replies, []
        while self._waiting and len(self._running) < self._config.max_sequences:
            request = self._waiting.pop(0)
            if request.tokens[0] == BOOM:
                raise RuntimeError("boom")
            if request.tokens[0] == DIE:
                os._exit(9)
            if request.tokens[0] == SLOW:
                time.sleep(SLOW_SECONDS)
            self._running[request.id] = (request, 0)
            replies.append(Admitted(request.id, Reuse(0, 0, 0, 0, len(request.tokens))))
        for request_id, (request, made) in list(self._running.items()):
            replies.append(Tokens(request_id, (token_at(request.tokens, made),)))
            self._running[request_id] = (request, made + 1)
            if made + 1 == request.sampling.max_tokens:
                del self._running[request_id]
                replies.append(Done(request_id, "length", Reuse(0, 0, 0, 0, len(request.tokens))))
        time.sleep(0.0005)
        return replies

    def admin(self, command: Admin) -> Callable[[], AdminReply]:
        def work() -> AdminReply:
            if command.action == "store_verify":
                time.sleep(0.05)
            return AdminReply(command.id, command.action != "store_gc", {"said": command.arguments.get("session", "")})

        return work

    def close(self, timeout: float) -> None:
        if Path(self._config.model).name == "flush":
            time.sleep(FLUSH_SECONDS)
            Path(self._config.model).touch()

    def stats(self) -> Stats:
        return Stats({
            "running": len(self._running), "waiting": len(self._waiting), "aborted": self._aborted,
            "frozen": gc.get_freeze_count(),
        })  # fmt: skip


def make_scheduler(config: EngineConfig, progress: Progress) -> FakeScheduler:
    progress("weights", 1, 2)
    fault = Path(config.model).name
    if fault == "unservable":
        raise Unservable("shard 2 of 3\nis missing")
    if fault == "crash":
        sys.exit("the loader crashed")
    if fault == "flush":
        worker._ORPHAN_SECONDS = ORPHAN_SECONDS
    if fault == "hang":
        time.sleep(600)
    if fault == "once":
        Path(config.model).unlink()
    progress("weights", 2, 2)
    return FakeScheduler(config)


if __name__ == "__main__":
    sys.exit(main(make_scheduler=make_scheduler))
