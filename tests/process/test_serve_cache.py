"""Memory is divided anew while a conversation goes on, through the server and its command line."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from launchers.child_server import ChildServer
from launchers.cli import main
from tests.process.support import HANG_SECONDS


@pytest.fixture
def server(tiny: Path, tmp_path: Path) -> Iterator[ChildServer]:
    arguments = (
        "--model",
        str(tiny),
        "--no-idle-prefill",
        "--threads",
        "1",
        "--kv-bytes",
        "16m",
        "--checkpoint-bytes",
        "16m",
    )
    with ChildServer(arguments, tmp_path / "server") as server:
        yield server


@pytest.fixture
def url(server: ChildServer) -> str:
    return server.url


def test_memory_is_divided_while_an_answer_is_written(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer is the same; what does not fit is refused with the numbers, and nothing of it has happened."""

    def write() -> str:
        asked = {"model": "local-moe", "prompt": "hello " * 60, "max_tokens": 200, "temperature": 0, "logprobs": 1}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=HANG_SECONDS).raise_for_status()
        choice = answer.json()["choices"][0]
        assert len(choice["logprobs"]["tokens"]) > 20
        return json.dumps(choice, sort_keys=True)

    def ask(body: Any) -> httpx.Response:
        return httpx.post(f"{url}/v1/cache", json=body, timeout=HANG_SECONDS)

    def shown() -> dict[str, float]:
        found: dict[str, float] = httpx.get(f"{url}/v1/cache", timeout=HANG_SECONDS).raise_for_status().json()
        return found

    def context() -> int:
        models = httpx.get(f"{url}/v1/models", timeout=HANG_SECONDS).raise_for_status().json()
        return int(models["data"][0]["context_length"])

    wanted, before = write(), shown()
    got: list[str] = []
    divided_often = threading.Event()

    def write_on() -> None:
        while not divided_often.is_set():
            got.append(write())

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        for tokens in (2048, 8192, 1280, 1024, 4096) * 2:
            divided = ask({"kv": tokens, "states": 4})
            assert divided.status_code == 200, divided.text
            assert divided.json()["kv_tokens"] == tokens and divided.json()["states"] == 4
    finally:
        divided_often.set()
        writer.join()
    assert {*got, write()} == {wanted}
    assert before["kv_bytes"] <= 16 << 20 and shown()["moves"] >= 4
    assert before["budget_bytes"] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 15 / 16

    assert ask({"kv": 4096}).status_code == 200 and context() == 4096 - 64
    for body, says in (
        ({"kv": 1 << 45}, "pages: there may be 1 to"),
        ({"kv": 64}, "64 tokens are below the least, 128"),
        ({"experts": 5}, "experts have no slots here"),
        ({"auto": True}, "nothing but the sizes that you name"),
        ({"pages": 5}, "experts, kv (tokens) and states can be set"),
        ({"kv": "many"}, "say how many"),
        ({}, "say how many"),
        ([], "say how many"),
    ):
        refused = ask(body)
        assert refused.status_code == 400 and says in refused.json()["error"]["message"]
    assert shown()["kv_tokens"] == 4096
    assert main(["ctl", "cache", "--url", url, "--kv", "3k", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kv_tokens"] == 3072 and 0 < told["prompt_hit_rate"] < 1 and told["held_bytes"] > 0
    assert main(["ctl", "cache", "--url", url, "--experts", "1"]) == 1
    assert "experts have no slots here" in capsys.readouterr().err


def test_the_next_worker_divides_memory_as_it_was(server: ChildServer) -> None:
    def ask(**body: Any) -> None:
        httpx.post(f"{server.url}/v1/cache", json=body, timeout=HANG_SECONDS).raise_for_status()

    ask(kv=2048)
    ask(states=4)
    refused = httpx.post(f"{server.url}/v1/cache", json={"kv": 1 << 45}, timeout=HANG_SECONDS)
    assert refused.status_code == 400
    worker = server.worker_pid
    os.kill(worker, signal.SIGKILL)
    while server.worker_pid == worker:
        time.sleep(0.05)
    while (answer := httpx.get(f"{server.url}/v1/cache", timeout=HANG_SECONDS)).status_code == 503:
        time.sleep(0.05)
    state = answer.json()
    assert (state["kv_tokens"], state["states"]) == (2048, 4)
