"""The CPU's engine with its experts in fewer bits: the same model, and as exact as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_support import round_experts
from engine_support import GREEDY, Bench, Outcome, prompt, replace, same_bits
from safetensors.torch import load_file, save_file

from engine.checkpoint import write_tiny
from engine.weights.errors import BadConfig

LONG = replace(GREEDY, max_tokens=12)


def conversation(directory: Path, **options: Any) -> list[Outcome]:
    """Three at once, one of which goes on."""
    made = Bench(directory, max_sequences=3, **options)
    names = [made.submit(prompt(seed, 150 - 40 * seed), LONG) for seed in range(3)]
    made.run()
    said = [*prompt(0, 150), *made.outcomes[names[0]].tokens]
    names.append(made.submit([*said, *prompt(9, 5)], LONG))
    made.run()
    made.check()
    assert made.outcomes[names[3]].reuse.resumed == len(said) - 1
    return [made.outcomes[name] for name in names]


@pytest.mark.parametrize("arch, name", [("qwen3_5_moe", "int8"), ("qwen3_moe", "mxfp4")])
def test_experts_in_fewer_bits(tmp_path: Path, arch: str, name: str) -> None:
    """Says what the same model does whose experts have been rounded, and the same bits however rows come."""
    directory = write_tiny(arch, tmp_path / "model")
    round_experts(directory, name)
    wanted = conversation(directory)
    got, again = (conversation(directory, expert_format=name, **how) for how in ({}, {"threads": 2, "chunk_tokens": 7}))
    for ours, later, theirs in zip(got, again, wanted, strict=True):
        assert ours.tokens == later.tokens == theirs.tokens and same_bits(ours.logits, later.logits)
        for at, logits in ours.logits.items():
            np.testing.assert_allclose(logits, theirs.logits[at], rtol=1e-3, atol=1e-4)


def test_what_is_kept_of_other_experts_is_not_used(tmp_path: Path) -> None:
    directory = write_tiny("qwen3_moe", tmp_path / "model")
    known = {Bench(directory, expert_format=name).scheduler.info.fingerprint for name in ("auto", "int8", "mxfp4")}
    assert len(known) == 3


def test_models_that_have_no_such_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tiny("qwen3_moe", tmp_path / "model")
    with pytest.raises(BadConfig, match="--expert-format int8 is not for --kernels reference; leave it out"):
        Bench(directory, expert_format="int8", kernels="reference")
    weights = load_file(shard := directory / "model.safetensors")
    weights["model.layers.1.mlp.experts.down_proj"].view(-1)[7] = 1e9
    save_file(weights, shard)
    with pytest.raises(BadConfig, match=r"layers.1.mlp.*: weights for int8 must be .*; choose another --expert-f"):
        Bench(directory, expert_format="int8")
    with monkeypatch.context() as full, pytest.raises(BadConfig, match=r"cannot be had.*; or leave --expert-f"):
        full.setattr("engine.experts.pool.ALIGNMENT", 1 << 62)
        Bench(directory, expert_format="int8")
    monkeypatch.setattr("os.sysconf", lambda name: 16)
    with pytest.raises(BadConfig, match=r"experts in int8 take \d+ bytes of .*; or leave --expert-format out"):
        Bench(directory, expert_format="int8")
