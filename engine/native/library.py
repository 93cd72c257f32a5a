"""Finds, checks and declares the C++ library."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ABI = 4
"""Version of the interface and of the arithmetic; must equal ``kAbi`` in abi.cpp. Part of what makes state valid."""

INSTRUCTION_SETS = ("avx512", "avx2", "scalar")
"""Best first. All of them give the same bits."""
EXPERT_SETS = ("amx", *INSTRUCTION_SETS)
"""Of executors."""

_REBUILD = "run `pip install --no-build-isolation -e .` in the project's directory, or set kernels to `reference`"

_int, _int64, _float, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class NativeLibraryError(RuntimeError):
    """The library is missing, of another version, or cannot run here; the text says what to do."""


class BatchView(ctypes.Structure):
    """``Batch`` of context.h."""

    _fields_ = (
        ("rows", _int64),
        ("sequences", _int64),
        ("pages_per_sequence", _int64),
        ("snapshot_count", _int64),
        ("segments", _pointer),
        ("page_table", _pointer),
        ("snapshots", _pointer),
    )


class ExecutorSpec(ctypes.Structure):
    """``ExecutorSpec`` of executor.h."""

    _fields_ = (
        ("threads", ctypes.c_int32),
        ("cpu_count", ctypes.c_int32),
        ("cpus", ctypes.POINTER(ctypes.c_int32)),
        ("exact", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("pool", _pointer),
        *((name, _int64) for name in ("stride", "layers", "experts", "hidden", "inner", "parts")),
        ("bounds", _int64 * 5),
        ("rows", _int64),
        ("ranks", _int64),
        ("mailbox", _pointer),
        *((name, _int64) for name in ("ready", "done", "error", "served", "arrived", "x", "plan", "weights", "y")),
        ("times", _pointer),
    )


_batch = ctypes.POINTER(BatchView)

# Every function takes the context first and returns 0 or the kind of error; see abi.cpp.
_SIGNATURES: dict[str, Sequence[type[ctypes._CDataType]]] = {
    "ft_pack": (_pointer, _int, _int64, _int64, _pointer),
    "ft_linear": (_pointer, _int64, _pointer, _int, _int64, _int64, _pointer, _pointer),
    "ft_pack_experts": (_pointer, _pointer, _int, _int64, _int64, _int64, _pointer, _pointer),
    "ft_experts": (*(_pointer,) * 3, _int64, _int64, _pointer, _pointer, _int, _int64, _int64, _int64, _pointer),
    "ft_route": (_pointer, _int64, _int64, _int64, _int, _pointer, _pointer),
    "ft_rms_norm": (_pointer, _pointer, _pointer, _float, _float, _int64, _int64, _pointer),
    "ft_silu_mul": (_pointer, _int64, _int64, _pointer),
    "ft_sigmoid_mul": (_pointer, _pointer, _int, _int64, _int64, _pointer),
    "ft_rope": (_pointer, _pointer, _pointer, _int64, _int64, _int64, _int64, _int64),
    "ft_gdn_gates": (_pointer, _pointer, _pointer, _pointer, _int64, _int64, _pointer, _pointer),
    "ft_conv": (_pointer, _int64, _int64, _pointer, _pointer, _int64, _batch, _pointer),
    "ft_gated_delta": (*(_pointer,) * 5, *(_int64,) * 4, _pointer, _int64, _batch, _pointer),
    "ft_attention": (_pointer, _int64, _pointer, _pointer, _int, _int64, _int64, _int64, _float, _batch, _pointer),
    "ft_read": (_pointer, _int64, _pointer),
    "ft_write_pages": (_pointer, _pointer, _pointer, _pointer, _int, _int64, _int64, _int64, _batch),
}


def find_library() -> Path:
    """Where the installed library is; raises NativeLibraryError."""
    spec = find_spec("engine.native._native")
    if spec is None or spec.origin is None:
        raise NativeLibraryError(f"the native library is not built; {_REBUILD}")
    return Path(spec.origin)


def load_library(path: Path) -> ctypes.CDLL:
    """The library with its functions declared; raises NativeLibraryError."""
    try:
        library = ctypes.CDLL(str(path))
        abi = library.ft_abi
    except (OSError, AttributeError) as error:
        raise NativeLibraryError(f"{path} cannot be loaded ({error}); {_REBUILD}") from error
    if abi() != ABI:
        raise NativeLibraryError(f"{path} has interface version {abi()}, this program needs {ABI}; {_REBUILD}")
    library.ft_supported.argtypes = (ctypes.c_char_p,)
    library.ft_create.argtypes = (ctypes.c_char_p, _int)
    library.ft_create.restype = _pointer
    library.ft_destroy.argtypes = (_pointer,)
    library.ft_destroy.restype = None
    library.ft_error.argtypes = (_pointer,)
    library.ft_error.restype = ctypes.c_char_p
    library.ft_large_pages.argtypes = (_pointer, _int64)
    library.ft_large_pages.restype = None
    library.ft_executor_create.argtypes = (ctypes.c_char_p, ctypes.POINTER(ExecutorSpec))
    library.ft_executor_create.restype = _pointer
    library.ft_executor_destroy.argtypes = (_pointer,)
    library.ft_executor_destroy.restype = None
    library.ft_executor_run.argtypes = (_pointer, _int64, _int64, *(_pointer,) * 4, ctypes.c_char_p, _int64)
    library.ft_executor_read.argtypes = (_pointer, _pointer, _int64)
    library.ft_executor_read.restype = ctypes.c_uint64
    library.ft_executor_error.argtypes = (_pointer, ctypes.c_char_p, _int64)
    library.ft_executor_share_cores.argtypes = (_pointer,)
    library.ft_executor_share_cores.restype = None
    library.ft_executor_rouse.argtypes = (_pointer,)
    library.ft_executor_rouse.restype = None
    library.ft_executor_silence.argtypes = (_pointer,)
    library.ft_executor_silence.restype = _int64
    for name, arguments in _SIGNATURES.items():
        function = library[name]
        function.argtypes = (_pointer, *arguments)
        setattr(library, name, function)
    return library


def supported_instruction_sets(library: ctypes.CDLL, names: Sequence[str] = INSTRUCTION_SETS) -> tuple[str, ...]:
    """What this processor runs of ``names``, best first."""
    return tuple(name for name in names if library.ft_supported(name.encode()))


def core_cpus() -> list[int]:
    """One processor of every core that this process may run on, by number."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores: dict[str, int] = {}
    for cpu in sorted(cpus):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(cores.values())


def cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Of the last caches of all processors together; 0 where the system does not say."""
    last: dict[str, tuple[int, int]] = {}  # level and bytes, by the processors that share it
    for index in root.glob("cpu[0-9]*/cache/index[0-9]*"):
        if not (index / "size").exists():
            continue
        level, size, shared = ((index / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
        last[shared] = max(last.get(shared, (0, 0)), (int(level), int(size.removesuffix("K")) << 10))
    highest = max((level for level, _ in last.values()), default=0)
    return sum(size for level, size in last.values() if level == highest)


def physical_cores() -> int:
    """Cores this process may run on, hardware threads of one core counted once."""
    return max(1, len(core_cpus()))
