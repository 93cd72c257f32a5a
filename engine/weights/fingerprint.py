"""The identity of what makes cached state valid: content, never paths, ports, context or memory sizes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from xxhash import xxh3_128

from engine.weights.shards import Shards

ARITHMETIC = 3
"""Raised whenever any operation's result may change in a bit."""

_BLOCK = 8 << 20
_READERS = 4
_NOT_CONTENT = {"_name_or_path", "transformers_version"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_OTHER_TOKENIZER_FILES = ("tekken.json", "tiktoken.model")


def fingerprint(
    directory: Path, shards: Shards, config: Mapping[str, Any], dtype: str, kernels: str, instruction_set: str
) -> str:
    """64 hex digits over all bytes of the weights, config, tokenizer, dtype, kernels and instruction set. Takes as
    long as reading the weights once; what is loaded next comes from the page cache where that holds them."""
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
    with ThreadPoolExecutor(_READERS) as pool:
        for path, content in zip(shards.files, pool.map(_whole, shards.files), strict=True):
            add("header", shards.headers[path])
            add("weights", content)
    return digest.hexdigest()


def _content(config: Any) -> Any:
    """A configuration without what says where it came from."""
    if not isinstance(config, Mapping):
        return config
    return {key: _content(value) for key, value in config.items() if key not in _NOT_CONTENT}


def _whole(path: Path) -> bytes:
    """Digest of a file's whole content: one tensor that was edited in place makes other states."""
    digest = xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.digest()
