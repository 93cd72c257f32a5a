"""The identity of what makes cached state valid: content, never paths, ports, context or memory sizes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.weights.shards import Shards

ARITHMETIC = 2
"""Raised whenever any operation's result may change in a bit."""

_WHOLE = 64 << 20
_SAMPLE = 1 << 20
_SAMPLES = 16
_NOT_CONTENT = {"_name_or_path", "transformers_version"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_OTHER_TOKENIZER_FILES = ("tekken.json", "tiktoken.model")


def fingerprint(
    directory: Path, shards: Shards, config: Mapping[str, Any], dtype: str, kernels: str, instruction_set: str
) -> str:
    """64 hex digits over weights (headers, sizes, content; files above 64 MiB by 16 samples of 1 MiB), config,
    tokenizer, dtype, kernels and instruction set."""
    digest = hashlib.sha256()

    def add(label: str, data: bytes) -> None:
        digest.update(f"{label}:{len(data)}:".encode())
        digest.update(data)

    add("arithmetic", f"{ARITHMETIC}/{dtype}/{kernels}/{instruction_set}".encode())
    add("config", json.dumps(_content(config), sort_keys=True).encode())
    for name in _TOKENIZER_FILES:
        path = directory / name
        add(name, hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b"")
    for path in (directory / name for name in _OTHER_TOKENIZER_FILES):
        if path.is_file():
            add(path.name, hashlib.sha256(path.read_bytes()).digest())
    for path in shards.files:
        add("header", shards.headers[path])
        add("weights", _sample(path))
    return digest.hexdigest()


def _content(config: Any) -> Any:
    """A configuration without what says where it came from."""
    if not isinstance(config, Mapping):
        return config
    return {key: _content(value) for key, value in config.items() if key not in _NOT_CONTENT}


def _sample(path: Path) -> bytes:
    """Digest of a file's size and content, or of evenly spaced samples of it."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            while block := file.read(_SAMPLE):
                digest.update(block)
        else:
            for i in range(_SAMPLES):
                file.seek((size - _SAMPLE) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE))
    return digest.digest()
