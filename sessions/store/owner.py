"""The directory: one owner, private, one sub-directory per namespace, and a check of the key."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64_digest, xxh3_128_digest

from sessions.store.config import StoreBusy, StoreKeyError
from sessions.store.crypt import SALT, Cipher
from sessions.store.files import Files
from sessions.store.format import FORMAT

_LOCK = "owner.lock"
_CHECK = "key.check"
_NAME = "namespace.json"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Owner:
    """Holds the directory's lock until closed. Raises StoreBusy, OSError."""

    def __init__(self, directory: Path, files: Files) -> None:
        files.make_directory(directory)
        directory.chmod(0o700)
        self._descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(self._descriptor, 32, 0)
            os.close(self._descriptor)
            raise StoreBusy(directory, int(text) if text.strip().isdigit() else None) from None
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)
        except OSError:
            pass  # a full disk: the lock holds without the number in it

    def close(self) -> None:
        os.close(self._descriptor)


def check_key(directory: Path, cipher: Cipher | None) -> None:
    """Whether the directory is for this key, or for none. Raises StoreKeyError, OSError."""
    path = directory / _CHECK
    if not path.exists():
        if cipher is None:
            return
        if namespaces(directory):
            raise StoreKeyError(f"{directory} was written without a key: forget it first, or give no key")
        _write_check(path, cipher)
        return
    if cipher is None:
        raise StoreKeyError(f"{directory} is encrypted: its key is needed")
    raw = path.read_bytes()
    salt, check = raw[:SALT], raw[SALT : SALT + 32]
    if xxh3_64_digest(salt + check) != raw[SALT + 32 :]:
        path.unlink()  # damaged: whatever this key does not open is found to be unreadable later
        _write_check(path, cipher)
    elif check != cipher.check(salt):
        raise StoreKeyError(f"{directory} is encrypted with another key")


def _write_check(path: Path, cipher: Cipher) -> None:
    salt = os.urandom(SALT)
    check = salt + cipher.check(salt)
    write_file(path, check + xxh3_64_digest(check))


def boot_id() -> bytes:
    """Changes with every start of the machine; empty where it is not known."""
    try:
        return _BOOT.read_bytes().strip()
    except OSError:
        return b""


def namespace_id(fingerprint: str) -> bytes:
    return xxh3_128_digest(f"{FORMAT}:{fingerprint}".encode())


@dataclass(frozen=True)
class Namespace:
    """What one fingerprint wrote. ``used`` in seconds since the epoch."""

    directory: Path
    fingerprint: str
    used: float

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.directory.rglob("*") if path.is_file())

    @property
    def segments(self) -> int:
        """How many files of payload it has."""
        return len(list(self.directory.glob("*.seg")))


def namespaces(directory: Path) -> list[Namespace]:
    """The longest unused first. Raises OSError."""
    found = []
    for path in directory.iterdir():
        if not path.is_dir():
            continue
        try:
            fingerprint = str(json.loads((path / _NAME).read_bytes())["fingerprint"])
            used = (path / _NAME).stat().st_mtime
        except (OSError, ValueError, KeyError, TypeError):
            fingerprint, used = "", path.stat().st_mtime
        found.append(Namespace(path, fingerprint, used))
    return sorted(found, key=lambda one: one.used)


def enter(directory: Path, fingerprint: str, files: Files) -> Path:
    """The namespace's own directory, marked as used now. Raises OSError."""
    path = directory / namespace_id(fingerprint).hex()
    files.make_directory(path)
    write_file(path / _NAME, json.dumps({"fingerprint": fingerprint, "format": FORMAT}).encode())
    return path


def leave(path: Path) -> None:
    """Mark a namespace as used until now. Raises OSError."""
    now = time.time()
    os.utime(path / _NAME, (now, now))


def forget(namespace: Namespace) -> None:
    """Delete what one fingerprint wrote. Raises OSError."""
    shutil.rmtree(namespace.directory)


def forget_key(directory: Path) -> None:
    """An empty directory may be given any key, or none. Raises OSError."""
    (directory / _CHECK).unlink(missing_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """All of it or nothing. Raises OSError."""
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.rename(path)
