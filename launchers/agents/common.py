"""What starting a harness does, as a value: it is shown by ``--dry-run`` and carried out by nothing else."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from launchers.running import RunningServer
from sessions.store.words import why

LOCAL_KEY = "ft-local"
"""Sent where the server wants no key but the harness insists on one."""

CLOUD_PREFIXES = (
    "AIDER_ANTHROPIC_",
    "AIDER_OPENAI_",
    "ANTHROPIC_",
    "AWS_",
    "AZURE_",
    "BEDROCK_",
    "CEREBRAS_",
    "CLAUDE_",
    "CLOUD_ML_",
    "CODEX_",
    "COHERE_",
    "DASHSCOPE_",
    "DEEPSEEK_",
    "FIREWORKS_",
    "GCLOUD_",
    "GEMINI_",
    "GOOGLE_",
    "GROQ_",
    "LITELLM_",
    "MISTRAL_",
    "MOONSHOT_",
    "MSWEA_",
    "OPENAI_",
    "OPENCLAW_",
    "OPENCODE_",
    "OPENROUTER_",
    "PI_",
    "QWEN_",
    "TOGETHER_",
    "VERTEX_",
    "XAI_",
    "ZAI_",
)
CLOUD_NAMES = ("AIDER_API_KEY", "AIDER_EDITOR_MODEL", "AIDER_MODEL", "AIDER_WEAK_MODEL", "CLAUDECODE")
"""Inherited variables that would send a harness elsewhere, or hand it keys it has no use for."""


class LaunchError(Exception):
    """A harness cannot be started; the message says why and what to do next."""


@dataclass(frozen=True)
class PlannedFile:
    """A file of ft's own to write. With ``keep`` one that exists is left as it is."""

    path: Path
    text: str
    keep: bool = False


@dataclass(frozen=True)
class PlannedLinks:
    """``folder`` is to show what the user's ``source`` holds, by links, ``without`` the entries of these names."""

    folder: Path
    source: Path
    without: tuple[str, ...]


@dataclass(frozen=True)
class Launch:
    """``command`` is the whole argv, program first; ``environment`` and ``removed`` change the inherited one. Programs
    that the harness leaves running are below ``leftovers``, and nobody else's are."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    removed: tuple[str, ...]
    files: tuple[PlannedFile, ...] = ()
    links: tuple[PlannedLinks, ...] = ()
    warnings: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    leftovers: Path | None = None


def state_directory(environ: Mapping[str, str]) -> Path:
    """ft's folder in the user's state directory (the XDG rule: a relative value counts as unset)."""
    configured = Path(environ.get("XDG_STATE_HOME", ""))
    return (configured if configured.is_absolute() else Path.home() / ".local" / "state") / "ft"


def cloud_variables(environ: Mapping[str, str], keep: Collection[str]) -> tuple[str, ...]:
    found = (name for name in environ if name.startswith(CLOUD_PREFIXES) or name in CLOUD_NAMES)
    return tuple(sorted(name for name in found if name not in keep))


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
    """What starting would do, for people. Values of removed variables and keys are not shown."""
    lines = [f"set     {name}={hide(value, launch.secrets)}" for name, value in sorted(launch.environment.items())]
    lines += [f"remove  {name}" for name in launch.removed if name in inherited and name not in launch.environment]
    for file in launch.files:
        if file.keep and file.path.exists():
            lines.append(f"keep    {file.path}")
            continue
        lines.append(f"write   {file.path}")
        lines += [f"        | {line}" for line in hide(file.text, launch.secrets).splitlines()]
    lines += [f"link    {path} -> {target}" for links in launch.links for path, target in wanted_links(links)]
    lines.append(f"run     {shlex.join(launch.command)}")
    if launch.leftovers:
        lines.append(f"stop    what it leaves running from {launch.leftovers}")
    return "\n".join(lines)


def hide(text: str, secrets: Collection[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, "(the key in --api-key-file)")
    return text


def exports(launch: Launch, inherited: Mapping[str, str], key_file: Path | None) -> str:
    """The environment for a shell to evaluate. A key is not shown: it is read there from where it is kept, the file or
    FT_API_KEYS, as ``KEY`` or ``NAME KEY`` on a line."""
    first = "awk 'NF && $1 !~ /^#/ { print $NF; exit }'"
    kept = f"printf %s \"$FT_API_KEYS\" | tr , '\\n' | {first}"
    if key_file:
        kept = f"{first} {shlex.quote(str(key_file.absolute()))}"
    read = f'"$({kept})"'
    lines = [f"unset {name}" for name in launch.removed if name in inherited and name not in launch.environment]
    for name, value in sorted(launch.environment.items()):
        lines.append(f"export {name}={read if value in launch.secrets else shlex.quote(value)}")
    return "\n".join([*lines, f"# then run: {shlex.join(launch.command)}"])


def prepare(launch: Launch) -> list[Path]:
    """Write the files and make the links; the paths of what was written."""
    written = []
    for file in launch.files:
        if not (file.keep and file.path.exists()):
            write_private(file.path, file.text)
            written.append(file.path)
    for links in launch.links:
        make_links(links)
    return written


def become(launch: Launch, inherited: Mapping[str, str]) -> None:
    """Become the harness, so that signals and the exit code are its own. Does not return.

    Raises LaunchError where there is no such program.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(launch.command[0], launch.command, child_environment(launch, inherited))  # noqa: S606 (no shell)
    except OSError as error:
        raise LaunchError(f"cannot run {launch.command[0]} ({why(error)})") from error


def write_private(path: Path, text: str) -> None:
    """Replace a file at once, readable by its owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.touch(mode=0o600)
    partial.write_text(text, encoding="utf-8")
    partial.chmod(0o600)
    partial.replace(path)


def wanted_links(links: PlannedLinks) -> list[tuple[Path, Path]]:
    """Those that do not exist yet. A file of the same name in ``folder`` is another program's, and stays."""
    try:
        entries = sorted(links.source.iterdir())
    except OSError:
        return []
    pairs = ((links.folder / entry.name, entry) for entry in entries if entry.name not in links.without)
    return [(path, target) for path, target in pairs if not path.exists()]


def make_links(links: PlannedLinks) -> None:
    links.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in links.folder.iterdir():
        if path.is_symlink() and not path.exists():
            path.unlink()  # what it showed is gone
    for path, target in wanted_links(links):
        path.symlink_to(target)
