"""What of the scores comes back to the host: the best of each row, and what the others amount to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling import Best, Logits

KEPT = 128
"""Of each row: more than the usual top-k, and nearly always more than the usual top-p needs."""


def reduce(logits: Tensor, temperature: Tensor) -> Tensor:
    """``logits`` float32 [rows, vocab], ``temperature`` float32 [rows] -> int32 [rows, 2 * kept + 2], as bits: the best
    scores, their ids, the highest score (NaN if any is), the sum of exp((score - highest) / temperature)."""
    scores, ids = logits.topk(min(KEPT, logits.shape[1]), dim=1)
    highest = logits.amax(dim=1, keepdim=True)
    mass = ((logits - highest) / temperature[:, None]).exp().sum(dim=1, keepdim=True)
    return torch.cat((scores.view(torch.int32), ids.int(), torch.cat((highest, mass), dim=1).view(torch.int32)), dim=1)


def best_of(reduced: Tensor, temperatures: Sequence[float], vocab: int, whole: Callable[[int], Logits]) -> list[Best]:
    """``reduced`` as ``reduce`` gives it, on the host; copied. ``whole`` fetches the logits of a row."""
    numbers: npt.NDArray[np.int32] = reduced.numpy().copy()
    kept = numbers.shape[1] // 2 - 1
    scores, others = numbers[:, :kept].view(np.float32), numbers[:, 2 * kept :].view(np.float32)
    return [
        Best(
            ids=numbers[row, kept : 2 * kept].astype(np.int64),
            scores=scores[row].astype(np.float64),
            floor=float(scores[row, -1]) if kept < vocab else -np.inf,
            highest=float(others[row, 0]),
            mass=float(others[row, 1]),
            temperature=temperature,
            whole=lambda row=row: whole(row),  # type: ignore[misc]
        )
        for row, temperature in enumerate(temperatures)
    ]
