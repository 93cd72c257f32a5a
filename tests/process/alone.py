"""A machine without a network: everything that ft does in it, then what of it tried to get out. Prints JSON.

Runs in a network namespace of its own where there is one. The argument is a folder with a checkpoint in ``tiny``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anthropic
import openai

from launchers.child_server import ChildServer

SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x41
USER: Any = [{"role": "user", "content": "Hi"}]
COMMANDS = (
    ("ctl", "health"),
    ("ctl", "stats"),
    ("sessions", "list"),
    ("store", "stat"),
    ("launch", "claude", "--dry-run"),
    ("launch", "codex", "--dry-run"),
)


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP_RUNNING))


def without_route() -> dict[str, int]:
    """What the kernel counted of attempts to leave, by whatever program, and of questions to a name server here."""
    lines = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines()]
    tables = {
        names[0]: dict(zip(names, values, strict=True)) for names, values in zip(lines[::2], lines[1::2], strict=True)
    }
    six = dict(line.split() for line in Path("/proc/net/snmp6").read_text().splitlines())
    return {
        "ipv4": int(tables["Ip:"]["OutNoRoutes"]),
        "ipv6": int(six["Ip6OutNoRoutes"]),
        "names": int(tables["Udp:"]["NoPorts"]) + int(six["Udp6NoPorts"]),
    }


class Proxy:
    """Refuses everybody, and counts them."""

    def __init__(self) -> None:
        self.asked = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self._listener.accept()
            self.asked += 1
            client.close()


def use(folder: Path) -> None:
    with ChildServer(["--model", str(folder / "tiny")], folder / "served") as server:
        claude = anthropic.Anthropic(base_url=server.url, api_key="local", max_retries=0)
        claude.messages.create(model="local-moe", max_tokens=8, messages=USER)
        with claude.messages.stream(model="local-moe", max_tokens=8, messages=USER) as stream:
            stream.get_final_message()
        gpt = openai.OpenAI(base_url=f"{server.url}/v1", api_key="local", max_retries=0)
        gpt.responses.create(model="local-moe", input="Hi", max_output_tokens=8)
        gpt.chat.completions.create(model="local-moe", messages=USER, max_tokens=8)
        for command in COMMANDS:
            url = ["--url", server.url]
            subprocess.run(
                [sys.executable, "-P", "-m", "launchers.cli", *command, *url], check=True, stdout=subprocess.DEVNULL
            )
        server.wait_until_stored()
        server.restart(kill=True)
        claude = anthropic.Anthropic(base_url=server.url, api_key="local", max_retries=0)
        claude.messages.create(model="local-moe", max_tokens=8, messages=USER)


def sin() -> None:
    """What must be noticed."""
    for family, host in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family) as one:
            one.setblocking(False)
            with contextlib.suppress(OSError):
                one.connect((host, 80))


def main(folder: Path, what: str) -> None:
    own = os.environ.get("FT_OWN_NETWORK") == "1"
    if own:
        loopback_up()
    proxy = Proxy()
    here = {"no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}
    os.environ.update(here | dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTPS_PROXY"), proxy.url))
    {"use": use, "sin": lambda _: sin()}[what](folder)
    log = Path(os.environ["FT_SENTINEL"])
    print(
        json.dumps(
            {
                "asked": log.read_text().splitlines() if log.exists() else [],
                "proxy": proxy.asked,
                "kernel": without_route() if own else None,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
