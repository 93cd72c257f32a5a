"""Part ``serve`` of ``engine.device.check``: the whole scheduler on the GPU, against the CPU's arithmetic.

A model of Qwen3.6's layers with random weights, written to a temporary folder, is served with all experts on the device
and with most of them in host memory, while sequences join and leave. What was answered is then computed by the CPU, and
once more by the GPU with the same experts (``engine.device.agree``).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from engine import native
from engine.api import PAGE, Sampling
from engine.device.agree import CHUNK, Known, Led, known
from engine.device.check_soak import Sessions, resumes, soaked, texts
from engine.device.findings import aim, report, verdict
from engine.device.frozen import executor_threads, frozen
from engine.device.graph import Inputs
from engine.device.machine import Machine, find_machine
from engine.device.runner import DeviceRunner
from engine.device.served import LAYERS, SEQUENCES, Served, model_config, prompt, room_for, served, write_model
from engine.device.watchdog import Watchdog
from engine.experts.executor import ExecutorError
from engine.kernels.ops import DeviceOps
from engine.native.library import core_cpus
from engine.pace import HELD

PROMPTS = {"first": 600, "second": 40, "third": 9, "long": 5}
ANSWERS = {"first": 200, "second": 60, "third": 200, "long": 2000}
"""Tokens."""
RESIDENT = 0.4
"""Of the experts."""
MODES: dict[str, dict[str, Any]] = {"hybrid": {"experts": "hybrid"}, "all experts on the device": {"experts": "device"}}
HALF = "hybrid, half of the misses to the CPU", {"experts": "hybrid", "split": 0.5}
AGAIN = 800
"""Tokens of an answer that are compared."""
AGREED = 0.98
"""Of the tokens, where routers choose for themselves."""
HOST = 1e-4
"""Seconds of a step at most in which the device has nothing to do."""
TURNS, SHORT, OUTPUT, LATER = 6, 150, 200, 0.12
"""Turns of an agent; tokens of an answer and of a tool's output; how much longer a step may take than in one answer."""
BESIDE = (8192, 32768)
"""Tokens of prompts beside an answer."""
CROWD, EACH = 240, 10
"""Tokens that the first of many sequences says, and so many fewer each of the others."""
TEXTS, LENGTH, SOAK = 4, 800, 5.0
"""Texts of so many tokens, and seconds of a short soak of them."""
PATIENCE = 2.0
"""Seconds until threads that do nothing count as dead, here."""
HANGS = 170
"""Seconds: shortly before ``engine.device.check`` ends this."""
_WARM = 8
"""Steps that are not timed."""


def converse(made: Served, vocab: int, said: dict[str, list[int]] | None = None) -> None:
    """Three sequences that join and leave, and a long one. ``said``: what each is to say."""

    def submit(name: str) -> None:
        forced = None if said is None else tuple(said[name])
        sampling = Sampling(max_tokens=ANSWERS[name], temperature=0.0, forced=forced)
        made.submit(name, _prompt(name, vocab), sampling)

    submit("first")
    made.run(lambda: len(made.answers["first"]) > 20)
    submit("second")
    made.run(lambda: len(made.answers["second"]) > 20)
    submit("third")
    made.run()
    submit("long")
    made.run()


def _prompt(name: str, vocab: int) -> list[int]:
    return prompt(list(PROMPTS).index(name), PROMPTS[name], vocab)


