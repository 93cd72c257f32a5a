"""What a running server holds outside its own memory: its port, its lock, its ready file."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sessions.store.words import why

EXIT_REFUSED = 2
"""Something in the request to serve is wrong; the same command will fail again."""
EXIT_GAVE_UP = 1
"""The server could not go on."""

MAX_SOCKET_PATH = 107
"""Bytes in the path of a unix socket on Linux."""


class ServeError(Exception):
    """Why there is no server, in one line that also says what to do."""

    def __init__(self, message: str, code: int = EXIT_REFUSED) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Claim:
    """A bound port that is ours, and the path of the socket between this server and its worker."""

    listener: socket.socket
    host: str
    port: int
    worker_socket: Path
    scheme: str = "http"

    @property
    def url(self) -> str:
        """Where programs of this machine reach the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{self.scheme}://[{host}]:{self.port}" if ":" in host else f"{self.scheme}://{host}:{self.port}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def runtime_root() -> Path:
    """ft's folder in the user's runtime directory (the XDG rule), else a private one beside other temporary files."""
    configured = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    return configured / "ft" if configured.is_absolute() else Path(tempfile.gettempdir()) / f"ft-{os.getuid()}"


@contextmanager
def claim_port(host: str, port: int, root: Path, scheme: str = "http") -> Iterator[Claim]:
    """Holds ``host:port`` (bound, not listening: until the model is loaded clients are refused at once) and the lock
    that says so to other servers. Raises ServeError."""
    listener = _bind(host, port, root)
    with listener:
        port = int(listener.getsockname()[1])
        worker_socket = _private(root) / f"{port}.sock"
        if len(os.fsencode(worker_socket)) > MAX_SOCKET_PATH:
            raise ServeError(f"{root} is too long a path for a socket: name a shorter --runtime-dir")
        with _alone(root):
            _sweep(root)
            lock = _lock(root, port)
        try:
            yield Claim(listener, host, port, worker_socket, scheme)
        finally:
            worker_socket.unlink(missing_ok=True)
            _lock_path(root, port).unlink(missing_ok=True)
            os.close(lock)


def in_use(host: str, port: int) -> ServeError:
    return ServeError(
        f"port {port} of {host} is in use by another program: stop it, or choose another port with --port "
        "(--port 0 takes a free one)"
    )


def clear_ready_file(path: Path) -> None:
    """A server that was killed may have left it. Raises ServeError, before a model is loaded, where none can be."""
    try:
        path.unlink(missing_ok=True)
        partial = _partial(path)
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def write_ready_file(path: Path, url: str, worker_pid: int) -> None:
    """Atomically: whoever sees the file sees all of it. Raises ServeError."""
    text = json.dumps({"url": url, "pid": os.getpid(), "worker_pid": worker_pid}) + "\n"
    partial = _partial(path)
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _unwritable(path: Path, error: OSError) -> ServeError:
    return ServeError(f"cannot write {path} ({why(error)}): name another --ready-file")


def _bind(host: str, port: int, root: Path) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServeError(f"{host} is no address of this machine ({why(error)}): name another --host") from error
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            holder = _holder(root, port)
            raise (_second_server(port, holder) if holder else in_use(host, port)) from error
        if error.errno == errno.EACCES:
            raise ServeError(f"port {port} needs more rights than we have: choose one above 1023") from error
        raise ServeError(f"cannot listen on {host}:{port} ({why(error)}): name another --host") from error
    return listener


def _private(folder: Path) -> Path:
    """Makes a folder that only we can enter; one that others made or may enter is refused."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True, parents=True)
        status = folder.lstat()
    except OSError as error:
        raise ServeError(f"cannot use {folder} ({why(error)}): name another --runtime-dir") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ServeError(f"{folder} is not ours alone: chmod 700 it, remove it, or name another --runtime-dir")
    return folder


def _lock_path(root: Path, port: int) -> Path:
    return root / f"{port}.lock"


def _lock(root: Path, port: int) -> int:
    """The descriptor that holds the lock. Its file is removed on release, so the one we locked may be gone already."""
    path = _lock_path(root, port)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise _second_server(port, _holder(root, port)) from error
        if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            return descriptor
        os.close(descriptor)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Keeps out other servers that start at the same time: looking at a lock takes it for a moment."""
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(root: Path) -> None:
    """Removes what servers that were killed left behind: locks that nobody holds, and their sockets."""
    for path in root.glob("*.lock"):
        try:
            with path.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.with_suffix(".sock").unlink(missing_ok=True)
                path.unlink()
        except OSError:  # somebody holds it, or has just removed it
            continue


def _holder(root: Path, port: int) -> str:
    """The process id of the server that holds this port's lock; "" when there is none."""
    try:
        with _lock_path(root, port).open("r+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read() or "?"
    except OSError:
        pass
    return ""


def _second_server(port: int, holder: str) -> ServeError:
    return ServeError(
        f"another ft serve (process {holder or '?'}) has port {port}: use it, stop it with `kill {holder or 'PID'}`, "
        "or choose another port with --port"
    )
