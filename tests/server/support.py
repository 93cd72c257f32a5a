"""A server on a loopback port, in this process, over the real engine client and a worker that says what it is told."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import uvicorn

from engine.api import (
    Abort,
    Admin,
    AdminReply,
    Admitted,
    Done,
    ErrorKind,
    Failed,
    FinishReason,
    GetStats,
    ModelInfo,
    Reply,
    Request,
    Reuse,
    Stats,
    TokenLogprob,
    Tokens,
)
from engine.client import EngineClient
from engine.messages import encode, read_message
from engine.weights.tiktoken import build_byte_tokenizer
from parsers.load import Family, load_family
from server.app import create_app
from server.front import FrontConfig, Patience, Tls
from server.script import Script
from server.settings import ServerSettings
from server.state import ServerState
from sessions.tracker import Sessions

TEMPLATES = Path(__file__).resolve().parents[2] / "engine" / "templates"
CONTEXT = 8192


def build_family(directory: Path) -> Family:
    """Qwen3-XML over 256 bytes and the control tokens."""
    build_byte_tokenizer(directory)
    shutil.copy(TEMPLATES / "qwen3_xml.jinja", directory / "chat_template.jinja")
    return load_family(directory)


@dataclass
class Answer:
    """What the worker does with one request. ``text`` is the family's own, control tokens recognised.

    ``hold_at``: tokens before which it waits for ``release``; -1 never. ``resumed``: share of the prompt that was
    cached, ``host`` and ``disk`` parts of it. ``die``: the connection breaks instead of the wait ending. ``refuse``:
    fails before admission.
    """

    text: str
    reason: FinishReason = "stop"
    resumed: int = 0
    host: int = 0
    disk: int = 0
    checkpoints: tuple[int, ...] = ()
    hold_at: int = -1
    release: asyncio.Event = field(default_factory=asyncio.Event)
    die: bool = False
    refuse: tuple[ErrorKind, str] | None = None
    admit: bool = True


class FakeWorker:
    """The worker's end of the socket. ``answers`` maps a request to what to do."""

    def __init__(self, family: Family, answers: Callable[[Request], Answer], vocabulary: int) -> None:
        self.requests: list[Request] = []
        self.commands: list[tuple[str, dict[str, str]]] = []
        self.aborted: list[str] = []
        self.abort_seen = asyncio.Event()
        self._family = family
        self._answers = answers
        self._vocabulary = vocabulary
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sent: dict[str, int] = {}
        self._writer: asyncio.StreamWriter | None = None
        self.incarnation = 0
        self.deaf = False
        """Answers no more questions."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.incarnation += 1
        self._send(
            ModelInfo("m", "fake", "f", self._vocabulary, CONTEXT, True, 4, "none", "f32", f"i{self.incarnation}")
        )
        try:
            while True:
                match await read_message(reader):
                    case Request() as request:
                        self.requests.append(request)
                        self._tasks[request.id] = asyncio.create_task(self._answer(request))
                    case Abort(request_id):
                        self._abort(request_id)
                    case Admin() as command:
                        self.commands.append((command.action, command.arguments))
                        self._send(AdminReply(command.id, True, {"forgotten": 3.0, "checkpoints": 2.0, "extents": 7.0}))
                    case GetStats() if not self.deaf:
                        self._send(Stats({"kv_bytes_used": 1.0}))
        except (EOFError, OSError):
            pass
        finally:
            for task in self._tasks.values():
                task.cancel()
            writer.close()

    def hang_up(self) -> None:
        assert self._writer is not None
        self._writer.close()

    def _send(self, reply: Reply) -> None:
        assert self._writer is not None
        self._writer.write(encode(reply))

    def _abort(self, request_id: str) -> None:
        task = self._tasks.pop(request_id, None)
        if task is not None and not task.done():
            task.cancel()
            self.aborted.append(request_id)
            self.abort_seen.set()
            self._send(Done(request_id, "abort", Reuse(0, 0, 0, 0, 1)))

    async def _answer(self, request: Request) -> None:
        answer = self._answers(request)
        if answer.refuse is not None:
            self._send(Failed(request.id, *answer.refuse))
            return
        device = answer.resumed - answer.host - answer.disk
        reuse = Reuse(device, answer.host, answer.disk, 0, len(request.tokens) - answer.resumed)
        if not answer.admit:
            await answer.release.wait()
        self._send(Admitted(request.id, reuse))
        tokens = self._family.encode_raw(answer.text) if request.sampling.forced is None else request.sampling.forced
        reason = answer.reason
        if len(tokens) > request.sampling.max_tokens:
            tokens, reason = tokens[: request.sampling.max_tokens], "length"
        for at, token in enumerate(tokens):
            if at == answer.hold_at:
                await answer.release.wait()
                if answer.die:
                    assert self._writer is not None
                    self._writer.close()
                    return
            self._send(Tokens(request.id, (token,), self._logprobs(request, token)))
            if at % 8 == 7:
                await asyncio.sleep(0)
        self._send(Done(request.id, reason, reuse, answer.checkpoints))

    def _logprobs(self, request: Request, token: int) -> tuple[TokenLogprob, ...]:
        count = request.sampling.logprobs
        if count is None:
            return ()
        return (TokenLogprob(token, -0.5, tuple((token + other, -0.5 - other) for other in range(count))),)


@dataclass
class Server:
    """A running server and ways to talk to it."""

    url: str
    state: ServerState
    worker: FakeWorker
    client: EngineClient
    socket: str
    clients: AsyncExitStack

    def anthropic(self) -> anthropic.AsyncAnthropic:
        client = anthropic.AsyncAnthropic(base_url=self.url, api_key="local", max_retries=0)
        self.clients.push_async_callback(client.close)
        return client

    def openai(self) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="local", max_retries=0)
        self.clients.push_async_callback(client.close)
        return client

    def http(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=30, trust_env=False, **options)

    async def idle(self) -> None:
        """Waits until no generation is open, here or at the worker's."""
        while self.state.counters.open_generations or self.client.open:
            await asyncio.sleep(0.005)


