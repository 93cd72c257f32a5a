"""Every Python process that has this folder in its path writes down which outside address it asked for, and is refused
it. The file is named by FT_SENTINEL."""

from __future__ import annotations

import ipaddress
import os
import sys
from pathlib import Path
from typing import Any


def outside(host: Any) -> bool:
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if host in (None, "", "localhost"):
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True
    return not (address.is_loopback or address.is_unspecified)


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    match event, arguments:
        case ("socket.connect" | "socket.sendto" | "socket.sendmsg", (_, (host, *_))) if outside(host):
            pass
        case ("socket.getaddrinfo" | "socket.gethostbyname", (host, *_)) if outside(host):
            pass
        case _:
            return
    with Path(os.environ["FT_SENTINEL"]).open("a") as file:
        file.write(f"{event} {host} {sys.argv[:3]}\n")
    raise OSError(f"{host} is outside this machine")


sys.addaudithook(watch)
