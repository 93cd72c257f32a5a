"""Which tokens grammars allow in the rows of a step, on the device by the time its scores are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import numpy as np
import torch

from engine.grammar import Mask

_GLANCE = 2e-4
"""Seconds between two looks at whether the step is over."""
_MOMENT = 2e-2
"""That a step waits for a mask which no other sequence would have to wait for."""


class Masks:
    """Of up to ``most`` rows. ``which`` int32 [most]: a row's mask, or -1; ``words`` int32 [most, words]: the masks, as
    ``engine.grammar.Mask``. Where no row has a mask, nothing is copied."""

    def __init__(self, vocab: int, most: int, device: torch.device) -> None:
        words = -(-vocab // 32)
        self.most = most
        self._head = -(-most // 32) * 32  # masks begin on a line of their own
        size = self._head + most * words
        self._host = torch.full((size,), -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.full((size,), -1, dtype=torch.int32, device=device)
        self.which = self._device[:most]
        self.words = self._device[self._head :].view(most, words)
        self._any = False

    def copy(self, masks: Sequence[Mask | None]) -> None:
        """One for each row, in the order of the current stream; the last copy must have been made."""
        given = [mask for mask in masks if mask is not None]
        if not given and not self._any:
            return
        self._any = bool(given)
        host = self._host.numpy()
        places = iter(range(len(given)))
        host[: self.most] = -1
        host[: len(masks)] = [-1 if mask is None else next(places) for mask in masks]
        width = self.words.shape[1]
        for place, mask in enumerate(given):
            host[self._head + place * width :][:width] = mask.view(np.int32)
        size = self._head + len(given) * width
        self._device[:size].copy_(self._host[:size], non_blocking=True)


def in_time(masks: Sequence[Future[Mask] | None], over: Callable[[], bool], *, alone: bool) -> list[Mask | None]:
    """Those that were made by when the step's scores were there (``over``); None too for one that failed. It is waited
    for a little longer if its sequence is ``alone``."""
    pending = [mask for mask in masks if mask is not None and not mask.done()]
    if alone:
        wait(pending, _MOMENT)
    while pending and not over():
        pending = list(wait(pending, _GLANCE).not_done)
    return [None if mask is None or not mask.done() or mask.exception() else mask.result() for mask in masks]
