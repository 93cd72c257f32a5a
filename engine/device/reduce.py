"""What of the scores comes back to the host: the best of each row that its grammar allows, and what the others amount
to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.device.masks import Masks
from engine.sampling import Best, Logits

KEPT = 128
"""Of each row: more than the usual top-k, and nearly always more than the usual top-p needs."""


def reduce(logits: Tensor, temperatures: Tensor, masks: Masks) -> Tensor:
    """``logits`` float32 [rows, vocab], ``temperatures`` float32 [rows], ``masks`` of these rows -> int32
    [rows, 2 * kept + 2], as bits: the best scores, -inf for what is not allowed; their ids; the highest score of all,
    NaN if any is; the sum of exp((score - best) / temperature) over what is allowed."""
    if logits.is_cuda:
        from engine.kernels.best import reduce as on_device

        return on_device(logits, temperatures, masks.which, masks.words, KEPT)
    return twin(logits, temperatures, masks.which, masks.words, KEPT)


def twin(logits: Tensor, temperatures: Tensor, which: Tensor, words: Tensor, most: int) -> Tensor:
    """Plain torch."""
    rows, vocab = logits.shape
    which = which[:rows].long()
    bits = words[which, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    allowed = (bits.flatten(1)[:, :vocab] != 0) | (which < 0)[:, None]
    scores, ids = torch.where(allowed, logits, -torch.inf).sort(dim=1, descending=True, stable=True)
    highest = logits.amax(dim=1, keepdim=True)
    mass = ((scores - scores[:, :1]) / temperatures[:, None]).exp().sum(dim=1, keepdim=True)
    kept = (scores[:, :most].view(torch.int32), ids[:, :most].int(), highest.view(torch.int32), mass.view(torch.int32))
    return torch.cat(kept, dim=1)


class Reduced:
    """What ``reduce`` gives, on the host: rows are looked at where they lie, whenever they are there."""

    def __init__(self, reduced: Tensor, vocab: int) -> None:
        numbers: npt.NDArray[np.int32] = reduced.numpy()
        kept = numbers.shape[1] // 2 - 1
        scores, others = numbers[:, :kept].view(np.float32), numbers[:, 2 * kept :].view(np.float32)
        self._rows = [*zip(numbers[:, kept : 2 * kept], scores, others, strict=True)]
        self._all = kept >= vocab

    def best(
        self, temperatures: Sequence[float], masked: Sequence[bool], whole: Callable[[int], Logits]
    ) -> list[Best]:  # fmt: skip
        """Of the first rows. ``whole`` fetches the logits of one."""
        found = []
        for row, (temperature, within) in enumerate(zip(temperatures, masked, strict=True)):
            ids, scores, others = self._rows[row]
            floor, (highest, mass) = -np.inf if self._all else scores.item(-1), others.tolist()
            found.append(Best(ids, scores, floor, highest, mass, temperature, within, partial(whole, row)))
        return found
