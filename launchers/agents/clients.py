"""Where a harness's program is, whether its Node is new enough, and how it is installed: only when the user says so,
and into a folder of ft's own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launchers.agents.common import LaunchError, state_directory
from launchers.agents.harness import Harness, Package
from sessions.store.words import why

NODE_BINARIES = Path("node_modules", ".bin")


@dataclass(frozen=True)
class Client:
    """A program that can be run: ``command`` is how, ``path`` where it is."""

    command: tuple[str, ...]
    path: Path


def own_folder(harness: Harness, environ: Mapping[str, str]) -> Path:
    """What ``--install`` fills; deleting it undoes that."""
    return state_directory(environ) / "clients" / harness.name


def find(harness: Harness, environ: Mapping[str, str], program: str = "") -> Client | None:
    """``program`` is one the user names; else what ``--install`` installed comes before what is in PATH.

    Raises LaunchError for a path that cannot be run: installing anything would not help.
    """
    own = own_folder(harness, environ)
    for path in (own / NODE_BINARIES / harness.program, own / "bin" / harness.program):
        if not program and os.access(path, os.X_OK):
            node = own / NODE_BINARIES / "node"
            # Not through PATH, where the agent's own commands would find this Node before the user's.
            through_node = is_node_script(path) and node.exists()
            return Client((str(node), str(path)) if through_node else (str(path),), path)
    name = program or harness.program
    found = shutil.which(name, path=environ.get("PATH"))
    if found is None and "/" in name:
        raise LaunchError(f"{name} is no program that can be run: name another with --program, or leave it out")
    return Client((name,), Path(found)) if found else None


def install_commands(harness: Harness, environ: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """What installs the tested version, and a Node for it where this shell's is too old."""
    own, package = own_folder(harness, environ), harness.package
    if package.registry == "pip":
        python = own / "bin" / "python"
        return (sys.executable, "-m", "venv", str(own)), (str(python), "-m", "pip", "install", package.requirement)
    install = ("npm", "install", "--prefix", str(own), "--no-audit", "--no-fund")
    if node_suffices(harness, environ):
        return ((*install, package.requirement),)
    # First the Node: what is installed may refuse to be under an older one.
    path = f"PATH={own / NODE_BINARIES}:{environ.get('PATH', '')}"
    return (*install, f"node@{package.node}"), ("env", path, *install, package.requirement)


def install(harness: Harness, environ: Mapping[str, str]) -> None:
    """Raises LaunchError with the command that failed."""
    own_folder(harness, environ).mkdir(parents=True, exist_ok=True, mode=0o700)
    for command in install_commands(harness, environ):
        print(f"+ {shown(command)}", file=sys.stderr)
        try:
            code = subprocess.run(command, env=dict(environ), stdout=sys.stderr, check=False).returncode
        except OSError as error:
            raise LaunchError(f"cannot run {command[0]} ({why(error)}): {missing_tool(command[0])}") from error
        if code:
            raise LaunchError(f"installing {harness.title} failed with exit code {code}: {shown(command)}")


def is_node_script(path: Path) -> bool:
    """Whether it runs in Node; the others are programs of their own, whoever installed them."""
    try:
        with path.open("rb") as file:
            first = file.readline(256)
    except OSError:
        return False
    return first.startswith(b"#!") and b"node" in first


def missing_tool(program: str) -> str:
    return "npm comes with Node (Debian, Ubuntu: apt install npm)" if program == "npm" else "install it first"


def shown(command: tuple[str, ...]) -> str:
    """Without the whole PATH."""
    return shlex.join(re.sub(r"^(PATH=[^:]*):.*", r"\1:...", part) for part in command)


def how_to_install(harness: Harness, environ: Mapping[str, str]) -> str:
    """For people: what is missing, and the two ways to get it."""
    package = harness.package
    reason = (
        "" if package.registry == "pip" or node_suffices(harness, environ) else f" ({node_problem(package, environ)})"
    )
    by_hand = {
        "npm": f"{f'npm install -g node@{package.node} && ' if reason else ''}npm install -g {package.requirement}",
        "pip": f"pipx install {package.requirement}",
    }[package.registry]
    return (
        f"{harness.program} is not installed{reason}. Let ft install it for itself: ft launch {harness.name} "
        f"--install; or install it with: {by_hand}"
    )


def node_suffices(harness: Harness, environ: Mapping[str, str]) -> bool:
    major = node_major(environ)
    return not harness.package.node or (major is not None and major >= harness.package.node)


def node_problem(package: Package, environ: Mapping[str, str]) -> str:
    major = node_major(environ)
    return "Node was not found" if major is None else f"Node {major} is too old, {package.node} is needed"


def node_major(environ: Mapping[str, str]) -> int | None:
    node = shutil.which("node", path=environ.get("PATH"))
    if node is None:
        return None
    try:
        answer = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.match(r"v(\d+)\.", answer)
    return int(match[1]) if match else None


def check_node(harness: Harness, client: Client, environ: Mapping[str, str]) -> str | None:
    """What to warn of, if anything. Raises LaunchError where the client would fail under this shell's Node."""
    package = harness.package
    own_node = len(client.command) > 1
    if own_node or not package.node or node_suffices(harness, environ):
        return None
    fix = f"npm install -g node@{package.node} && npm install -g {package.requirement}"
    if is_node_script(client.path):
        raise LaunchError(
            f"{harness.title} needs Node {package.node} or newer ({node_problem(package, environ)}): run ft launch "
            f"{harness.name} --install, which installs both for ft alone, or: {fix}"
        )
    major = node_major(environ)
    if major is None:
        return None  # a program of its own, and installed without this shell's Node
    return (
        f"this shell's Node is {major}, under which npm installs an old release of {harness.title}. If "
        f"`{harness.program} --version` is below {package.version}: {fix}"
    )
