"""Errors of reading a checkpoint. Each message says what is wrong and what to do next."""

from __future__ import annotations


class CheckpointError(Exception):
    """The checkpoint cannot be used."""
