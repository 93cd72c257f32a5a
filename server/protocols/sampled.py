"""What OpenAI's Chat Completions and Completions ask for alike: how tokens are drawn, and how the answer is sent."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from server.answers import Options
from server.protocols.base import MOST_CHOICES, StopStrings, Wire, invalid

_MAX_BIASES = 1024
_TOKEN_ID = re.compile("[0-9]{1,10}", re.ASCII)


def _strings(value: object) -> object:
    """A string is short for a list of one."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _few(value: object) -> object:
    """Counts the entries before they are checked: pydantic would report every wrong one."""
    if isinstance(value, dict) and len(value) > _MAX_BIASES:
        raise ValueError(f"at most {_MAX_BIASES} tokens may have a bias")
    return value


class _StreamOptions(Wire):
    include_usage: bool = False


class SampledRequest(Wire):
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stop: Annotated[StopStrings, BeforeValidator(_strings)] = Field(default_factory=list)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    seed: int | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few)] | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def session_hint(self) -> str:
        return self.prompt_cache_key or self.session_id or ""

    def sampling(self) -> Options:
        """Only what these fields say. Raises ApiError."""
        return Options(
            stop=tuple(self.stop),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            logit_bias=self._biases(),
            n=self.n or 1,
        )

    def _biases(self) -> tuple[tuple[int, float], ...]:
        out = []
        for token, bias in (self.logit_bias or {}).items():
            if not _TOKEN_ID.fullmatch(token) or not -100 <= bias <= 100:
                raise invalid("logit_bias maps token ids to numbers between -100 and 100", "logit_bias")
            out.append((int(token), bias))
        return tuple(out)
