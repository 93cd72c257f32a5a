"""The walls between the rooms: who may import whom, and what may not be in the tree at all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("server", "sessions", "parsers", "engine", "launchers")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

WORKER_ONLY = ("torch", "triton", "xgrammar")
"""Modules that only worker processes may import: a fault in them must never take the API down."""

TORCH_FREE_ENGINE = {"engine.api", "engine.client", "engine.messages", "engine.refusal"}
"""And the room of remote engines."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TORCH_FREE = [
    name
    for name in map(module_name, SOURCES)
    if not name.startswith("engine") or name in TORCH_FREE_ENGINE or name.startswith("engine.remote")
]


def tracked() -> list[Path]:
    """Files under version control."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_the_torch_free_half_never_imports_torch(tmp_path: Path) -> None:
    """Every module is imported in one process in which importing torch, triton or xgrammar raises."""
    for name in WORKER_ONLY:
        (tmp_path / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported in the torch-free half')\n")
    script = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *TORCH_FREE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_sentinel_bites(tmp_path: Path) -> None:
    """The planted module shadows an installed torch; otherwise the test above would prove nothing."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('planted')\n")
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import torch"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "planted" in done.stderr


def test_import_contracts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_file_is_two_rooms() -> None:
    sources = [*SOURCES, *(path for suffix in ("cpp", "h") for path in (ROOT / "engine").rglob(f"*.{suffix}"))]
    long = {str(path.relative_to(ROOT)): n for path in sources if (n := len(path.read_text().splitlines())) > 500}
    assert not long


def test_package_init_files_are_empty() -> None:
    inits = [path for path in SOURCES if path.name == "__init__.py"]
    assert {path.parent for path in SOURCES} == {path.parent for path in inits}, "a folder without __init__.py"
    assert not [str(path.relative_to(ROOT)) for path in inits if path.read_text().strip()]


def test_nothing_of_one_machine_is_in_the_tree() -> None:
    """No home or work directory of whoever wrote it, and no package registry's host: users have their own."""
    machine = re.compile(r"(?<![\w.{$])/(?:root|work|farm)/\w|/home/(?!(?:me|user)\b)\w+/")
    registry = re.compile(r"\b(?:pypi|npmjs|pythonhosted|deb\.debian|download\.pytorch)\.(?:org|com)\b")
    found = []
    for path in tracked():
        if path == Path(__file__) or path.suffix in (".safetensors", ".gguf"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if machine.search(line) or registry.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found


def test_no_source_names_a_family_outside_its_room() -> None:
    """Which wire format a model speaks is data in parsers/families: nothing else branches on a family's name."""
    families = {path.stem for path in (ROOT / "parsers" / "families").glob("*.py")} - {"__init__"}
    branch = re.compile(rf"[=!]=\s*[\"'](?:{'|'.join(map(re.escape, sorted(families)))})[\"']")
    outside = [path for path in SOURCES if "parsers" not in path.relative_to(ROOT).parts]
    assert not [str(path.relative_to(ROOT)) for path in outside if branch.search(path.read_text())]
