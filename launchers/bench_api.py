"""``ft bench api``: what the API process adds to a request, a token and an idle stream.

The worker is one that answers at once, so that only the server is measured; it runs here, and the server is a process
of its own, whose processor time is read from outside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from rich.console import Console

from engine.api import Abort, Admitted, Done, ModelInfo, Reply, Request, Reuse, Tokens
from engine.messages import decode, encode
from launchers.bench import failed, make_tiny, table, verdict
from launchers.bench_api_bodies import PROTOCOLS, anthropic, steps_of
from launchers.bench_api_parts import Part, Times, parts
from parsers.load import Family, FamilyError, load_family
from server.front import settle

MAX_LOADS, MAX_TOKEN_US, MAX_IDLE = 5.0, 50.0, 0.02
AIM_MS = 15.0
CONTEXT = 1 << 20
WARM, ROUNDS = 5, 30
STREAM_TOKENS, PACE = 1000, 0.002
STREAMS = 200


# ── the worker ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Worker:
    """Answers each request with ``text``; ``holding``, with its first token and then nothing. ``pace`` seconds between
    tokens, of which there are ``tokens`` more."""

    def __init__(self, family: Family) -> None:
        self.arrived: asyncio.Queue[float] = asyncio.Queue()
        self.holding = False
        self.tokens: tuple[int, ...] = ()
        self.pace = 0.0
        self._end = family.encode_raw("<|im_end|>") or (0,)
        self._say = family.encode_raw("</think>\n\nDone.")
        self._vocabulary = family.tokenizer.vocab_size
        self._answers: dict[str, asyncio.Task[None]] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(reply: Reply) -> None:
            writer.write(encode(reply))

        send(ModelInfo("bench", "bench", "bench", self._vocabulary, CONTEXT, True, STREAMS, "none", "none", "1"))
        try:
            while True:
                lengths = await reader.readexactly(8)
                header = int.from_bytes(lengths[:4], "little")
                payload = int.from_bytes(lengths[4:], "little")
                frame = await reader.readexactly(header + payload)
                if frame[:10] == b'["request"':
                    self.arrived.put_nowait(time.perf_counter())
                match decode(frame[:header], frame[header:]):
                    case Request() as request:
                        self._answers[request.id] = asyncio.create_task(self._answer(request, send))
                    case Abort(request_id) if task := self._answers.pop(request_id, None):
                        if not task.done():
                            task.cancel()
                            send(Done(request_id, "abort", Reuse(0, 0, 0, 0, 1)))
        except (EOFError, OSError):
            pass
        finally:
            for task in self._answers.values():
                task.cancel()
            writer.close()

    async def _answer(self, request: Request, send: Callable[[Reply], None]) -> None:
        reuse = Reuse(0, 0, 0, 0, len(request.tokens))
        send(Admitted(request.id, reuse))
        if self.holding:
            send(Tokens(request.id, self._say[:1]))
            await asyncio.Event().wait()
        send(Tokens(request.id, self._say))
        loop = asyncio.get_running_loop()
        due = loop.time()
        for token in self.tokens:
            send(Tokens(request.id, (token,)))
            due += self.pace
            await asyncio.sleep(due - loop.time())
        send(Tokens(request.id, self._end))
        send(Done(request.id, "stop", reuse))
        del self._answers[request.id]


@dataclass
class Api:
    """The server process. ``seconds``: processor time it has used."""

    url: str
    pid: int
    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader

    @property
    def seconds(self) -> float:
        return time.clock_gettime((~self.pid << 3) | 2)  # Linux's clock of another process

    async def direct(self) -> None:
        """One request without HTTP."""
        self.stdin.write(b"\n")
        await self.stdout.readline()


@asynccontextmanager
async def api(*arguments: str) -> AsyncIterator[Api]:
    command = (sys.executable, "-P", "-m", "launchers.bench_api_server", *arguments)
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    if process.stdin is None or process.stdout is None:
        raise BenchError("the server has no pipes")
    try:
        port = (await process.stdout.readline()).decode().strip()
        if not port:
            raise BenchError(f"the server ended with exit code {await process.wait()}")
        yield Api(f"http://127.0.0.1:{port}", process.pid, process.stdin, process.stdout)
    finally:
        process.stdin.close()
        await process.wait()


class BenchError(Exception):
    """Why there is nothing to measure."""


# ── what is measured ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RequestRow:
    """Milliseconds, medians and 99th percentiles. ``before_engine``: from the first byte sent until the worker has the
    request. ``busy`` (the server's) and ``loads`` (of json.loads) are processor time, which other programs lengthen
    less. ``parts`` are what the server does meanwhile, one after the other in this process; what is left of ``busy`` is
    HTTP, threads and the socket."""

    path: str
    tokens: int
    body_kb: float
    before_engine: Times
    busy: Times
    loads: Times
    parts: list[Part]

    @property
    def ratio(self) -> float:
        return self.busy.p50 / self.loads.p50

    @property
    def missed(self) -> bool:
        return self.ratio > MAX_LOADS


@dataclass(frozen=True)
class StreamRow:
    """Microseconds of the server's processor time per token, and with the engine's client alone."""

    path: str
    served: float
    direct: float

    @property
    def overhead(self) -> float:
        return self.served - self.direct

    @property
    def missed(self) -> bool:
        return self.overhead > MAX_TOKEN_US


@dataclass(frozen=True)
class IdleRow:
    streams: int
    seconds: float
    share: float

    @property
    def missed(self) -> bool:
        return self.share > MAX_IDLE


async def requests(api: Api, worker: Worker, family: Family, path: str, tokens: int) -> RequestRow:
    """The same conversation again and again, each time with one message more."""
    make = PROTOCOLS[path]
    steps, tokens = steps_of(family, tokens)
    sent, busy, loads, size = [], [], [], 0
    async with httpx.AsyncClient(base_url=api.url, timeout=120, trust_env=False) as http:
        for number in range(WARM + ROUNDS):
            body = json.dumps(make(steps, number)).encode()
            size = len(body)
            begin, used = time.perf_counter(), api.seconds
            posting = asyncio.create_task(http.post(path, content=body, headers={"content-type": "application/json"}))
            arrived = await worker.arrived.get()
            busy.append(api.seconds - used)
            answer = await posting
            if answer.status_code != 200:
                raise BenchError(answer.text)
            json.loads(body)  # the first time pays for memory that the second finds
            before = time.thread_time()
            json.loads(body)
            loads.append(time.thread_time() - before)
            sent.append(arrived - begin)
    before_engine, used_up, loaded = (Times.of(some[WARM:]) for some in (sent, busy, loads))
    bodies = (json.dumps(make(steps, number)).encode() for number in range(WARM + ROUNDS))
    divided = parts(family, path, bodies, WARM)
    return RequestRow(path, tokens, size / 1000, before_engine, used_up, loaded, divided)


async def streams(api: Api, alone: Api, worker: Worker, family: Family, path: str) -> StreamRow:
    """Tokens at the pace of a fast model, so that each costs a turn of the event loop."""
    words = family.encode_raw(" ".join(f"word{n % 97}" for n in range(STREAM_TOKENS)))
    worker.tokens, worker.pace = words[:STREAM_TOKENS], PACE
    try:
        async with httpx.AsyncClient(base_url=api.url, timeout=120, trust_env=False) as http:
            before = api.seconds
            (await http.post(path, json=PROTOCOLS[path](1, 0) | _long(path))).raise_for_status()
            served = api.seconds - before
        before = alone.seconds
        await alone.direct()
        direct = alone.seconds - before
    finally:
        worker.tokens, worker.pace = (), 0.0
    return StreamRow(path, 1e6 * served / STREAM_TOKENS, 1e6 * direct / STREAM_TOKENS)


def _long(path: str) -> dict[str, int]:
    return {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 10 * STREAM_TOKENS}


async def idle(api: Api, worker: Worker, seconds: float) -> IdleRow:
    """Streams whose engine is silent: only keep-alives are sent."""
    worker.holding = True
    body = json.dumps(anthropic(1, 0)).encode()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=api.url, timeout=120, trust_env=False, limits=limits) as http:

        async def watch() -> None:
            async with http.stream("POST", "/v1/messages", content=body) as answer:
                async for _ in answer.aiter_raw():
                    pass

        tasks = [asyncio.create_task(watch()) for _ in range(STREAMS)]
        for _ in range(STREAMS):
            await worker.arrived.get()
        await asyncio.sleep(1.0)
        before, begin = api.seconds, time.perf_counter()
        await asyncio.sleep(seconds)
        used, took = api.seconds - before, time.perf_counter() - begin
        if broken := [task for task in tasks if task.done()]:
            raise BenchError(f"{len(broken)} streams ended: {broken[0].exception()}")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    worker.holding = False
    return IdleRow(STREAMS, took, used / took)


# ── command ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Results:
    requests: list[RequestRow]
    streams: list[StreamRow]
    idle: list[IdleRow]

    @property
    def missed(self) -> list[str]:
        return [
            *(f"requests to {row.path}" for row in self.requests if row.missed),
            *(f"streams of {row.path}" for row in self.streams if row.missed),
            *("idle streams" for row in self.idle if row.missed),
        ]


async def measure(model: Path, tokens: int, idle_seconds: float, say: Callable[[str], None]) -> Results:
    family = load_family(model)
    settle()  # or collections would look at the vocabulary while json.loads is timed
    worker, results = Worker(family), Results([], [], [])
    with TemporaryDirectory(prefix="ft-api-") as folder:
        socket = f"{folder}/worker"
        listener = await asyncio.start_unix_server(worker.serve, socket)
        async with listener, api(str(model), socket) as server, api("direct", socket) as alone:
            for path in PROTOCOLS:
                say(f"requests to {path}")
                results.requests.append(await requests(server, worker, family, path, tokens))
            for path in PROTOCOLS:
                say(f"streams of {path}")
                results.streams.append(await streams(server, alone, worker, family, path))
            while not worker.arrived.empty():
                worker.arrived.get_nowait()
            if idle_seconds:
                say("idle streams")
                results.idle.append(await idle(server, worker, idle_seconds))
    return results


def main(arguments: Sequence[str]) -> int:
    """1 when a goal is missed."""
    parser = argparse.ArgumentParser(
        prog="ft bench api",
        description="Measure what the API process adds to a request, a token and an idle stream.",
        epilog="examples:\n  ft bench api\n  ft bench api --tokens 50000 --idle-seconds 0",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="for tokenizer and template (default: a tiny one)")
    parser.add_argument("--tokens", type=int, default=100_000, help="of the conversation (default: %(default)s)")
    parser.add_argument(
        "--idle-seconds", type=float, default=8.0, help="to watch idle streams; 0: do not (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, stderr=options.json)
    try:
        with TemporaryDirectory(prefix="ft-api-") as scratch, console.status("making a checkpoint") as status:
            model = options.model or make_tiny(Path(scratch) / "tiny", "--hidden", "32", "--tied")
            results = asyncio.run(measure(model, options.tokens, options.idle_seconds, status.update))
    except (BenchError, FamilyError, OSError, httpx.HTTPError, subprocess.SubprocessError) as error:
        return failed(console, "bench api", error)
    if options.json:
        print(json.dumps({**asdict(results), "missed": results.missed}, indent=2))
    else:
        show(console, results)
    return 1 if results.missed else 0


def show(console: Console, results: Results) -> None:
    first = results.requests[0]
    title = f"one new message in a conversation of {first.tokens:,} tokens, {first.body_kb:,.0f} kB"
    shown = table(title, "before the engine", "p99", "of it busy", "p99", "json.loads", "", "")
    for row in results.requests:
        both = [f"{one:.1f} ms" for times in (row.before_engine, row.busy) for one in (times.p50, times.p99)]
        loads = f"{row.loads.p50:.2f} ms"
        shown.add_row(row.path, *both, loads, f"{row.ratio:.1f}x", verdict(row.missed))
    console.print(shown, f"goal: at most {MAX_LOADS:.0f} times json.loads of the body; aim: {AIM_MS:.0f} ms\n")
    names = (row.path.removeprefix("/v1/").partition("/")[0] for row in results.requests)
    shown = table("what the server does before the engine, processor time", *names, "")
    for same in zip(*(row.parts for row in results.requests), strict=True):
        shown.add_row(same[0].name, *(f"{part.p50:.2f} ms (p99 {part.p99:.2f})" for part in same))
    left = (row.busy.p50 - sum(part.p50 for part in row.parts if part.name[0] != " ") for row in results.requests)
    shown.add_row("HTTP, threads, socket", *(f"{one:.2f} ms" for one in left))
    console.print(shown, "")
    shown = table("streaming, processor time per token", "server", "engine's client alone", "overhead", "")
    for one in results.streams:
        shares = (f"{number:.0f} us" for number in (one.served, one.direct, one.overhead))
        shown.add_row(one.path, *shares, verdict(one.missed))
    console.print(shown, f"goal: at most {MAX_TOKEN_US:.0f} us\n")
    for idle_row in results.idle:
        console.print(
            f"{idle_row.streams} idle streams for {idle_row.seconds:.0f} s: {100 * idle_row.share:.2f} % of a core",
            verdict(idle_row.missed),
        )
        console.print(f"goal: at most {100 * MAX_IDLE:.0f} %")
