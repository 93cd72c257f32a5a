"""A server started for somebody who found none, which goes on when they are done."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from launchers.agents.common import state_directory
from launchers.child_server import SERVE, wait_until_ready
from launchers.running import ServerProblem

LOOPBACK = ("127.0.0.1", "localhost", "::1")
READY_SECONDS = 1800.0
"""A large model may have to be read from a slow disk."""


def start_server(url: str, flags: Sequence[str], api_key_file: Path | None) -> None:
    """``ft serve`` with ``flags``, at ``url``, once it answers requests. Says where its log is, and how it ends.

    Raises ServerProblem.
    """
    address = urlsplit(url)
    if address.hostname not in LOOPBACK:
        raise ServerProblem(f"no server can be started at {url} from here: it is another machine's address")
    folder = state_directory(os.environ) / "server"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    port = address.port or 80
    log, ready = folder / f"{port}.log", folder / f"{port}.json"
    ready.unlink(missing_ok=True)
    key = ("--api-key-file", str(api_key_file)) if api_key_file else ()
    command = [
        *(*SERVE, "--host", address.hostname, "--port", str(port), "--ready-file", str(ready), *key, *flags),
    ]
    print(f"starting a server; its log: {log}", file=sys.stderr)
    with log.open("wb") as output:
        log.chmod(0o600)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        wait_until_ready(process, ready, log, READY_SECONDS)
    except BaseException:
        process.terminate()
        raise
    print(f"the server goes on when the agent ends; to stop it: kill {process.pid}", file=sys.stderr)
