"""Grammars where a device computes: masks applied there, in the kernel that finds the best of a row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from device_support import bench, machine, round_experts, use_twins
from engine_support import Outcome

from engine.api import Sampling
from engine.checkpoint import write_tiny
from engine.device.masks import Masks
from engine.device.reduce import twin
from engine.grammar import Vocabulary, packed
from engine.kernels.best import Tiling, reduce

CPU = torch.device("cpu")
WORDS = 'start: WORD ("," WORD){3}\nWORD: /[a-c]{1,3}/\n'
DRAWN = Sampling(max_tokens=30, seed=3, stop_tokens=(258,), constraint=WORDS)
REQUESTS = [
    DRAWN, replace(DRAWN, temperature=0.0), replace(DRAWN, top_p=0.7, presence_penalty=1.0),
    replace(DRAWN, logit_bias=((ord("a"), 3.0),)), replace(DRAWN, constraint="start: /(?s:.*)/", top_k=20),
    replace(DRAWN, constraint=None, top_k=20), replace(DRAWN, constraint=None, temperature=0.0),
]  # fmt: skip


@pytest.mark.parametrize("vocab, kept", [(300, 8), (6, 8)])
def test_the_kernel_is_its_twin(vocab: int, kept: int) -> None:
    """With and without a mask, ties, fewer allowed than are kept, nothing allowed, a score that is no number."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator)
    logits[1] = logits[1].round()
    logits[3, vocab - 1] = torch.nan
    masks = Masks(vocab, 8, CPU)
    some, few = (np.flatnonzero(np.arange(vocab) % each < 2).tolist() for each in (3, 30))
    masks.copy([None, *(packed(each, vocab) for each in (some, few, few, []))])
    temperatures = torch.tensor([1.0, 0.3, 2.0, 1.0, 0.7])
    got = reduce(logits, temperatures, masks.which, masks.words, kept, Tiling(stretch=32, room=64))
    want = twin(logits, temperatures, masks.which, masks.words, kept)
    width, least = min(kept, vocab), -torch.inf
    scores, wanted = got[:, :width].view(torch.float32), want[:, :width].view(torch.float32)
    assert torch.equal(scores, wanted)
    assert torch.equal(got[:, width:-2][scores > least], want[:, width:-2][scores > least])
    assert got[3, -2:].view(torch.float32)[0].isnan() and (scores[4] == least).all()
    torch.testing.assert_close(got[:3, -2:].view(torch.float32), want[:3, -2:].view(torch.float32))


def test_more_equals_than_there_is_room_for() -> None:
    """No score is above what is then told of them: the whole row is looked at."""
    masks = Masks(300, 1, CPU)
    got = reduce(torch.ones(1, 300), torch.ones(1), masks.which, masks.words, 8, Tiling(stretch=128, room=64))
    assert (got[0, :8].view(torch.float32) == torch.inf).all()
    torch.testing.assert_close(got[0, -2:].view(torch.float32), torch.tensor([1.0, 300.0]))


def vocabulary() -> Vocabulary:
    return Vocabulary([bytes([byte]) for byte in range(256)], frozenset())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_tiny("qwen3_moe", tmp_path_factory.mktemp("masks") / "model", layers=2)
    round_experts(made, "int8")
    return made


def answers(model: Path, **options: object) -> tuple[list[Outcome], dict[str, float]]:
    with bench(model, max_sequences=4, vocabulary=vocabulary, **options) as made:
        made.scheduler._observer = None  # it fetches whole rows
        names = [made.submit(range(40, 60 + number), one) for number, one in enumerate(REQUESTS)]
        made.run()
        return [made.outcomes[name] for name in names], made.stats()


def test_a_device_draws_what_the_cpu_draws(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And fetches no whole row where the mask was there in time, however few of the best are allowed."""
    use_twins(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    on_cpu, _ = answers(model)
    for in_time in (True, False):
        if in_time:  # no step is over before its masks are there
            monkeypatch.setattr("engine.device.runner.DeviceRunner._marked", lambda _: lambda: False)
        got, stats = answers(model, device="cuda", experts="device", expert_format="int8", machine=machine())
        assert [one.tokens for one in got] == [one.tokens for one in on_cpu]
        assert all(one.done is not None and len(one.tokens) > 4 for one in got)
        assert stats["graph_steps"] > 10
        if in_time:
            assert stats["fetched_rows"] == 0 and stats["masked_rows"] > 20
        monkeypatch.undo()
        use_twins(monkeypatch)