class _Uvicorn(uvicorn.Server):
    """Leaves signals alone."""

    def install_signal_handlers(self) -> None:
        pass


@asynccontextmanager
async def serving(
    family: Family,
    answers: Callable[[Request], Answer] | Answer | str = "",
    *,
    script: Script | None = None,
    max_open: int = 8,
    connect: bool = True,
    patience: Patience | None = None,
    tls: Tls | None = None,
    **settings: Any,
) -> AsyncIterator[Server]:
    """``answers``: what the worker does, or always the same answer, or only its text."""

    def answer(request: Request) -> Answer:
        if isinstance(answers, str):
            return Answer(answers)
        return answers if isinstance(answers, Answer) else answers(request)

    worker = FakeWorker(family, answer, family.tokenizer.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/worker"
        listener = await asyncio.start_unix_server(worker.serve, socket)
        client = EngineClient(max_open)
        if connect:
            await client.connect(socket)
        state = ServerState(
            client, family, Sessions(family), ServerSettings(**{"idle_prefill": False, **settings}), script
        )
        limit = state.settings.max_body_bytes
        server = _Uvicorn(
            FrontConfig(create_app(state), patience or Patience(), tls, port=0, lifespan="on", ws_max_size=limit)
        )
        task = asyncio.create_task(server.serve())
        try:
            while not server.started:
                await asyncio.sleep(0.005)
            port = server.servers[0].sockets[0].getsockname()[1]
            async with AsyncExitStack() as clients:
                yield Server(f"{'https' if tls else 'http'}://127.0.0.1:{port}", state, worker, client, socket, clients)
        finally:
            server.should_exit = True
            await client.close()
            await task
            listener.close()


@contextmanager
def served(
    family: Family, answers: Callable[[Request], Answer] | str, **settings: Any
) -> Iterator[tuple[Server, asyncio.AbstractEventLoop]]:
    """In a thread, with that loop: for tests that are not asynchronous."""
    up, stop = threading.Event(), asyncio.Event()
    made: list[tuple[Server, asyncio.AbstractEventLoop]] = []

    async def serve() -> None:
        async with serving(family, answers, **settings) as server:
            made.append((server, asyncio.get_running_loop()))
            up.set()
            await stop.wait()
            await asyncio.wait_for(server.idle(), 30)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert up.wait(30)
    try:
        yield made[0]
    finally:
        made[0][1].call_soon_threadsafe(stop.set)
        thread.join(60)
        assert not thread.is_alive()


def events(body: str) -> list[tuple[str, str]]:
    """(event name, data) of a stream's body; comments are left out."""
    out = []
    for frame in body.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in frame.splitlines() if line and not line.startswith(":"))
        if fields:
            out.append((fields.get("event", ""), fields.get("data", "")))
    return out