class Graphs:
    """How long the device takes for steps of one sequence, by events within the graphs that are made meanwhile: one
    where a step's inputs are there, one where its results are. Events around a graph would take the host longer than
    what is measured. A step that does not ask the CPU is a graph of its own."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._brought = 0
        self.seconds: list[float] = []

    @contextmanager
    def made(self) -> Iterator[None]:
        copy, finish = Inputs.copy, DeviceRunner._finish

        def begin(inputs: Inputs) -> None:
            copy(inputs)
            self._mark(0)

        def end(runner: DeviceRunner, logits: Tensor, temperatures: Tensor) -> Tensor:
            out = finish(runner, logits, temperatures)
            self._mark(1)
            return out

        with patch.object(Inputs, "copy", begin), patch.object(DeviceRunner, "_finish", end):
            yield

    def _mark(self, number: int) -> None:
        """In the first two graphs, which are those of one sequence where there are two."""
        if torch.cuda.is_current_stream_capturing() and len(self._events) in (number, number + 2):
            event = torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)

    def ended(self, brought: int) -> None:
        """A step has. ``brought``: so many did not ask the CPU by now."""
        begin, end = self._events[2:] if brought > self._brought else self._events[:2]
        self._brought = brought
        end.synchronize()
        self.seconds.append(begin.elapsed_time(end) / 1e3)


def converse_alone(made: Served, vocab: int, graphs: Graphs) -> None:
    """Tells, of one sequence alone, tok/s and how long the device waits for the host."""
    made.ask("warm", prompt(90, 1, vocab), 2)  # a graph that never ran has no times
    runner = cast(DeviceRunner, made.scheduler.runner)
    made.after = lambda: graphs.ended(runner.brought)
    converse(made, vocab)
    count = ANSWERS["long"] - _WARM
    steps = made.steps[-count:]
    host = median(step - seconds for step, seconds in zip(steps, graphs.seconds[-count:], strict=True))
    stats = made.scheduler.stats().values
    parts = [stats.get(f"experts_{name}", 0.0) for name in ("hit", "fetched", "on_cpu")]
    shares = ", ".join(f"{part / max(sum(parts), 1):.0%}" for part in parts)
    report(f"one sequence{f'; hit, fetched, CPU {shares}' if sum(parts) else ''}", f"{1 / median(steps):.0f} tok/s")
    told = f"{1e3 * median(steps):.2f} ms; {1e6 * host:.0f} us"
    aim("a step; of it the device waits for the host", told, host < HOST)
    report("whole rows fetched", f"{stats['fetched_rows']:.0f} of {stats['graph_steps']:.0f} steps")
    report("graphs; bytes of the device that they took", f"{stats['graphs']:.0f}; {stats['graph_bytes'] / 1e6:.0f} MB")


@contextmanager
def one_core() -> Iterator[None]:
    """This thread stays on the core that executors leave to Python: on others of a shared host it may have half the
    speed, and wandering it finds its caches cold."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core_cpus()[0]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def turns(made: Served, vocab: int) -> None:
    """An agent's turns: short answers, and after each a tool's output. Beside one long answer of the same tokens, for
    what a sequence repeats is on the device, and what a model says is not the same each time."""
    answers = [prompt(70 + turn, SHORT, vocab) for turn in range(TURNS)]
    said = prompt(50, 1000, vocab)
    alone = mean(_answer(made, "one answer", said, [token for answer in answers for token in answer]))
    steps = list[float]()
    for turn, answer in enumerate(answers):
        steps += _answer(made, f"turn {turn}", said, answer)
        said = [*said, *answer, *prompt(60 + turn, OUTPUT, vocab)]
    later = mean(steps) / alone - 1
    name = f"a step of {TURNS} turns with {OUTPUT} tokens between"
    aim(name, f"{1e3 * mean(steps):.2f} ms; {later:+.0%}", later < LATER)


def _answer(made: Served, name: str, said: list[int], answer: list[int]) -> list[float]:
    """-> seconds of the steps after the first token."""
    made.submit(name, said, Sampling(max_tokens=len(answer), temperature=0.0, forced=tuple(answer)))
    made.run(lambda: bool(made.answers[name]))
    begin = len(made.steps)
    made.run()
    return made.steps[begin:]


def beside(made: Served, vocab: int, size: int) -> None:
    """A prompt that comes while another sequence answers, when the kernels for it are there; and both aborted."""
    for number in range(2):
        alone, steps, said, held = _ask_beside(made, vocab, size, number)
    longest, took = max(steps), sum(steps)
    aim(
        f"{size} tokens while another answers; between its tokens",
        f"at most {1e3 * longest:.0f} ms, {1e3 * took / said:.1f} ms", longest < 1.5 * HELD,
    )  # fmt: skip
    report("they take, and alone", f"{1e3 * took:.0f} ms and {1e3 * alone:.0f} ms")
    report("pages that both have a step after they were aborted", f"{held}", held == 0)


def _ask_beside(made: Served, vocab: int, size: int, number: int) -> tuple[float, list[float], int, int]:
    """-> seconds alone, of the steps beside an answer, its tokens in them, pages that are held at the end."""
    endless, seed = Sampling(max_tokens=1 << 15, temperature=0.0), size + 2 * number
    alone, answers, asks = (f"{name} {seed}" for name in ("alone", "answers", "asks"))
    start = time.perf_counter()
    made.ask(alone, prompt(seed, size, vocab), 1)
    seconds = time.perf_counter() - start
    made.submit(answers, prompt(seed + 100, 20, vocab), endless)
    made.run(lambda: len(made.answers[answers]) > SHORT)
    begin, said = len(made.steps), len(made.answers[answers])
    made.submit(asks, prompt(seed + 1, size, vocab), endless)
    made.run(lambda: bool(made.answers[asks]))
    steps, said = made.steps[begin:], len(made.answers[answers]) - said
    made.scheduler.abort(answers)
    made.scheduler.abort(asks)
    made.step()
    return seconds, steps, said, made.scheduler.memory.pool.held_pages


def crowd(sessions: Sessions) -> None:
    """As many sequences as a step decodes, of which one after the other ends."""
    made, said, names = sessions.made, [*sessions.texts], []
    made.scheduler.pace.always = True  # prompts are not held back
    for number in range(SEQUENCES):
        turn, text = divmod(number, len(said))
        names.append(sessions.submit(said[text], 1 + number + PAGE * turn, CROWD - EACH * number))
    made.run(lambda: all(made.answers[name] for name in names))
    together = made.count("running")
    made.run()
    made.scheduler.pace.always = None
    report("sequences that answered at once", str(together), together == SEQUENCES)


