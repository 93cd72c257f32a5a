"""What the API process needs to know, fixed at its start."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from server.keys import ApiKey

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


class ServerSettings(BaseModel):
    """One frozen value, built once by whoever starts the server.

    ``context_length`` 0: the worker's own. ``max_output_tokens`` 0: whatever the context leaves; larger wishes of
    clients are cut to it. ``default_output_tokens`` is for requests that name no limit, where the model has one (0:
    none). A body must have come after ``body_seconds``, and a second more for each 16 KiB of it. ``api_keys`` empty: no
    authentication; each has a cache and sessions of its own unless ``share_cache``. At most ``key_running`` requests of
    one key are answered at once (0: any number), ``key_waiting`` more wait, for at most ``key_wait_seconds``.
    ``allowed_hosts``: names accepted in the ``Host`` and ``Origin`` headers, without port; empty: any (only sensible
    together with API keys). ``admission_seconds`` is how long the response headers wait for the engine's plan,
    ``worker_seconds`` how long a request waits for a worker that is being started; a worker without progress for
    ``stalled_seconds`` is told to be stalled. ``idle_prefill``: compute ahead what the user's next message is expected
    to continue, once nothing was asked for ``idle_seconds``. ``store``: where the store is, if there is one. The
    sampling fields are the model's generation defaults, for what a request leaves open.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_name: str = "local-moe"
    model_aliases: tuple[str, ...] = ()
    context_length: int = Field(default=0, ge=0)
    max_output_tokens: int = Field(default=0, ge=0)
    default_output_tokens: int = Field(default=0, ge=0)
    keepalive_seconds: float = Field(default=15.0, gt=0, le=15.0)
    admission_seconds: float = Field(default=10.0, ge=0)
    worker_seconds: float = Field(default=30.0, ge=0)
    send_seconds: float = Field(default=120.0, gt=0)
    stalled_seconds: float = Field(default=20.0, gt=0)
    max_body_bytes: int = Field(default=32 << 20, gt=0)
    body_seconds: float = Field(default=30.0, gt=0)
    api_keys: tuple[ApiKey, ...] = ()
    share_cache: bool = False
    key_running: int = Field(default=0, ge=0)
    key_waiting: int = Field(default=16, ge=0)
    key_wait_seconds: float = Field(default=60.0, gt=0)
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS
    idle_prefill: bool = True
    idle_seconds: float = Field(default=0.5, gt=0)
    store: Path | None = None

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = Field(default=1.0, gt=0)

    @property
    def models(self) -> tuple[str, ...]:
        """Every model name a request may use; the first is the canonical one."""
        return (self.model_name, f"{self.model_name}-small", *self.model_aliases)
