"""The driver on a machine without a GPU: the same protocol over host memory, and at once instead of on a stream."""

from __future__ import annotations

import ctypes
import time

from engine.device.driver import DriverError

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PAGE = 4096


class FakeDriver:
    """Implements ``engine.device.driver.Driver``. The device sees host memory where it is. A ``wait64`` that is not
    answered in ``patience`` seconds raises DriverError, where a GPU would hang."""

    memory_operations = True

    def __init__(self, patience: float = 30.0) -> None:
        self._patience = patience
        self._registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> int:
        if address % _PAGE or nbytes % _PAGE or nbytes <= 0:
            raise DriverError(f"{nbytes} bytes at {address:#x} are not whole pages")
        if any(address < start + size and start < address + nbytes for start, size in self._registered.items()):
            raise DriverError(f"memory at {address:#x} is registered already")
        self._registered[address] = nbytes
        return address

    def unregister(self, address: int) -> None:
        if self._registered.pop(address, None) is None:
            raise DriverError(f"memory at {address:#x} is not registered")

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        if not any(at <= source and source + nbytes <= at + size for at, size in self._registered.items()):
            raise DriverError(f"{nbytes} bytes at {source:#x} were not registered at once")
        ctypes.memmove(target, source, nbytes)

    def write64(self, stream: int, pointer: int, value: int) -> None:
        self._word(pointer).value = value

    def wait64(self, stream: int, pointer: int, value: int) -> None:
        word, end = self._word(pointer), time.monotonic() + self._patience
        while word.value != value:
            if time.monotonic() > end:
                raise DriverError(f"the stream waits for {value} and has {word.value}, for {self._patience:g} s now")
            time.sleep(0)

    def launch_host(self, stream: int, function: int, argument: int) -> None:
        _HOST_FUNCTION(function)(argument)

    def _word(self, pointer: int) -> ctypes.c_uint64:
        if pointer % 8 or not any(at <= pointer < at + size for at, size in self._registered.items()):
            raise DriverError(f"{pointer:#x} is no word of registered memory")
        return ctypes.c_uint64.from_address(pointer)
