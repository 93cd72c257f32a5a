"""Each architecture against transformers, on random tiny checkpoints in both layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_support import ARCHITECTURES, GREEDY, Bench, prompt, replace
from transformers import AutoModelForCausalLM

from engine.runner import Rows

LAYOUTS = ("fused", "per-expert")


def expected(directory: Path, tokens: list[int], steps: int) -> tuple[torch.Tensor, list[int]]:
    """transformers' logits of every position of a prompt, and its greedy continuation."""
    model, notes = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not notes["missing_keys"] and not notes["unexpected_keys"], notes
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model.eval()(ids, use_cache=False).logits[0]
        grown = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False, eos_token_id=None
        )
    return logits, grown[0, len(tokens) :].tolist()


def all_logits(bench: Bench, tokens: list[int]) -> torch.Tensor:
    """Our logits of every position, by feeding one token after another."""
    runner = bench.scheduler.runner
    table = list(range(-(-len(tokens) // 64)))
    runner.mover.copy_state(0, 1)
    rows = [runner.forward([Rows([token], at, table, 1, logits=True)]) for at, token in enumerate(tokens)]
    return torch.cat(rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernels", ["native", "reference"])
def test_logits_and_greedy_tokens_equal_transformers(
    tiny: Callable[..., Path], arch: str, layout: str, kernels: str
) -> None:
    directory = tiny(arch, layout=layout)
    tokens = prompt(1, 150, 265)
    logits, greedy = expected(directory, tokens, 16)
    bench = Bench(directory, kernels=kernels)
    assert (all_logits(bench, tokens) - logits).abs().max() < 1e-4
    outcome = bench.ask(tokens, replace(GREEDY, max_tokens=16))
    assert abs(outcome.logits[150] - logits[-1].numpy()).max() < 1e-4
    assert outcome.tokens == greedy


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_both_layouts_hold_the_same_model(tiny: Callable[..., Path], arch: str) -> None:
    fused, single = (Bench(tiny(arch, layout=layout, shards=2)).ask(prompt(2, 90)) for layout in LAYOUTS)
    assert all((fused.logits[at] == single.logits[at]).all() for at in fused.logits)


@pytest.mark.parametrize(
    ("arch", "options"),
    [("qwen2_moe", {"qkv_bias": False}), ("qwen2_moe", {"tied": True}), ("qwen3_5_moe", {"tied": True})],
)
def test_variants_equal_transformers(tiny: Callable[..., Path], arch: str, options: dict[str, bool]) -> None:
    directory = tiny(arch, **options)
    tokens = prompt(3, 80, 265)
    logits, greedy = expected(directory, tokens, 8)
    outcome = Bench(directory).ask(tokens)
    assert abs(outcome.logits[80] - logits[-1].numpy()).max() < 1e-4
    assert outcome.tokens == greedy


@pytest.mark.parametrize("arch", ["qwen2_moe", "qwen3_moe"])
def test_dense_layers_among_routed_ones(tmp_path: Path, arch: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        arch, vocab_size=265, hidden_size=64, intermediate_size=48, moe_intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, decoder_sparse_step=2,
        shared_expert_intermediate_size=32, max_position_embeddings=512, head_dim=16, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    tokens = prompt(4, 70, 265)
    logits, greedy = expected(tmp_path, tokens, 8)
    outcome = Bench(tmp_path).ask(tokens)
    assert abs(outcome.logits[70] - logits[-1].numpy()).max() < 1e-4
    assert outcome.tokens == greedy


def test_bfloat16_is_close_to_float32(tiny: Callable[..., Path]) -> None:
    tokens = prompt(5, 130)
    exact = Bench(tiny("qwen3_5_moe", dtype="bfloat16"), dtype="float32").ask(tokens)
    held = Bench(tiny("qwen3_5_moe", dtype="bfloat16"))
    assert held.scheduler.info.dtype == "bfloat16"
    difference = held.ask(tokens).logits[130] - exact.logits[130]
    assert 0 < abs(difference).max() < 0.3
