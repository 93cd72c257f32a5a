"""All harnesses ft can start."""

from __future__ import annotations

from launchers.agents import aider, claude, codex, mini, openclaw, opencode, pi, qwen

HARNESSES = (
    claude.HARNESS,
    codex.HARNESS,
    opencode.HARNESS,
    openclaw.HARNESS,
    pi.HARNESS,
    qwen.HARNESS,
    aider.HARNESS,
    mini.HARNESS,
)
