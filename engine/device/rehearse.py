"""Kernels compiled side by side before the first step: one takes a second of one core, and a model needs many.

Which ones a model needs, only its own code knows: it is run over rows of no sequence, with the sizes and addresses of
later steps, while nothing is launched. Memory that a kernel would have written holds zeros meanwhile, so that nothing
reads or addresses what is not there. What was compiled is kept in Triton's cache, where the next process finds it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, cast

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.errors import TritonError
from triton.runtime.jit import JITFunction

from engine.api import PAGE
from engine.bandwidth_profile import default_profile
from engine.device.graph import Inputs
from engine.device.masks import Masks
from engine.device.reduce import reduce
from engine.experts.offload import DECODED, OffloadedExperts
from engine.experts.waves import Fetches
from engine.kernels import gather, launch
from engine.kernels import waves as kernels
from engine.layers.ops import Batch
from engine.models.model import Cache, Model
from engine.runner import Rows, make_batch
from engine.weights.errors import BadConfig

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""(compiled, found so far)"""

_THREADS = 32
"""At most: each takes some hundred MB."""
_PAGE, _STATE = 0, 1
"""That no sequence has yet."""
_FAR = 1 << 40
"""An address beyond 32 bits."""
_BRINGING = 3
"""Layers of which one expert is missing."""
_CHECKPOINTS = 1, 2, 4, 8, 16
"""Of a step of few rows, rounded up."""
_MANY = 17, 32, 33, 64
"""Of a long one: more than one for each page are rarer than the kernel that then comes late is slow."""
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory without contents has zeros."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made.zero_() if function in _EMPTY else made


class _SideBySide(triton.AsyncCompileMode):  # type: ignore[misc]
    """Compiles in a pool of threads; all but the translation of Python is done without its lock. Loads, too, for which
    Triton before 3.9 takes a compiler of C."""

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None], *more: Any) -> Any:
        def loaded() -> Any:
            compiled = compile_fn()
            _ = compiled.run
            return compiled

        new = key not in self.future_kernels
        kernel = super().submit(key, loaded, finalize_fn, *more)
        if new:
            finalize_fn(kernel)  # in the place of what it will be: Triton before 3.9 would ask for it again
        return kernel


class _Silent:
    """In place of a compiled kernel."""

    function, packed_metadata = 0, ()

    @staticmethod
    def run(*_: Any) -> None:
        """Launches nothing."""


