"""Claude Code, sent to the local server by its environment alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from launchers.agents.common import (
    LOCAL_KEY,
    Launch,
    LaunchError,
    PlannedFile,
    cloud_variables,
    installed,
    state_directory,
    without_proxy,
)
from launchers.running import AGENT_CONTEXT, RunningServer

TESTED_VERSION = "2.1.332"
PACKAGE = f"@anthropic-ai/claude-code@{TESTED_VERSION}"
NODE_MAJOR = 22
FIRST_REQUEST_TOKENS = 12_000
"""About what Claude Code's tools and instructions take before the first word of the user."""


def plan(
    server: RunningServer,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    program: str = "claude",
    home: Path | None = None,
    keep: Collection[str] = (),
) -> Launch:
    """How to start Claude Code. ``home`` is its configuration directory (default: one of ft's own, since the ``env``
    block of the user's ``settings.json`` would win over what is set here). Reads, and touches nothing."""
    own = state_directory(environ) / "claude"
    recipe = {**variables(server), **without_proxy(environ, server), "CLAUDE_CONFIG_DIR": str(home or own)}
    # A new configuration directory would greet the user with a theme picker each time it is made.
    onboarded = PlannedFile(own / ".claude.json", '{"hasCompletedOnboarding": true}\n', keep=True)
    return Launch(
        command=(program, *arguments),
        environment={name: value for name, value in recipe.items() if name not in keep or name not in environ},
        removed=cloud_variables(environ, keep),
        files=() if home else (onboarded,),
        warnings=warnings(server, arguments),
        secrets=(server.api_key,) if server.api_key else (),
    )


def variables(server: RunningServer) -> dict[str, str]:
    sizes = [f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")]
    models = ["ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", *sizes]
    return {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.api_key or LOCAL_KEY,
        "ANTHROPIC_API_KEY": "",
        **dict.fromkeys(models, server.model),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        # It takes unknown models to have a million tokens.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.context_length),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(16384, server.context_length // 4)),
        "API_TIMEOUT_MS": "3000000",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "1800000",
        "API_FORCE_IDLE_TIMEOUT": "0",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "CLAUDE_CODE_DISABLE_FEEDBACK_SURVEY": "1",
    }


def warnings(server: RunningServer, arguments: Sequence[str]) -> tuple[str, ...]:
    if server.context_length >= AGENT_CONTEXT or "--tools" in arguments:
        return ()
    return (
        f"the server's context of {server.context_length} tokens is too short for Claude Code, whose first request "
        f"takes about {FIRST_REQUEST_TOKENS}: serve a model with a longer one (ft serve --model DIR), or use fewer "
        "tools: ft launch claude -- --tools Bash,Read,Edit,Write",
    )


def node_warning(program: str, environ: Mapping[str, str]) -> str | None:
    """Under an old Node, npm silently installs an old Claude Code; say so where that is the Node of this shell."""
    major = node_major(environ)
    if major is None or major >= NODE_MAJOR or shutil.which(program, path=environ.get("PATH")) is None:
        return None
    return (
        f"this shell's Node is {major}, under which npm installs an old release of Claude Code. If `{program} "
        f"--version` is below {TESTED_VERSION}: npm install -g node@{NODE_MAJOR} && npm install -g {PACKAGE}"
    )


def check_installed(program: str, environ: Mapping[str, str]) -> None:
    """Raises LaunchError with the commands that install it."""
    if installed(program, environ):
        return
    major = node_major(environ)
    node = "" if major is not None and major >= NODE_MAJOR else f"npm install -g node@{NODE_MAJOR} && "
    reason = "Node was not found" if major is None else f"Node {major} is too old, {NODE_MAJOR} is needed"
    raise LaunchError(
        f"{program} is not installed{f' ({reason})' if node else ''}. Install it with: {node}npm install -g {PACKAGE}"
    )


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
