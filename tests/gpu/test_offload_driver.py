"""The stand-in for the CUDA driver, and the host functions that replace its memory operations."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator

import pytest

from engine.device.driver import CudaDriver, DriverError
from engine.device.fake import FakeDriver
from engine.native.library import find_library, load_library


@pytest.fixture
def page() -> Iterator[int]:
    """The address of one page of memory."""
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    word = ctypes.c_uint64.from_buffer(memory)
    yield ctypes.addressof(word)
    del word
    memory.close()


def test_words_are_written_and_waited_for(page: int) -> None:
    driver = FakeDriver()
    pointer = driver.register(page, mmap.PAGESIZE)
    driver.write64(0, pointer + 64, 5)
    driver.wait64(0, pointer + 64, 5)
    later = threading.Timer(0.05, driver.write64, (0, pointer, 1))
    later.start()
    driver.wait64(0, pointer, 1)
    later.join()
    driver.unregister(page)
    with pytest.raises(DriverError, match="no word of registered memory"):
        driver.write64(0, pointer, 1)


def test_a_wait_that_nobody_answers_ends(page: int) -> None:
    driver = FakeDriver(patience=0.05)
    driver.register(page, mmap.PAGESIZE)
    with pytest.raises(DriverError, match="waits for 1 and has 0"):
        driver.wait64(0, page, 1)


@pytest.mark.parametrize(("offset", "size"), [(8, 4096), (0, 100), (0, 0)])
def test_only_whole_pages_are_registered(page: int, offset: int, size: int) -> None:
    with pytest.raises(DriverError, match="not whole pages"):
        FakeDriver().register(page + offset, size)


def test_memory_is_registered_once_and_unregistered_once(page: int) -> None:
    driver = FakeDriver()
    driver.register(page, mmap.PAGESIZE)
    with pytest.raises(DriverError, match="registered already"):
        driver.register(page, mmap.PAGESIZE)
    driver.unregister(page)
    with pytest.raises(DriverError, match="not registered"):
        driver.unregister(page)


def test_host_functions_store_and_wait(page: int) -> None:
    library, driver = load_library(find_library()), FakeDriver()
    store, wait = (ctypes.cast(each, ctypes.c_void_p).value for each in (library.ft_host_store, library.ft_host_wait))
    assert store and wait
    cell = (ctypes.c_uint64 * 2)(page, 9)
    waiting = threading.Thread(target=driver.launch_host, args=(0, wait, ctypes.addressof(cell)))
    waiting.start()
    driver.launch_host(0, store, ctypes.addressof(cell))
    waiting.join(30.0)
    assert not waiting.is_alive()
    assert ctypes.c_uint64.from_address(page).value == 9


def test_a_machine_without_a_gpu_says_so() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        with pytest.raises(DriverError, match="install the NVIDIA driver"):
            CudaDriver(load_library(find_library()))
