"""``ft serve --engine`` as a process of its own, before a double of the other server in this one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from launchers.remote import refuse_others
from launchers.runtime import ServeError
from launchers.settings import ServeSettings
from parsers.load import Family
from tests.process.support import HANG_SECONDS
from tests.process.test_serve import Serve, alive, chat, one_line_error, start, wait_for
from tests.server.remote_doubles import Double, Listening, SGLangDouble, VLLMDouble, double_at
from tests.server.support import build_family

__all__ = ["start"]


class Remote:
    """A double in a thread with an event loop of its own."""

    def __init__(self, double: Double) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.double = double
        self.over = asyncio.Event()
        up: Future[Listening] = Future()
        self.serving = asyncio.run_coroutine_threadsafe(self._serve(up), self.loop)
        self.listening = up.result(HANG_SECONDS)

    async def _serve(self, up: Future[Listening]) -> None:
        async with double_at(self.double) as listening:
            up.set_result(listening)
            await self.over.wait()

    @property
    def url(self) -> str:
        return self.listening.url

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self.listening.stop(), self.loop).result(HANG_SECONDS)

    def start(self) -> None:
        asyncio.run_coroutine_threadsafe(self.listening.start(), self.loop).result(HANG_SECONDS)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.over.set)
        self.serving.result(HANG_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, template and config of a model, and no weights."""
    folder = tmp_path_factory.mktemp("model")
    build_family(folder)
    config = {"model_type": "qwen3_moe", "vocab_size": 300, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def family(folder: Path) -> Family:
    return build_family(folder)


@pytest.fixture
def remotes() -> Iterator[list[Remote]]:
    found: list[Remote] = []
    yield found
    for remote in found:
        remote.close()


@pytest.mark.parametrize("kind", [SGLangDouble, VLLMDouble])
def test_from_start_to_end(
    start: Serve, folder: Path, family: Family, remotes: list[Remote], kind: type[Double], short_dir: Path
) -> None:
    """Start, an answer, the remote's end and return, the sessions kept on disk, our end."""
    remotes.append(remote := Remote(kind(family, "hello", key="s3cret")))
    (short_dir / "key").write_text("s3cret\n")
    server = start(folder, engine=remote.url, engine_key_file=str(short_dir / "key"), store=str(short_dir / "store"))
    state = server.ready()
    assert state["worker_pid"] == 0
    health = httpx.get(f"{state['url']}/health", timeout=HANG_SECONDS).json()
    assert health["engine"]["kind"] == remote.double.kind and health["architecture"] == "qwen3_moe"
    assert (
        httpx.post(**chat(state["url"], 50, reasoning_effort="none")).json()["choices"][0]["message"]["content"]
        == "hello"
    )
    assert httpx.get(f"{state['url']}/v1/store", timeout=HANG_SECONDS).status_code == 404
    assert any((short_dir / "store" / "sessions").iterdir()) and not (short_dir / "store" / "state").exists()

    remote.stop()
    wait_for(lambda: httpx.get(f"{state['url']}/health", timeout=HANG_SECONDS).status_code == 503)
    remote.start()
    answer = httpx.post(**chat(state["url"], 50))
    assert answer.status_code == 200, answer.text
    wait_for(lambda: "the remote engine is back" in server.log.read_text())

    os.kill(server.process.pid, signal.SIGTERM)
    code, log = server.ended()
    assert code == 0 and "Traceback" not in log and "s3cret" not in log
    assert f"has no store: {health['engine']['lacks']['store']}" in log and not alive(server.process.pid)


def test_what_cannot_be_served_is_refused(start: Serve, folder: Path, family: Family, remotes: list[Remote]) -> None:
    remotes.append(remote := Remote(SGLangDouble(family, key="s3cret")))
    one_line_error(start(folder, engine=remote.url), "wants an API key", "--engine-key-file", "FT_ENGINE_KEY")
    remotes.append(other := Remote(VLLMDouble(family)))
    one_line_error(start(folder, engine=other.url, engine_model="gpt"), "no model 'gpt'", "qwen", "--engine-model")
    other.double.tokenize = lambda text: [1]
    one_line_error(start(folder, engine=other.url), "another vocabulary", "--model")
    other.stop()
    one_line_error(start(folder, engine=other.url), "no engine answers", "start it")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"engine": "ftp://x"}, ("http://HOST:PORT",)),
        ({"engine": "http://me:s3cret@127.0.0.1:9"}, ("--engine-key-file",)),
        ({"engine": "http://127.0.0.1:9", "kv_bytes": 99, "threads": 2}, ("--threads, --kv-bytes", "leave it out")),
        ({"engine": "http://127.0.0.1:9", "script": "rules.jsonl"}, ("--script",)),
        ({"engine": "http://127.0.0.1:9", "engine_key_file": "/nowhere"}, ("--engine-key-file",)),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(
    start: Serve, folder: Path, settings: dict[str, Any], parts: tuple[str, ...]
) -> None:
    server = start(folder, **settings)
    one_line_error(server, *parts)
    assert "s3cret" not in server.log.read_text()


def test_the_embedded_model_runs_here_alone() -> None:
    with pytest.raises(ServeError, match=r"--model DIR.*no weights"):
        refuse_others(ServeSettings(engine="http://127.0.0.1:9"))
