"""A model whose state is a hash of all tokens before it, so that one wrong, stale or missing component shows at once.

It has what a hybrid has: attention pages of two layers and two recurrent tensors. What it predicts depends on every
page and on every recurrent tensor. ``Truth`` computes the same from the tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.layers.ops import Batch
from engine.models.model import Cache, Manifest

LAYERS, WIDTH = 2, 4
RECURRENT = ((2, 8), (4,))
MASK = (1 << 61) - 1
MIX = (0x9E3779B97F4A7C15 & MASK, 0xC2B2AE3D27D4EB4F & MASK)
DIGITS = (1 << 23) - 1
"""Numbers up to this are exact in float32."""


def mixed(tensor: int, before: int, token: int) -> int:
    """The next value of one recurrent tensor's hash; what is broken stays broken."""
    if before < 0:
        return -1
    value = ((before ^ (token + 1)) * MIX[tensor]) & MASK
    return value ^ (value >> 29)


def spread(value: int, count: int) -> list[float]:
    """``value`` as ``count`` exact float32 numbers, all of them dependent on it; NaN for -1."""
    if value < 0:
        return [math.nan] * count
    parts = [float(value & DIGITS), float(value >> 23 & DIGITS), float(value >> 46)]
    return parts + [float(value % (1009 + at)) for at in range(count - 3)]


def gathered(parts: Sequence[float]) -> int:
    """The value that was spread; -1 if the numbers do not belong together."""
    first, second, third = (int(part) if np.isfinite(part) else -1 for part in parts[:3])
    value = first | second << 23 | third << 46
    return value if min(first, second, third) >= 0 and spread(value, len(parts)) == [float(p) for p in parts] else -1


def entry(layer: int, position: int, token: int) -> list[float]:
    """What a token leaves in a layer's keys [WIDTH]."""
    return spread(mixed(0, (layer + 1) * 1_000_003 + position, token), WIDTH)


def weighed(keys: Tensor) -> int:
    """A number that changes with each of ``keys`` [positions, WIDTH] and with their order; exact, since all sums stay
    below 2**53."""
    weights = torch.arange(1, len(keys) + 1, dtype=torch.float64) % 251 + 1
    return int(keys.double().sum(dim=1) @ weights)


def choice(states: Sequence[int], digests: Sequence[int], vocab: int) -> int:
    value = 1
    for part in (*states, *digests):
        value = mixed(1, value, part & MASK)
    return value % vocab


class HashModel:
    """``extra``: a third recurrent tensor, as a draft model has. ``fed``: tokens in all forwards."""

    def __init__(self, vocab: int, *, extra: bool = False) -> None:
        self.vocab_size = vocab
        recurrent = (*RECURRENT, (6,)) if extra else RECURRENT
        at = tuple(range(1, 1 + len(recurrent)))
        self.manifest = Manifest(LAYERS, 1, WIDTH, recurrent, attention_at=tuple(range(LAYERS)), recurrent_at=at)
        self.fed = 0

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        logits: list[Tensor] = []
        wanted = set(batch.logit_rows.tolist())
        snapshots: dict[tuple[int, int], int] = {(s, k): slot for s, k, slot in batch.snapshots.tolist()}
        tokens = batch.tokens.tolist()
        self.fed += len(tokens)
        for segment, (first, rows, position, slot) in enumerate(batch.segments.tolist()):
            table = batch.page_table[segment].tolist()
            pages = torch.tensor([table[at // 64] for at in range(position, position + rows)])
            places = torch.arange(position, position + rows) % 64
            for layer in range(LAYERS):
                cache.wait(layer)
                keys = np.array([entry(layer, position + row, tokens[first + row]) for row in range(rows)], np.float32)
                cache.keys[layer][pages, places, 0] = torch.from_numpy(keys)
                cache.values[layer][pages, places, 0] = torch.from_numpy(-keys)
            cache.wait(len(cache.states))
            states = self._read(cache, slot)
            for row in range(rows):
                token = tokens[first + row]
                states = [mixed(tensor % 2, before, token) for tensor, before in enumerate(states)]
                if (segment, row + 1) in snapshots:
                    self._write(cache, snapshots[segment, row + 1], states)
                if first + row in wanted:
                    logits.append(self._logits(cache, table, position + row + 1, states))
            self._write(cache, slot, states)
        return torch.stack(logits) if logits else torch.empty(0, self.vocab_size)

    def _read(self, cache: Cache, slot: int) -> list[int]:
        return [gathered(state[slot].flatten().tolist()) for state in cache.states]

    def _write(self, cache: Cache, slot: int, states: Sequence[int]) -> None:
        for state, value in zip(cache.states, states, strict=True):
            state[slot] = torch.tensor(spread(value, state[slot].numel())).reshape(state[slot].shape)

    def _logits(self, cache: Cache, table: Sequence[int], count: int, states: Sequence[int]) -> Tensor:
        pages = torch.tensor(table[: -(-count // 64)])
        digests: list[int] = []
        for layer in range(LAYERS):
            for sign, kept in ((1, cache.keys[layer]), (-1, cache.values[layer])):
                digests.append(sign * weighed(kept[pages].reshape(-1, WIDTH)[:count]))
        row = torch.zeros(self.vocab_size)
        row[choice(states, digests, self.vocab_size)] = 1.0
        return row


class Truth:
    """What a perfect engine predicts after each prefix of some tokens. Remembers the tokens it was asked about last."""

    def __init__(self, vocab: int, tensors: int = len(RECURRENT)) -> None:
        self._vocab = vocab
        self._tokens: list[int] = []
        self._states: list[list[int]] = [[0] * tensors]
        self._sums: list[list[int]] = [[0] * LAYERS]

    def after(self, tokens: Sequence[int], positions: Iterable[int]) -> dict[int, int]:
        """The prediction after the first ``position`` tokens, for each position."""
        pairs = zip(tokens, self._tokens, strict=False)
        shared = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(self._tokens)))
        self._tokens = list(tokens)
        del self._states[shared + 1 :], self._sums[shared + 1 :]
        for at in range(shared, len(tokens)):
            token = tokens[at]
            self._states.append([mixed(one % 2, before, token) for one, before in enumerate(self._states[at])])
            weight = (at + 1) % 251 + 1
            sums = self._sums[at]
            self._sums.append([sums[layer] + int(sum(entry(layer, at, token))) * weight for layer in range(LAYERS)])
        return {one: self._choice(one) for one in positions}

    def _choice(self, position: int) -> int:
        digests = [one for one in self._sums[position] for _ in range(2)]
        return choice(self._states[position], digests, self._vocab)
