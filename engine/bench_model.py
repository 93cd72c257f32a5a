"""Times a real checkpoint through the real scheduler."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from engine.api import EngineConfig, Failed, Request, Sampling, Tokens
from engine.bench_stack import Cost
from engine.loading import CHUNK
from engine.models.fields import read_config
from engine.models.model import Progress
from engine.scheduler import Scheduler
from engine.weights.shards import Shards

_SKIPPED = ("embed_tokens", "visual", "mtp.")
"""Parts that a token of text does not read, but for one row of the embedding."""


class ModelRun:
    """One sequence at a time, greedy, over random prompts."""

    def __init__(self, config: EngineConfig, tell: Progress) -> None:
        """Raises engine.weights.errors.CheckpointError."""
        self._scheduler = Scheduler.load(config, tell)
        self._random = torch.Generator().manual_seed(3)
        self._chunk = config.chunk_tokens or CHUNK
        self._active, self._stored = count_parameters(Path(config.model))
        self._itemsize = 2 if self._scheduler.info.dtype == "bfloat16" else 4

    def decode_cost(self) -> Cost:
        """Of one token, weights only."""
        return Cost(self._active * self._itemsize, 2 * self._active)

    def prefill_cost(self, tokens: int) -> Cost:
        """Of a prompt, weights only: every chunk reads all experts, as all but short ones do."""
        chunks = -(-tokens // self._chunk)
        return Cost(chunks * self._stored * self._itemsize, 2 * tokens * self._active)

    def prefill(self, tokens: int) -> float:
        """Seconds from a fresh prompt to its first sampled token."""
        self._submit(tokens, 1)
        start = time.perf_counter()
        self._until_token()
        return time.perf_counter() - start

    def decode(self, context: int, steps: int) -> list[float]:
        """Seconds of each of ``steps`` decode steps after ``context`` tokens."""
        self._submit(context, steps + 1)
        self._until_token()
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            self._until_token()
            seconds.append(time.perf_counter() - start)
        return seconds

    def _submit(self, tokens: int, wanted: int) -> None:
        while not self._scheduler.idle:
            self._scheduler.step()
        prompt = torch.randint(self._scheduler.info.vocab_size, (max(1, tokens),), generator=self._random)
        sampling = Sampling(max_tokens=wanted, temperature=0.0)
        self._scheduler.submit(Request("bench", tuple(prompt.tolist()), sampling))

    def _until_token(self) -> None:
        while True:
            for reply in self._scheduler.step():
                if isinstance(reply, Failed):
                    raise ValueError(reply.message)
                if isinstance(reply, Tokens):
                    return


def count_parameters(directory: Path) -> tuple[int, int]:
    """Weights that one token of text is multiplied with (of the routed experts the chosen share), and all of them."""
    config = read_config(directory)
    fields = config.get("text_config", config)
    share = fields["num_experts_per_tok"] / (fields.get("num_experts") or fields["num_local_experts"])
    active, stored, embedding, head = 0.0, 0, 0, False
    for name, entry in Shards(directory).entries.items():
        size = torch.Size(entry.shape).numel()
        embedding = size if "embed_tokens" in name else embedding
        head = head or "lm_head" in name
        if not any(part in name for part in _SKIPPED):
            active += size * (share if ".experts." in name else 1)
            stored += size
    tied = 0 if head else embedding
    return round(active) + tied, stored + tied
