"""The API process of ``ft bench api``: the application as ``ft serve`` has it, over any worker.

    python -P -m launchers.bench_api_server MODEL SOCKET

Prints its port once requests are answered. With ``direct`` for MODEL there is only the engine's client, which sends one
request for each line it reads, and prints a line when it was answered.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn

from engine.api import Request, Sampling
from engine.client import EngineClient
from parsers.load import load_family
from server.app import create_app
from server.front import FrontConfig, Patience, settle
from server.settings import ServerSettings
from server.state import ServerState
from sessions.tracker import Sessions

OPEN = 256


async def serve(model: Path, socket: str) -> None:
    client = EngineClient(OPEN)
    await client.connect(socket)
    family = load_family(model)
    state = ServerState(client, family, Sessions(family), ServerSettings(idle_prefill=False))
    settle()
    server = uvicorn.Server(FrontConfig(create_app(state), Patience(), port=0))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([closed, serving], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    await client.close()


async def direct(socket: str) -> None:
    client = EngineClient(OPEN)
    await client.connect(socket)
    print(0, flush=True)
    number = 0
    while await asyncio.to_thread(sys.stdin.readline):
        number += 1
        stream = client.submit(Request(f"direct{number}", (1, 2, 3), Sampling(max_tokens=1 << 20)))
        async for _ in stream:
            pass
        print(number, flush=True)
    await client.close()


if __name__ == "__main__":
    if sys.argv[1] == "direct":
        asyncio.run(direct(sys.argv[2]))
    else:
        asyncio.run(serve(Path(sys.argv[1]), sys.argv[2]))
