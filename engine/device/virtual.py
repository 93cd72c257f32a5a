"""Virtual memory: ranges of addresses reserved once, physical memory mapped into them as it is needed.

On a GPU through libcuda (torch has no binding for it), on the host through mmap and mprotect. Whoever touches what is
not mapped gets a fault, there as here. Mapped granules may hold anything; unmapping loses what they held.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.device.driver import DriverError

GRANULE = 2 << 20


class OutOfMemory(DriverError):
    """There is not so much physical memory left."""


class Reservation(Protocol):
    """A range of addresses, reserved as long as somebody refers to it: its tensor does."""

    @property
    def address(self) -> int: ...

    def tensor(self) -> Tensor:
        """All of it as uint8. Its first granule must be mapped when this is called."""


class VirtualMemory(Protocol):
    """``handles`` stand for a granule of physical memory each. Addresses and sizes are whole granules. Everything
    raises DriverError."""

    @property
    def granule(self) -> int: ...

    def reserve(self, nbytes: int) -> Reservation: ...

    def create(self) -> int:
        """A new handle. Raises OutOfMemory."""

    def destroy(self, handle: int) -> None:
        """Give a granule back that is not mapped."""

    def map(self, address: int, handles: Sequence[int]) -> None:
        """Map granules next to each other. All or nothing."""

    def unmap(self, address: int, count: int) -> None:
        """Unmap so many granules next to each other; they stay with their handles."""

    def free_bytes(self) -> int:
        """Physical memory that nobody has, here or in other programs."""

    def synchronize(self) -> None:
        """Until nothing runs that could touch a range."""


# ── CUDA ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_VIRTUAL_MEMORY_SUPPORTED = 102
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3
_OUT_OF_MEMORY = 2
_uint64, _size, _int = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int


class _Location(ctypes.Structure):
    _fields_ = (("type", _int), ("id", _int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", _int),
        ("handle_types", _int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", _Location), ("flags", _int))


class CudaMemory:
    """Implements ``VirtualMemory`` on a GPU. Needs a current context: torch must have used the device on this thread.

    ``granule``: at least so many bytes, as far as the device's own granularity divides it."""

    def __init__(self, device: torch.device, granule: int = GRANULE) -> None:
        """Raises DriverError where the device has no virtual memory management."""
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"libcuda.so.1 cannot be loaded ({error}); install the NVIDIA driver") from error
        self._declare()
        number = device.index or 0
        self._device = torch.device("cuda", number)
        supported = _int()
        self._call("cuDeviceGetAttribute", ctypes.byref(supported), _VIRTUAL_MEMORY_SUPPORTED, number)
        if not supported.value:
            raise DriverError("the driver has no virtual memory management for this device")
        location = _Location(_ON_DEVICE, number)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        least = _size()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(least), ctypes.byref(self._properties), 0)
        self._granule = -(-granule // least.value) * least.value

    @property
    def granule(self) -> int:
        return self._granule

    def reserve(self, nbytes: int) -> CudaRange:
        address = _uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), nbytes, self._granule, 0, 0)
        return CudaRange(self._cuda, self._device, address.value, nbytes)

    def create(self) -> int:
        handle = _uint64()
        self._call("cuMemCreate", ctypes.byref(handle), self._granule, ctypes.byref(self._properties), 0)
        return handle.value

    def destroy(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, handles: Sequence[int]) -> None:
        done = 0
        try:
            for handle in handles:
                self._call("cuMemMap", address + done * self._granule, self._granule, 0, handle, 0)
                done += 1
            size = len(handles) * self._granule
            self._call("cuMemSetAccess", address, size, ctypes.byref(self._access), 1)
        except DriverError:
            self.unmap(address, done)
            raise

    def unmap(self, address: int, count: int) -> None:
        for number in range(count):  # a call takes what one call has mapped
            self._call("cuMemUnmap", address + number * self._granule, self._granule)

    def free_bytes(self) -> int:
        free, total = _size(), _size()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def _declare(self) -> None:
        cuda, pointer = self._cuda, ctypes.c_void_p
        cuda.cuDeviceGetAttribute.argtypes = (pointer, _int, _int)
        cuda.cuMemGetAllocationGranularity.argtypes = (pointer, pointer, _int)
        cuda.cuMemAddressReserve.argtypes = (pointer, _size, _size, _uint64, _uint64)
        cuda.cuMemAddressFree.argtypes = (_uint64, _size)
        cuda.cuMemCreate.argtypes = (pointer, _size, pointer, _uint64)
        cuda.cuMemRelease.argtypes = (_uint64,)
        cuda.cuMemMap.argtypes = (_uint64, _size, _size, _uint64, _uint64)
        cuda.cuMemSetAccess.argtypes = (_uint64, _size, pointer, _size)
        cuda.cuMemUnmap.argtypes = (_uint64, _size)
        cuda.cuMemGetInfo_v2.argtypes = (pointer, pointer)
        cuda.cuGetErrorName.argtypes = (_int, pointer)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            kind = OutOfMemory if code == _OUT_OF_MEMORY else DriverError
            raise kind(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


class CudaRange:
    """Addresses on a GPU, given back when nobody refers to them any more; nothing may be mapped there then."""

    def __init__(self, cuda: ctypes.CDLL, device: torch.device, address: int, nbytes: int) -> None:
        self.address, self._nbytes, self._device = address, nbytes, device
        weakref.finalize(self, cuda.cuMemAddressFree, address, nbytes).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self._nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def tensor(self) -> Tensor:
        return torch.as_tensor(self, device=self._device)


# ── host ────────────────────────────────────────────────────────────────────────────────────────────────────────────

_NO_RESERVE = 0x4000
"""mmap's MAP_NORESERVE, which Python names since 3.13: what is only reserved is not counted as used."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, _size, _int, _int, _int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
for _name, _more in (("munmap", ()), ("mprotect", (_int,)), ("madvise", (_int,))):
    getattr(_libc, _name).argtypes = (ctypes.c_void_p, _size, *_more)


class HostMemory:
    """Implements ``VirtualMemory`` in host memory, for the CPU engine and for tests: mapped memory is taken from the
    system as it is touched, and given back when it is unmapped.

    ``budget``: bytes there are. ``outside``: of those, what other programs have taken."""

    def __init__(self, budget: int, granule: int = GRANULE) -> None:
        self.budget, self.outside, self._granule = budget, 0, granule
        self.mapped: dict[int, int] = {}
        """The handle at each mapped address."""
        self.unmapped: set[int] = set()
        """The other handles there are."""
        self.ranges: weakref.WeakSet[HostRange] = weakref.WeakSet()
        """Those that somebody still refers to."""
        self._created = 0

    @property
    def granule(self) -> int:
        return self._granule

    def reserve(self, nbytes: int) -> HostRange:
        made = HostRange(nbytes)
        self.ranges.add(made)
        return made

    def create(self) -> int:
        if self.free_bytes() < self._granule:
            raise OutOfMemory(f"{self.free_bytes()} bytes are left of {self.budget}")
        self._created += 1
        self.unmapped.add(self._created)
        return self._created

    def destroy(self, handle: int) -> None:
        if handle not in self.unmapped:
            raise DriverError(f"granule {handle} is mapped, or was destroyed")
        self.unmapped.remove(handle)

    def map(self, address: int, handles: Sequence[int]) -> None:
        where = range(address, address + len(handles) * self._granule, self._granule)
        if not self.unmapped.issuperset(handles) or not self.mapped.keys().isdisjoint(where):
            raise DriverError(f"{len(handles)} granules at {address:#x}: no such granules, or mapped already")
        self._range(address).open(address, len(handles) * self._granule)
        self.mapped.update(zip(where, handles, strict=True))
        self.unmapped.difference_update(handles)

    def unmap(self, address: int, count: int) -> None:
        where = range(address, address + count * self._granule, self._granule)
        if not self.mapped.keys() >= set(where):
            raise DriverError(f"{count} granules at {address:#x} are not mapped")
        self._range(address).shut(address, count * self._granule)
        self.unmapped.update(self.mapped.pop(one) for one in where)

    def free_bytes(self) -> int:
        return max(0, self.budget - self.outside - (len(self.mapped) + len(self.unmapped)) * self._granule)

    def synchronize(self) -> None:
        """Nothing runs beside the caller."""

    def _range(self, address: int) -> HostRange:
        return next(one for one in self.ranges if one.address <= address < one.address + one.nbytes)


class HostRange:
    """Addresses of the host, which fault until they are opened."""

    def __init__(self, nbytes: int) -> None:
        """Raises DriverError."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        address = _libc.mmap(None, nbytes, 0, flags, -1, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            raise DriverError(f"{nbytes} bytes of addresses cannot be reserved: {os.strerror(ctypes.get_errno())}")
        self.address, self.nbytes = int(address), nbytes
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False

    def open(self, address: int, nbytes: int) -> None:
        """Raises OutOfMemory."""
        self._call(_libc.mprotect, address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)

    def shut(self, address: int, nbytes: int) -> None:
        """What is there is lost."""
        self._call(_libc.madvise, address, nbytes, mmap.MADV_DONTNEED)
        self._call(_libc.mprotect, address, nbytes, 0)

    def tensor(self) -> Tensor:
        return torch.frombuffer(_bytes_of(self), dtype=torch.uint8)

    def _call(self, function: Callable[..., int], address: int, nbytes: int, how: int) -> None:
        if function(address, nbytes, how):
            raise OutOfMemory(f"{nbytes} bytes at {address:#x}: {os.strerror(ctypes.get_errno())}")


def _bytes_of(owner: HostRange) -> ctypes.Array[ctypes.c_ubyte]:
    """Refers to its owner."""
    buffer = (ctypes.c_ubyte * owner.nbytes).from_address(owner.address)
    buffer.owner = owner  # type: ignore[attr-defined]
    return buffer