def dies(made: Served, threads: set[int], said: Known) -> None:
    """The CPU's threads stop: the device must not wait for ever, nor anybody believe what it computes."""
    answer = tuple(said.tokens[said.prompt :])
    made.submit("dies", said.tokens[: said.prompt], Sampling(max_tokens=len(answer), temperature=0.0, forced=answer))
    made.run(lambda: bool(made.answers["dies"]))
    start, right, told = time.perf_counter(), False, "none"
    try:
        with frozen(threads):
            made.run()
    except ExecutorError as error:
        right, told = "not answered" in str(error), f"in {time.perf_counter() - start:.1f} s"
    except OSError as error:
        made.scheduler.abort("dies")
        right, told = True, f"not checked: {error}"
    report("its threads stop: an error", told, right)


@contextmanager
def following(
    folder: Path, machine: Machine, there: dict[str, Known], ops: type[Any], **mode: Any
) -> Iterator[tuple[Served, Led, set[int]]]:
    """An engine whose routers choose as the CPU did, what it is off by, and the threads of its executor."""
    led = Led(there, machine.device)
    impatient = patch("engine.experts.offload.Watchdog", lambda executor, _: Watchdog(executor, PATIENCE))
    with (
        impatient, led.routers(ops), executor_threads() as threads,
        served(folder, machine, **{"chunk_tokens": CHUNK, **mode}) as made,
    ):  # fmt: skip
        led.listen(made.scheduler.runner)
        yield made, led, threads


def compare(
    made: Served, led: Led, threads: set[int], there: dict[str, Known], vocab: int, texts: dict[str, list[int]],
    seconds: float,
) -> None:  # fmt: skip
    """Say the same again; then pieces of ``texts``, many at once, and in any order for so many ``seconds``; then let
    threads die."""
    converse(made, vocab, {name: list(there[name].tokens[there[name].prompt :])[:AGAIN] for name in ANSWERS})
    led.tell()
    if texts:
        sessions = Sessions(made, texts)
        crowd(sessions)
        led.tell()
        resumes(sessions)
        soaked(sessions, seconds)
        led.tell()
    if threads:
        dies(made, threads, there["long"])


def check(folder: Path, machine: Machine, quick: bool) -> None:
    config = model_config(quick)
    vocab, answers = config.vocab, {}
    some: dict[str, Any] = {"device": "cuda", "gpu_bytes": room_for(config, RESIDENT)}
    begin = time.perf_counter()
    for name, mode in MODES.items():
        print(f"{name}, at {time.perf_counter() - begin:.0f} s:", flush=True)
        elastic = mode["experts"] != "device"
        where = some if elastic else {"device": "cuda"}
        graphs = Graphs()
        with graphs.made(), served(folder, machine, **where, **mode) as made:
            with one_core():
                converse_alone(made, vocab, graphs)
            answers[name] = dict(made.answers)
            if elastic or not quick:
                turns(made, vocab)
                for size in BESIDE[: 1 if quick else None]:
                    beside(made, vocab, size)
    hybrid, resident = answers.values()
    same = sum(a == b for name in ANSWERS for a, b in zip(hybrid[name], resident[name], strict=True))
    total = sum(ANSWERS.values())
    report("tokens alike in both", f"{same} of {total}")
    start, said = time.perf_counter(), texts(TEXTS, LENGTH, vocab)
    conversation = {name: (_prompt(name, vocab), resident[name]) for name in ANSWERS}
    there = known(folder, {**conversation, **{name: (tokens[:1], tokens[1:]) for name, tokens in said.items()}}, LAYERS)
    report("the CPU has computed the same", f"in {time.perf_counter() - start:.1f} s")
    agreed = sum(int((there[name].logits.argmax(1) == torch.tensor(resident[name])).sum()) for name in ANSWERS)
    report("and would have chosen, routers left alone", f"{agreed} of {total} tokens", agreed >= AGREED * total)
    name, half = HALF
    print(f"{name}, with the experts that the CPU chooses, at {time.perf_counter() - begin:.0f} s:", flush=True)
    with following(folder, machine, there, DeviceOps, **some, **half) as made:
        compare(*made, there, vocab, said, SOAK)
    if not quick:
        print("all on the device, with the experts that the CPU chooses:", flush=True)
        with following(folder, machine, there, DeviceOps, device="cuda", experts="device") as made:
            compare(*made, there, vocab, {}, 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(HANGS)  # where it is by then
    native.__path__.append(str(options.library.parent))  # where the native library is looked for
    machine = find_machine()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        write_model(model_config(options.quick), Path(folder), machine.device)
        report("model written", f"{time.perf_counter() - start:.1f} s")
        check(Path(folder), machine, options.quick)
    return verdict(time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main())
