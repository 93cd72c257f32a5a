"""``ft serve --engine URL``: a server that computes elsewhere. Read here: the model's folder, without its weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from engine.remote.api import Address, Checkpoint, RemoteError
from engine.remote.client import RemoteClient
from launchers.display import Display
from launchers.runtime import ServeError
from launchers.serve_options import flag_of
from launchers.settings import ENGINE_KEY, ServeSettings
from parsers.conversation import Conversation, Text, Turn
from parsers.load import Family
from sessions.store.words import why

WORKERS = (
    "script",
    "store_quota",
    "store_daily_writes",
    "host_cache",
    "dtype",
    "kernels",
    "instruction_set",
    "threads",
    "kv_bytes",
    "checkpoint_bytes",
    "chunk_tokens",
    "device",
    "experts",
    "expert_format",
    "gpu_bytes",
    "split",
    "attention",
)
"""Settings that only a worker of our own has."""

_SAMPLE = "def f(x):\n    return x + 1234567890  # ünïcode 漢字 🙂\n"
_CONTROLS = 64
"""How many control tokens the sample has, the first by id."""


async def connect(settings: ServeSettings, family: Family, model: Path, display: Display) -> RemoteClient:
    """The remote engine, which has shown that it serves the model in the folder ``model``. Raises ServeError."""
    most = settings.max_sequences + settings.queue
    client = RemoteClient(address(settings), checkpoint(family, model), most, display.note, settings.engine_silence)
    try:
        await client.connect()
    except RemoteError as error:
        await client.close()
        raise ServeError(str(error)) from error
    for name, reason in client.lacks.items():
        display.note(f"{client.title} has no {name.replace('_', ' ')}: {reason}")
    return client


def refuse_others(settings: ServeSettings) -> None:
    """Raises ServeError for settings that would do nothing."""
    if settings.model is None:
        raise ServeError(
            "--engine needs --model DIR: the folder of the model that runs there, for its tokens and template (config, "
            "tokenizer and chat template; no weights)"
        )
    given = [name for name in WORKERS if name in settings.model_fields_set]
    if given:
        flags = ", ".join(map(flag_of, given))
        raise ServeError(f"{flags}: what --engine computes is set where that engine is started; leave it out here")


def address(settings: ServeSettings, environ: Mapping[str, str] = os.environ) -> Address:
    """Raises ServeError; a key is in no message."""
    text = (settings.engine or "").rstrip("/").removesuffix("/v1")
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ServeError(f"--engine: {error}: write http://HOST:PORT") from error
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ServeError(f"--engine {url.copy_with(userinfo=b'')}: write http://HOST:PORT")
    if url.userinfo:
        raise ServeError(f"--engine: a key does not belong in an address: use --engine-key-file FILE, or {ENGINE_KEY}")
    return Address(text, _key(settings.engine_key_file, environ), settings.engine_model)


def _key(path: Path | None, environ: Mapping[str, str]) -> str:
    if path is None:
        return environ.get(ENGINE_KEY, "").strip()
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ServeError(f"cannot read the engine's key in {path} ({why(error)}): check --engine-key-file") from error
    if not key.isascii() or not key.isprintable() or not key:
        raise ServeError(f"{path} holds no API key: put the key, and nothing else, into it")
    return key


def checkpoint(family: Family, model: Path) -> Checkpoint:
    """Raises ServeError for a damaged config.json; the folder may be without one."""
    config = _config(model / "config.json")
    tokenizer = family.tokenizer
    controls = sorted(tokenizer.control, key=lambda text: tokenizer.control[text])
    sample = "".join(controls[:_CONTROLS]) + _SAMPLE
    marks = [tokenizer.control[text] for text in controls if tokenizer.control[text] not in family.stop_tokens]
    mark, end = marks[0], family.stop_tokens[0]
    hello = family.render(Conversation(turns=(Turn("user", (Text("Hello"),)),)))
    return Checkpoint(
        path=str(model),
        architecture=str(config.get("model_type", family.name)),
        vocab_size=max(_number(config, "vocab_size"), tokenizer.vocab_size),
        context_length=_number(config, "max_position_embeddings"),
        sample=sample,
        sample_ids=tuple(tokenizer.encode_trusted(sample)),
        prompt=hello.ids,
        grammar=f'start: r0\nr0: <[{mark}]> r1\nr1: %json {{"const": 7}}\n',
        grammar_ids=(mark, *tokenizer.encode("7"), end),
    )


def _config(path: Path) -> dict[str, Any]:
    """The language model's part of it."""
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ServeError(f"{path} is damaged ({why(error)}): get it again, or remove it") from error
    if not isinstance(config, dict):
        raise ServeError(f"{path} is damaged (no JSON object): get it again, or remove it")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else 0
