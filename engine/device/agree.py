"""Whether a device computes what the CPU does, given the same experts.

A router takes the best few of many scores, and with random weights the last it takes and the first it leaves lie close:
where they are closer than the errors of bfloat16, it may choose otherwise. From there on, other experts are added up,
and everything later differs by much more than rounding, though nothing is wrong. So here the CPU computes what was said
first, and routers on the device follow its choices: every row then has the same history, and what is left is errors.
What the routers would have chosen is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.api import PAGE, EngineConfig
from engine.device.findings import report
from engine.device.served import Conversation
from engine.layers.ops import Routing
from engine.loading import load_engine
from engine.models.model import Wait, all_there
from engine.models.qwen3_5_moe import Qwen35Moe
from engine.native.ops import NativeOps
from engine.runner import Rows, Runner, make_batch
from engine.sampling import Row, whole

KINDS = ("prefill", "decode")
TYPICAL = 1e-2
"""Relative error of the median row."""
MOST = 5e-2
"""Of the worst row: of routers' scores, which may be small differences of large sums, and of logits."""
CLOSE = 5e-2
"""Of the scores' spread: two logits that lie closer than this may change places in bfloat16."""
CHUNK = 256
"""Rows of a step at most."""
FEW = 16
"""Rows of a decode step at most."""
_LEAD = 64.0
"""More than logits lie apart, and little enough that they keep their bits."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Known:
    """What the CPU makes of a request's ``tokens``: ``scores`` [layers, tokens, experts] and choices ``ids`` int32
    [layers, tokens, k] of the routers; ``logits`` [answer, vocab] that each token of the answer is drawn from."""

    tokens: Sequence[int]
    prompt: int
    scores: Tensor
    ids: Tensor
    logits: Tensor


def known(folder: Path, conversation: Conversation, layers: int) -> dict[str, Known]:
    """Each request in one go: the CPU's results do not depend on how its tokens come."""
    config = EngineConfig(str(folder), kv_bytes=256 << 20, checkpoint_bytes=0, max_sequences=1)
    engine = load_engine(config, lambda *_: None)
    runner, heard = engine.runner, list[tuple[Tensor, Tensor]]()
    route = NativeOps.route

    def listening(ops: NativeOps, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        ids, weights = route(ops, logits, k, renormalize)
        heard.append((logits.clone(), ids.clone()))
        return ids, weights

    found = {}
    with patch.object(NativeOps, "route", listening), torch.inference_mode():
        for name, (prompt, answer) in conversation.items():
            heard.clear()
            tokens = [*prompt, *answer]
            logits = _logits(runner, tokens, len(prompt) - 1)
            scores, ids = (
                torch.stack([torch.cat([one[which] for one in heard[layer::layers]]) for layer in range(layers)])
                for which in (0, 1)
            )
            found[name] = Known(tokens, len(prompt), scores, ids, logits)
    runner.close()
    return found


def _logits(runner: Runner, tokens: Sequence[int], first: int) -> Tensor:
    """Of the rows from ``first`` on but the last."""
    for state in runner.cache.states:
        state[1] = 0
    out, table = [], range(-(-len(tokens) // PAGE))
    for start in range(0, len(tokens), CHUNK):
        rows = Rows(tokens[start : start + CHUNK], start, table, 1)
        wanted = [row for row in range(len(rows.tokens)) if first <= start + row < len(tokens) - 1]
        batch = replace(make_batch([rows]), logit_rows=torch.tensor(wanted, dtype=torch.int64))
        out.append(runner.model.forward(batch, runner.cache))
    return torch.cat(out)


@dataclass
class Errors:
    """Of the rows of steps of one kind. ``scores``: relative, by layer; ``choices``: of a layer's experts for a row, of
    which ``turned`` would have been others, whose scores lie up to ``wide`` spreads apart on the CPU."""

    scores: list[Floats] = field(default_factory=list)
    logits: list[float] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)
    choices: int = 0
    turned: int = 0
    wide: float = 0.0

    def add(self, scores: Tensor, wanted: Tensor, ids: Tensor) -> None:
        """``scores`` and ``wanted`` [layers, rows, experts], ``ids`` int64 [layers, rows, k]."""
        off = (scores - wanted).norm(dim=2) / wanted.norm(dim=2)
        self.scores.append(off.numpy())
        own = scores.topk(ids.shape[2], dim=2).indices
        least = wanted.gather(2, ids).amin(2)
        gap = (least - wanted.gather(2, own).amin(2)) / wanted.std(2)
        self.choices, self.turned = self.choices + gap.numel(), self.turned + int((gap > 0).sum())
        self.wide = max(self.wide, float(gap.max()))

    def add_logits(self, logits: Tensor, wanted: Tensor) -> None:
        self.logits.append(float((logits - wanted).norm() / wanted.norm()))
        self.apart.append(float((wanted.max() - wanted[logits.argmax()]) / wanted.std()))

    def tell(self, kind: str) -> None:
        """``kind``: ``prefill`` or ``decode``."""
        if not (self.scores and self.logits):
            return report(f"{kind}: rows", "none", False)
        for layer, off in enumerate(np.concatenate(self.scores, axis=1)):
            self._off(f"{kind}: routers' scores of layer {layer}", off)
        report(
            f"{kind}: routers that would choose otherwise", f"{self.turned} of {self.choices}; {self.wide:.1e} apart"
        )
        self._off(f"{kind}: logits", np.array(self.logits, np.float32))
        same, apart = sum(one == 0 for one in self.apart), max(self.apart)
        told = f"{same} of {len(self.apart)}; {apart:.1e} apart"
        report(f"{kind}: the same token, or two lie close", told, apart < CLOSE)

    @staticmethod
    def _off(name: str, off: Floats) -> None:
        middle, most = float(np.median(off)), float(off.max())
        report(name, f"off by {middle:.1e}, at most {most:.1e}", middle < TYPICAL and most < MOST)


class Led:
    """Routers that follow, in graphs too; static buffers hold what they are told and what they score."""

    def __init__(self, known: dict[str, Known], device: torch.device) -> None:
        layers, _, experts = next(iter(known.values())).scores.shape
        ranks = next(iter(known.values())).ids.shape[2]
        self._known = known
        self._scores = torch.zeros(layers, CHUNK + FEW, experts, device=device)
        self._ids = torch.zeros(layers, CHUNK + FEW, ranks, dtype=torch.int32, device=device)
        self._calls = 0
        self._going: dict[int, tuple[Known, int]] = {}
        """By state slot: what was said there last, and up to where."""
        self.errors = {kind: Errors() for kind in KINDS}

    @contextmanager
    def routers(self, ops: type[Any]) -> Iterator[None]:
        """Those of models that are loaded meanwhile, with these operations."""
        forward = Qwen35Moe.forward

        def counted(model: Qwen35Moe, *arguments: Any) -> Tensor:
            self._calls = 0  # also after models of fewer layers, which kernels are rehearsed with
            return forward(model, *arguments)

        add = ops.add_shared_experts

        def led(ops: Any, base: Tensor, x: Tensor, routing: Routing, *arguments: Any) -> Tensor:
            return cast(Tensor, add(ops, base, x, replace(routing, logits=self._lead(routing)), *arguments))

        with patch.object(ops, "add_shared_experts", led), patch.object(Qwen35Moe, "forward", counted):
            yield

    def listen(self, runner: Runner) -> None:
        """Compare all steps from now on."""
        score = runner.score

        def compared(parts: Sequence[Rows], wait: Wait = all_there, meanwhile: Any = lambda: None) -> Sequence[Row]:
            there = [self._find(part) for part in parts]
            rows = [slice(part.position, part.position + len(part.tokens)) for part in parts]
            count = sum(len(part.tokens) for part in parts)
            ids = torch.cat([known.ids[:, at] for known, at in zip(there, rows, strict=True)], dim=1)
            self._ids[:, :count].copy_(ids)
            out = score(parts, wait, meanwhile)
            errors = self.errors["decode" if count <= FEW else "prefill"]
            wanted = torch.cat([known.scores[:, at] for known, at in zip(there, rows, strict=True)], dim=1)
            errors.add(self._scores[:, :count].cpu(), wanted, ids.long())
            last = [
                (one, part.position + len(part.tokens) - one.prompt) for one, part in zip(there, parts, strict=True)
            ]
            ends = [end for end, part in zip(last, parts, strict=True) if part.logits]
            for row, (one, at) in zip(out, ends, strict=True):
                if at < len(one.logits):
                    errors.add_logits(torch.from_numpy(np.array(whole(row))), one.logits[at])
            return out

        runner.score = compared  # type: ignore[method-assign]

    def tell(self) -> None:
        """Of all since the last time."""
        for kind, errors in self.errors.items():
            errors.tell(kind)
        self.errors = {kind: Errors() for kind in KINDS}

    def _find(self, part: Rows) -> Known:
        """Which request goes on here. One token may be that of several."""
        begin, end = part.position, part.position + len(part.tokens)
        said, at = self._going.get(part.slot, (None, -1))
        likely = [said] if said is not None and at == begin else []
        said = next(one for one in [*likely, *self._known.values()] if one.tokens[begin:end] == list(part.tokens))
        self._going[part.slot] = said, end
        return said

    def _lead(self, routing: Routing) -> Tensor:
        """Logits of which the device chooses what the CPU chose, with the same weights, as they add up to 1."""
        layer, rows = self._calls, routing.logits.shape[0]
        if not routing.renormalize:
            raise ValueError("weights that do not add up to 1 would not be those of the logits")
        self._calls += 1
        self._scores[layer, :rows].copy_(routing.logits)
        ids = self._ids[layer, :rows].long()
        return routing.logits.scatter_add(1, ids, torch.full(ids.shape, _LEAD, device=ids.device))
