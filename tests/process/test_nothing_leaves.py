"""Nothing of ours asks for an address outside this machine: Python's own sockets are watched in every process, a proxy
counts who would use it, and where the system gives us a network of our own, its kernel counts everybody else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.process.support import ROOT, child_environment

HERE = Path(__file__).parent
OWN_NETWORK = ("unshare", "--map-root-user", "--net")


def own_network() -> tuple[str, ...]:
    """The command that gives one; none where the system does not let us."""
    try:
        given = subprocess.run([*OWN_NETWORK, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        given = False
    return OWN_NETWORK if given else ()


def alone(folder: Path, what: str, *, watched: bool = True) -> dict[str, Any]:
    network = own_network()
    paths = [str(HERE / "sentinel")] if watched else []
    environment = {
        **child_environment(),
        "PYTHONPATH": ":".join([*paths, str(ROOT)]),
        "FT_SENTINEL": str(folder / "sentinel.log"),
        "FT_OWN_NETWORK": "1" if network else "0",
        "XDG_RUNTIME_DIR": str(folder / "run"),
        "HOME": str(folder / "home"),
        "XDG_STATE_HOME": str(folder / "state"),
    }
    for name in ("run", "home"):
        (folder / name).mkdir(mode=0o700)
    done = subprocess.run(
        [*network, sys.executable, "-P", str(HERE / "alone.py"), str(folder), what],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_serving_commands_and_clients_stay_here(tiny: Path, short_dir: Path) -> None:
    (short_dir / "tiny").symlink_to(tiny)
    found = alone(short_dir, "use")
    assert found["asked"] == []
    assert found["proxy"] == 0
    assert found["kernel"] in (None, {"ipv4": 0, "ipv6": 0, "names": 0})


def test_python_s_own_attempts_are_noticed(short_dir: Path) -> None:
    found = alone(short_dir, "sin")
    assert [line.split()[:2] for line in found["asked"]] == [
        ["socket.connect", "192.0.2.1"],
        ["socket.connect", "2001:db8::1"],
    ]


def test_others_attempts_are_noticed(short_dir: Path) -> None:
    """Where there is no network of our own, nobody counts them: that is the hole this leaves."""
    kernel = alone(short_dir, "sin", watched=False)["kernel"]
    assert kernel == ({"ipv4": 1, "ipv6": 1, "names": 0} if own_network() else None)
