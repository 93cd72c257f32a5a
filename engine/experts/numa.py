"""Memory of several nodes: what all processors and a device read is spread over all of them, page by page."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from pathlib import Path

_SYSCALLS = {"x86_64": 237, "aarch64": 235}
"""mbind, by machine."""
_INTERLEAVE = 3
_WORD = 64

Bind = Callable[[int, int, int, "ctypes.Array[ctypes.c_uint64]", int, int], int]
"""mbind(address, bytes, policy, mask of nodes, bits of it, flags); 0, or not."""


def memory_nodes(root: Path = Path("/")) -> list[int]:
    """Nodes that have memory which this process may use; empty where the system does not say. ``root`` of a system."""
    nodes = _numbers(root / "sys/devices/system/node/has_memory")
    status = root / "proc/self/status"
    lines = status.read_text(encoding="ascii").splitlines() if status.exists() else []
    allowed = [_listed(line.partition(":")[2]) for line in lines if line.startswith("Mems_allowed_list:")]
    return [node for node in nodes if not allowed or node in allowed[0]]


def interleave(address: int, nbytes: int, nodes: list[int], bind: Bind | None = None) -> bool:
    """Spread pages that nothing was written to yet over ``nodes``, if there are several. -> whether they will be; where
    the system refuses, memory comes as it would have."""
    bind = bind or _system_bind()
    if len(nodes) < 2 or bind is None:
        return False
    words = max(nodes) // _WORD + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // _WORD] |= 1 << node % _WORD
    return bind(address, nbytes, _INTERLEAVE, mask, words * _WORD + 1, 0) == 0  # the system takes a bit less


def _system_bind() -> Bind | None:
    number = _SYSCALLS.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        return None
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long

    def bind(address: int, nbytes: int, policy: int, mask: ctypes.Array[ctypes.c_uint64], bits: int, flags: int) -> int:
        sizes = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_ulong(policy)
        return int(call(ctypes.c_long(number), *sizes, mask, ctypes.c_ulong(bits), ctypes.c_ulong(flags)))

    return bind


def _numbers(path: Path) -> list[int]:
    return _listed(path.read_text(encoding="ascii")) if path.exists() else []


def _listed(text: str) -> list[int]:
    """``0-2,5`` as the system writes it."""
    numbers = list[int]()
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers
