"""What starting a harness does, as a value: it is shown by ``--dry-run`` and carried out by nothing else."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from launchers.running import RunningServer

LOCAL_KEY = "ft-local"
"""Sent where the server wants no key but the harness insists on one."""

CLOUD_PREFIXES = (
    "ANTHROPIC_",
    "AWS_",
    "AZURE_",
    "BEDROCK_",
    "CLAUDE_",
    "CLOUD_ML_",
    "CODEX_",
    "GCLOUD_",
    "GEMINI_",
    "GOOGLE_",
    "OPENAI_",
    "VERTEX_",
)
CLOUD_NAMES = ("CLAUDECODE",)
"""Inherited variables that would send the harness elsewhere, or hand it keys it has no use for."""


class LaunchError(Exception):
    """A harness cannot be started; the message says why and what to do next."""


@dataclass(frozen=True)
class PlannedFile:
    """A file of ft's own to write. With ``keep`` one that exists is left as it is."""

    path: Path
    text: str
    keep: bool = False


@dataclass(frozen=True)
class Launch:
    """``command`` is the whole argv, program first; ``environment`` and ``removed`` change the inherited one."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    removed: tuple[str, ...]
    files: tuple[PlannedFile, ...] = ()
    warnings: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()


def state_directory(environ: Mapping[str, str]) -> Path:
    """ft's folder in the user's state directory (the XDG rule: a relative value counts as unset)."""
    configured = Path(environ.get("XDG_STATE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".local" / "state") / "ft"


def cloud_variables(environ: Mapping[str, str], keep: Collection[str]) -> tuple[str, ...]:
    found = (name for name in environ if name.startswith(CLOUD_PREFIXES) or name in CLOUD_NAMES)
    return tuple(sorted(name for name in found if name not in keep))


def installed(program: str, environ: Mapping[str, str]) -> bool:
    """Whether ``program`` can be run. Raises LaunchError for a path that cannot: installing anything would not help."""
    if shutil.which(program, path=environ.get("PATH")) is not None:
        return True
    if "/" in program:
        raise LaunchError(f"{program} is no program that can be run: name another with --program, or leave it out")
    return False


def without_proxy(environ: Mapping[str, str], server: RunningServer) -> dict[str, str]:
    """``NO_PROXY`` in both spellings, with the server's host added to what is there."""
    named = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    hosts = [host for host in named.split(",") if host]
    hosts += [host for host in dict.fromkeys(("127.0.0.1", "localhost", server.host)) if host not in hosts]
    return dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(hosts))


def child_environment(launch: Launch, inherited: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in inherited.items() if name not in launch.removed}
    return {**kept, **launch.environment}


def describe(launch: Launch, inherited: Mapping[str, str]) -> str:
    """What ``start`` would do, for people. Values of removed variables and keys are not shown."""
    lines = [f"set     {name}={hide(value, launch.secrets)}" for name, value in sorted(launch.environment.items())]
    lines += [f"remove  {name}" for name in launch.removed if name in inherited and name not in launch.environment]
    for file in launch.files:
        if file.keep and file.path.exists():
            lines.append(f"keep    {file.path}")
            continue
        lines.append(f"write   {file.path}")
        lines += [f"        | {line}" for line in file.text.splitlines()]
    lines.append(f"run     {shlex.join(launch.command)}")
    if shutil.which(launch.command[0]) is None:
        lines.append(f"        ({launch.command[0]} is not installed)")
    return "\n".join(lines)


def hide(value: str, secrets: Collection[str]) -> str:
    return "(the key in --api-key-file)" if value in secrets else value


def start(launch: Launch, inherited: Mapping[str, str]) -> NoReturn:
    """Write the files and become the harness, so that signals and the exit code are its own."""
    for file in launch.files:
        if not (file.keep and file.path.exists()):
            write_private(file.path, file.text)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(launch.command[0], launch.command, child_environment(launch, inherited))  # noqa: S606 (no shell wanted)


def write_private(path: Path, text: str) -> None:
    """Replace a file at once, readable by its owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.chmod(0o600)
    partial.replace(path)
