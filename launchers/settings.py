"""What ``ft serve`` was asked for: one frozen value, built once from the command line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from engine.api import Attention, EngineConfig, StoreSettings
from engine.remote.api import SILENCE_SECONDS
from server.keys import ApiKey

STORE = StoreSettings(directory="")
"""Its defaults."""
ENGINE_KEY = "FT_ENGINE_KEY"
"""The variable with the key that a remote engine wants."""


class ServeSettings(BaseModel):
    """``model`` None serves the embedded model, kept under ``cache`` (None: the user's cache folder). ``engine``: the
    address of an SGLang or vLLM server that computes, instead of a worker of ours; ``engine_model`` "" asks for its
    first model, the key it wants is in ``engine_key_file``, and an answer of its that has begun and says nothing for
    ``engine_silence`` seconds is given up. ``port`` 0 takes a free one. ``ready_file`` is written once
    requests are answered: JSON with ``url``, ``pid`` and ``worker_pid`` (0 without a worker of ours). ``runtime_dir``
    holds the socket and the lock of a running server (None: the user's runtime folder). ``max_output_tokens`` 0:
    whatever the context leaves. ``worker_silence_seconds``: a worker whose process has not
    answered for so long is replaced. ``store`` None keeps nothing beyond the life of the server; else it is the folder
    of state (the worker's) and sessions (the API process's). ``api_keys`` are those of the start; the file named by
    ``api_key_file`` is read again when it changes. ``key_running`` and ``key_waiting`` are limits of each key (0: none
    for the former). ``allowed_hosts`` are names that clients may use besides this machine's own. The remaining fields
    are those of ``engine.api.EngineConfig`` and of its ``StoreSettings``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path | None = None
    model_name: str = "local-moe"
    family: str | None = None
    engine: str | None = None
    engine_model: str = ""
    engine_key_file: Path | None = None
    engine_silence: float = Field(default=SILENCE_SECONDS, gt=0)
    script: Path | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_keys: tuple[ApiKey, ...] = ()
    api_key_file: Path | None = None
    share_cache: bool = False
    key_running: int = Field(default=0, ge=0)
    key_waiting: int = Field(default=16, ge=0)
    allowed_hosts: tuple[str, ...] = ()
    max_body: int = Field(default=32 << 20, gt=0)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    ready_file: Path | None = None
    cache: Path | None = None
    runtime_dir: Path | None = None
    max_output_tokens: int = Field(default=0, ge=0)
    max_sessions: int = Field(default=1000, gt=0)
    keepalive_seconds: float = Field(default=15.0, gt=0, le=15.0)
    worker_silence_seconds: float = Field(default=30.0, gt=0)
    idle_prefill: bool = True

    store: Path | None = None
    store_quota: int = Field(default=STORE.quota_bytes, gt=0)
    store_daily_writes: int = Field(default=STORE.daily_write_bytes, gt=0)
    store_key_file: Path | None = None
    host_cache: int = Field(default=STORE.host_bytes, gt=0)

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kernels: Literal["native", "reference"] = "native"
    instruction_set: str = "auto"
    threads: int = Field(default=0, ge=0)
    context_length: int = Field(default=0, ge=0)
    kv_bytes: int = Field(default=2 << 30, gt=0)
    checkpoint_bytes: int = Field(default=1 << 30, gt=0)
    max_sequences: int = Field(default=8, gt=0)
    chunk_tokens: int = Field(default=0, ge=0)
    queue: int = Field(default=64, ge=0)
    device: Literal["cpu", "cuda", "auto"] = "auto"
    experts: Literal["auto", "device", "offload", "hybrid", "cpu"] = "auto"
    expert_format: Literal["auto", "bf16", "int8", "mxfp4"] = "auto"
    gpu_bytes: int = Field(default=0, ge=0)
    split: float | None = Field(default=None, ge=0, le=1)
    attention: Attention = ("auto", "auto")

    def worker(self, model: Path) -> EngineConfig:
        """The worker's configuration for the checkpoint in the folder ``model``."""
        shared = self.model_dump(include={field.name for field in fields(EngineConfig)} - {"model", "store"})
        return EngineConfig(model=str(model), store=self._store(), **shared)

    def _store(self) -> StoreSettings | None:
        if self.store is None:
            return None
        return StoreSettings(
            directory=str(self.store.absolute()),
            quota_bytes=self.store_quota,
            host_bytes=self.host_cache,
            daily_write_bytes=self.store_daily_writes,
            key_file="" if self.store_key_file is None else str(self.store_key_file.absolute()),
        )
