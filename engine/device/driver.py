"""What the engine asks of the CUDA driver beyond torch: mapped host memory, and stream memory operations.

Called through libcuda itself: torch has no binding for these, and they can be captured into a CUDA graph. A driver
without 64-bit memory operations (found by trying) is served by host functions that do the same, three times slower.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

_PORTABLE, _DEVICE_MAP = 1, 2
_WRITE_DEFAULT, _WAIT_EQUAL = 0, 1

_pointer, _uint64, _uint32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32


class DriverError(RuntimeError):
    """The driver refused, or the other side never answered; the text says what."""


class Driver(Protocol):
    """``stream`` is a CUDA stream's handle; pointers are device pointers into registered memory."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory and map it for the device; both must be multiples of the page size. -> device pointer."""

    def unregister(self, address: int) -> None:
        """Undo ``register``; nothing on the device may use the memory any more."""

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        """Bring bytes to the device, from an address in registered memory, by its copy engine; does not wait. They must
        have been registered at once."""

    def write64(self, stream: int, pointer: int, value: int) -> None:
        """Store a word when the stream gets there; what the stream wrote before is visible first."""

    def wait64(self, stream: int, pointer: int, value: int) -> None:
        """Hold the stream until the word equals ``value``."""

    def launch_host(self, stream: int, function: int, argument: int) -> None:
        """Call a C function ``void f(void*)`` on a thread of the driver's; it must not call CUDA."""


class _Cell(ctypes.Structure):
    """The argument of the host functions in host_functions.cpp."""

    _fields_ = (("address", _uint64), ("value", _uint64))


class CudaDriver:
    """Implements ``Driver`` on libcuda. Needs a current context: torch must have used the device on this thread.

    ``library``: the native library, whose host functions stand in where memory operations are missing.
    ``memory_operations``: False takes host functions in any case, for comparison.
    """

    def __init__(self, library: ctypes.CDLL, memory_operations: bool = True) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"libcuda.so.1 cannot be loaded ({error}); install the NVIDIA driver") from error
        self._declare()
        self._store = ctypes.cast(library.ft_host_store, _pointer).value or 0
        self._wait = ctypes.cast(library.ft_host_wait, _pointer).value or 0
        self._mapped: dict[int, tuple[int, int]] = {}
        # Graphs replay host functions with the same arguments, so these live as long as the driver.
        self._cells: list[_Cell] = []
        self.memory_operations = memory_operations and self._probe()

    def _declare(self) -> None:
        cuda = self._cuda
        cuda.cuMemHostRegister_v2.argtypes = (_pointer, ctypes.c_size_t, _uint32)
        cuda.cuMemHostUnregister.argtypes = (_pointer,)
        cuda.cuMemHostGetDevicePointer_v2.argtypes = (ctypes.POINTER(_uint64), _pointer, _uint32)
        cuda.cuMemcpyHtoDAsync_v2.argtypes = (_uint64, _pointer, ctypes.c_size_t, _pointer)
        cuda.cuStreamWriteValue64_v2.argtypes = (_pointer, _uint64, _uint64, _uint32)
        cuda.cuStreamWaitValue64_v2.argtypes = (_pointer, _uint64, _uint64, _uint32)
        cuda.cuStreamSynchronize.argtypes = (_pointer,)
        cuda.cuLaunchHostFunc.argtypes = (_pointer, _pointer, _pointer)
        cuda.cuGetErrorName.argtypes = (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))

    def register(self, address: int, nbytes: int) -> int:
        self._call("cuMemHostRegister_v2", address, nbytes, _PORTABLE | _DEVICE_MAP)
        pointer = _uint64()
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(pointer), address, 0)
        self._mapped[address] = (pointer.value, nbytes)
        return pointer.value

    def unregister(self, address: int) -> None:
        del self._mapped[address]
        self._call("cuMemHostUnregister", address)

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", target, source, nbytes, stream)

    def write64(self, stream: int, pointer: int, value: int) -> None:
        if self.memory_operations:
            self._call("cuStreamWriteValue64_v2", stream, pointer, value, _WRITE_DEFAULT)
        else:
            self._launch(stream, self._store, pointer, value)

    def wait64(self, stream: int, pointer: int, value: int) -> None:
        if self.memory_operations:
            self._call("cuStreamWaitValue64_v2", stream, pointer, value, _WAIT_EQUAL)
        else:
            self._launch(stream, self._wait, pointer, value)

    def launch_host(self, stream: int, function: int, argument: int) -> None:
        self._call("cuLaunchHostFunc", stream, function, argument)

    def _launch(self, stream: int, function: int, pointer: int, value: int) -> None:
        cell = _Cell(self._host_address(pointer), value)
        self._cells.append(cell)
        self.launch_host(stream, function, ctypes.addressof(cell))

    def _host_address(self, pointer: int) -> int:
        for address, (start, nbytes) in self._mapped.items():
            if start <= pointer < start + nbytes:
                return address + pointer - start
        raise DriverError(f"{pointer:#x} is not in registered memory")

    def _probe(self) -> bool:
        """Whether memory operations work: they may be missing, or refused in a virtual machine."""
        memory = ctypes.create_string_buffer(2 * 4096)
        address = -(-ctypes.addressof(memory) // 4096) * 4096
        pointer = self.register(address, 4096)
        try:
            self._call("cuStreamWriteValue64_v2", None, pointer, 7, _WRITE_DEFAULT)
            self._call("cuStreamWaitValue64_v2", None, pointer, 7, _WAIT_EQUAL)
            self._call("cuStreamSynchronize", None)
        except DriverError:
            return False
        finally:
            self.unregister(address)
        return True

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")