@contextmanager
def _unlaunched() -> Iterator[None]:
    """Kernels are asked for, and not launched: nor those that were started before."""
    run = JITFunction.run
    launch.forget()

    def ask(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        run(kernel, *arguments, grid=grid, warmup=True, **options)
        return _Silent

    JITFunction.run = ask
    try:
        yield
    finally:
        JITFunction.run = run
        launch.forget()


def compile_all(work: Callable[[], None], progress: Progress, device: torch.device) -> int:
    """Compiles and loads every kernel that ``work`` would launch; returns how many those are. Raises what the compiler
    does."""
    count = min(_THREADS, len(os.sched_getaffinity(0)))
    begin = partial(torch.cuda.set_device, device) if device.type == "cuda" else None
    with ThreadPoolExecutor(count, initializer=begin) as threads, _SideBySide(threads) as found:
        zeros = _Zeros()  # type: ignore[no-untyped-call]
        with _unlaunched(), zeros, torch.inference_mode():
            work()
        compiling: list[Future[Any]] = list(found.raw_futures)
        for done, _ in enumerate(as_completed(compiling), start=1):
            progress(done, len(compiling))
    return len(compiling)


def rehearse(
    model: Model, cache: Cache, experts: OffloadedExperts | None, *, pages: int, most: int, live: int, chunk: int,
    device: torch.device, progress: Progress,
) -> None:  # fmt: skip
    """Compiles what steps need, before any sequence is there: decode steps of up to ``most`` sequences, whose tables
    have ``pages``, and prompts of up to ``chunk`` rows, beside up to ``live`` sequences. Raises BadConfig."""
    masks, short = Masks(model.vocab_size, most, device), _shortened(model)

    def step(model: Model, batch: Batch, temperatures: Tensor) -> None:
        reduce(model.forward(batch, cache)[:most], temperatures[:most], masks)

    def work() -> None:
        for rows in range(1, most + 1):
            inputs = Inputs(rows, pages, device)
            step(model if rows == 1 else short, inputs.batch, inputs.temperatures)
            if experts is not None and experts.may_bring(rows):
                with experts.bringing(True):
                    step(short, inputs.batch, inputs.temperatures)
        for ahead in _ways(experts):
            for parts in prompts(pages, chunk):
                step(model, make_batch(parts, device), torch.ones(len(parts), device=device))
            for parts in () if ahead else others(pages, live, chunk):
                step(short, make_batch(parts, device), torch.ones(len(parts), device=device))
        for few in _few_slots(experts):
            for rows in (64,) if few > 1 else range(DECODED + 1, 2 * DECODED + 1):
                step(short, make_batch([_rows(min(rows, chunk), 1)], device), torch.ones(1, device=device))
        if experts is not None:
            _bring_ahead(experts, device)
        for flags, copies in product((_FAR, _FAR + 4), (False, True)):
            gather.move(torch.zeros(1, 4, dtype=torch.int64, device=device), flags, copy=copies)

    began = time.monotonic()
    progress(0, 1)
    try:
        with _untold(experts):
            found = compile_all(work, progress, device)
    except (RuntimeError, TritonError) as error:
        raise BadConfig(f"kernels cannot be compiled for this GPU: {error}; serve with --device cpu") from error
    _log.info("%d kernels compiled, or found in %s, in %.1f s", found, knobs.cache.dir, time.monotonic() - began)


@contextmanager
def _untold(experts: OffloadedExperts | None) -> Iterator[None]:
    """Nobody asks the CPU meanwhile, so that nobody is to wait for it; most experts seem to be on the device, so that
    prompts do not bring the whole pool each time, and there seems to be time to bring some ahead; and in the end
    nothing was learnt."""
    if experts is None:
        yield
        return
    executor, prefill, slot_of = experts.executor, experts.prefill, experts.residency.slot_of
    costs, executor.mailbox[executor.layout.done] = prefill.costs, 1
    slot_of.fill_(experts.residency.slots - 1)
    slot_of[: _BRINGING * experts.pool.experts : experts.pool.experts] = -1
    prefill.costs = replace(costs, between=costs.link)
    prefill.settle()
    yield
    slot_of.fill_(-1)
    experts.after_step()
    prefill.follow(costs)


def _ways(experts: OffloadedExperts | None) -> Iterator[bool]:
    """Whether whole layers are brought ahead: for no rows first, then for all. What is measured later decides."""
    if experts is None:
        yield False
        return
    for ahead in (False, True):
        experts.prefill.ahead = ahead
        yield ahead
    experts.prefill.ahead = None


def _few_slots(experts: OffloadedExperts | None) -> Iterator[int]:
    """With so few that a layer's experts come in waves, and with too few for that: then by ``DECODED`` rows, and the
    rest."""
    if experts is None:
        return
    limit = experts.prefill.limit
    for few in (experts.pool.experts - 1, 1):
        experts.prefill.resize(min(limit, few))
        yield few
    experts.prefill.resize(limit)


def _bring_ahead(experts: OffloadedExperts, device: torch.device) -> None:
    """What goes ahead of layers, which a step asks for only where a whole layer has slots, as it may have later."""
    residency, waves, count = experts.residency, experts.prefill.waves, experts.pool.experts
    numbers = torch.zeros(count, dtype=torch.int32, device=device)
    kernels.divide(residency, waves, numbers, 0, numbers, cpu=False)
    kernels.place(residency, waves, numbers, 0)
    kernels.take(
        residency, waves, Fetches.create(count, device), numbers, 0, numbers, 0, 1, first=False, ahead=True
    )  # fmt: skip


def _shortened(model: Model) -> Model:
    """With one layer of each kind: others ask for the same kernels."""
    short: Any = copy(model)
    short.layers = list({tuple(map(type, vars(layer).values())): layer for layer in short.layers}.values())
    return cast(Model, short)


def prompts(pages: int, chunk: int) -> Iterator[list[Rows]]:
    """Steps of one sequence, of each size: kernels tell them by powers of two, and Triton numbers that 16 divides."""
    for size in (size for power in range(5, 16) for size in (2**power - 1, 2**power)):
        if size <= min(chunk, pages * PAGE):
            yield [_rows(size, -(-size // PAGE))]


def others(pages: int, live: int, chunk: int) -> Iterator[list[Rows]]:
    """Steps of few rows, of each kind: of up to ``live`` sequences, behind a history, leaving checkpoints. Triton tells
    numbers that are 1 from others, too; kernels of few rows tell more of them."""
    widths = sorted({1, 3, 16, (pages - 1) | 1, pages // 16 * 16} & set(range(1, pages + 1)))
    powers = [2**power for power in range(live.bit_length())]
    counts = {1, live // 16 * 16, *(power + 1 for power in powers), *(power for power in powers if power >= 16)}
    for sequences in counts & set(range(1, live + 1)):
        for rows in (*range(sequences, 17), sequences + 16, 32, 33, 48):
            if 0 < rows - sequences + 1 <= chunk:
                for width in widths if rows > 14 else (1,):
                    yield [_rows(rows - sequences + 1, width), *[_rows(1, 1)] * (sequences - 1)]
    for tokens, snapshots in product((1, 2, 3, 5, 15, 16, 33, 48), _CHECKPOINTS):
        if tokens <= chunk:
            for beside in range(min(live, 2)):
                yield [_rows(tokens, 1, snapshots), *[_rows(1, 1)] * beside]
    for snapshots in _MANY if chunk >= 48 else ():
        yield [_rows(48, 1, snapshots)]


def _rows(tokens: int, width: int, snapshots: int = 0) -> Rows:
    """The last rows of so many pages."""
    taken = [(tokens, _STATE)] * snapshots
    return Rows([0] * tokens, width * PAGE - tokens, [_PAGE] * width, _STATE, snapshots=taken, logits=True)


def keep_privately() -> None:
    """What is compiled is kept where only this user can put anything, unless Triton was told a place."""
    if "TRITON_CACHE_DIR" not in os.environ:
        folder = default_profile().with_name("kernels")
        with suppress(OSError):  # Triton says what is wrong with the place that it then takes
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            os.environ["TRITON_CACHE_DIR"] = str(folder)
