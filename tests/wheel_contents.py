"""Checks what a built wheel holds: the five packages, the native library, and nothing else. Run by `make wheel`."""

from __future__ import annotations

import sys
from zipfile import ZipFile

PACKAGES = {"server", "sessions", "parsers", "engine", "launchers"}


def problems(names: list[str]) -> list[str]:
    """What is wrong with a wheel that holds the files ``names``."""
    tops = {name.split("/")[0] for name in names}
    info = {top for top in tops if top.endswith(".dist-info")}
    found = [f"unexpected at the top: {top}" for top in sorted(tops - PACKAGES - info)]
    found += [f"package missing: {package}" for package in sorted(PACKAGES - tops)]
    found += [f"source of the native library: {name}" for name in names if name.endswith((".cpp", ".h"))]
    if not any(name.startswith("engine/native/_native") for name in names):
        found.append("the native library is missing")
    return found


def main(wheel: str) -> int:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    found = problems(names)
    print("\n".join(found) if found else f"{wheel}: {len(names)} files, the five packages only")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
