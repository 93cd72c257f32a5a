from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api import EngineConfig
from engine.messages import Ready, config_to_json, parse_status
from tests.process.support import FAKE_WORKER, StartWorker, WorkerHandle, child_environment


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """pytest's own temporary folders can be too long for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="ft-") as name:
        yield Path(name)


@pytest.fixture
def start_worker(short_dir: Path) -> Iterator[StartWorker]:
    processes: list[subprocess.Popen[bytes]] = []

    def start(model: str = "fake", max_sequences: int = 8) -> WorkerHandle:
        socket = short_dir / "w" / "worker.sock"
        config = config_to_json(EngineConfig(model=model, max_sequences=max_sequences))
        process = subprocess.Popen(
            [*FAKE_WORKER, "--socket", str(socket), "--config", config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=child_environment(),
        )
        processes.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if isinstance(parse_status(line), Ready):
                return WorkerHandle(process, socket)
        raise AssertionError(f"the worker ended with {process.wait()}")

    yield start
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with real weights, a byte tokenizer and a template."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    command = [sys.executable, "-P", "-m", "engine.checkpoint", "tiny", "qwen3_5_moe", str(folder)]
    subprocess.run(command, check=True, env=child_environment() | {"OMP_NUM_THREADS": "1"}, capture_output=True)
    return folder
