"""The delta's arithmetic against the formula it was trained with, and the folder against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import fake_base
import pytest
import torch
from gguf import GGUFReader
from torch import Tensor
from torch.nn.functional import silu

from engine.embedded_convert import Base, Delta, convert, layer_tensors, unpermute


@pytest.fixture
def base_and_delta(tmp_path: Path) -> tuple[Base, Delta]:
    source = fake_base.make_source(tmp_path)
    return Base(GGUFReader(tmp_path / "base.gguf")), Delta.load(source.delta)


def moe(tensors: dict[str, Tensor], layer: int, x: Tensor, active: int) -> Tensor:
    """``qwen2_moe``'s FFN, written out expert by expert; x: tokens x hidden."""
    weight = {name.removeprefix(f"model.layers.{layer}.mlp."): value.float() for name, value in tensors.items()}

    def ffn(name: str) -> Tensor:
        hidden = silu(x @ weight[f"{name}.gate_proj.weight"].T) * (x @ weight[f"{name}.up_proj.weight"].T)
        return hidden @ weight[f"{name}.down_proj.weight"].T

    out = torch.sigmoid(x @ weight["shared_expert_gate.weight"].T) * ffn("shared_expert")
    chances = (x @ weight["gate.weight"].T).softmax(-1)
    top, chosen = chances.topk(active, -1)
    for rank in range(active):
        for expert in range(chances.shape[1]):
            mine = (chosen[:, rank] == expert).float()[:, None]
            out = out + mine * (top[:, rank] / top.sum(-1))[:, None] * ffn(f"experts.{expert}")
    return out


def trained(base: Base, delta: Delta, layer: int, x: Tensor, active: int) -> Tensor:
    """The FFN as the distillation computes it: the dense one, with each unit times its expert's gate."""
    g, u, d = (
        base.matrix(layer, m) + delta.tensors[f"B.{layer}.{m}"].float() @ delta.tensors[f"A.{layer}.{m}"].float()
        for m in "gud"
    )
    chances = (x @ delta.tensors["router"][layer].float().T).softmax(-1)
    top, chosen = chances.topk(active, -1)
    gates = torch.zeros_like(chances).scatter(-1, chosen, top / top.sum(-1, keepdim=True) * active)
    units = delta.tensors["units"][layer].long()
    unit_gates = torch.where(units < 0, torch.ones(()), gates[:, units.clamp(min=0)])
    return (silu(x @ g.T) * (x @ u.T) * unit_gates) @ d.T


@pytest.mark.parametrize("layer", range(fake_base.LAYERS))
def test_experts_compute_what_was_trained(base_and_delta: tuple[Base, Delta], layer: int) -> None:
    base, delta = base_and_delta
    x = torch.randn(50, fake_base.HIDDEN, generator=torch.Generator().manual_seed(3))
    expected = trained(base, delta, layer, x, delta.active)
    got = moe(layer_tensors(base, delta, layer), layer, x, delta.active)
    assert (got - expected).norm() < 0.01 * expected.norm()  # bf16 weights


def test_with_all_experts_equally_active_the_split_is_the_dense_ffn(base_and_delta: tuple[Base, Delta]) -> None:
    base, loaded = base_and_delta
    still = {name: torch.zeros_like(value) if name[0] in "Br" else value for name, value in loaded.tensors.items()}
    delta = Delta(loaded.experts, loaded.experts, still)
    x = torch.randn(50, fake_base.HIDDEN, generator=torch.Generator().manual_seed(4))
    dense = (silu(x @ base.matrix(0, "g").T) * (x @ base.matrix(0, "u").T)) @ base.matrix(0, "d").T
    got = moe(layer_tensors(base, delta, 0), 0, x, delta.experts)
    assert (got - dense).norm() < 0.01 * dense.norm()


def test_unpermute_takes_pairs_apart() -> None:
    rows = torch.arange(8.0)[:, None]  # two heads of four dimensions
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_only_queries_and_keys_are_permuted(base_and_delta: tuple[Base, Delta]) -> None:
    base, _ = base_and_delta
    for letter, name in fake_base.LETTERS.items():
        same = torch.equal(base.matrix(0, letter), base.tensor(f"blk.0.{name}.weight"))
        assert same == (letter not in "qk")


def test_the_folder_loads_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = fake_base.make_source(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    seen: list[tuple[str, int, int]] = []
    convert(tmp_path / "base.gguf", source.delta, folder, lambda *what: seen.append(what))
    assert seen[-1] == ("applying the delta", fake_base.LAYERS, fake_base.LAYERS)

    config = json.loads((folder / "config.json").read_text())
    assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"]) == (4, 2, 8)
    assert (config["shared_expert_intermediate_size"], config["rms_norm_eps"]) == (64, 1e-5)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello 12 é"}], tokenize=False)
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 1 and ids.count(2) == 1 and tokenizer.decode(ids) == text
    assert len(tokenizer("hello")["input_ids"]) == 1 and len(tokenizer("12")["input_ids"]) == 2

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    hidden = torch.randn(1, 20, fake_base.HIDDEN, generator=torch.Generator().manual_seed(5))
    expected = trained(Base(GGUFReader(tmp_path / "base.gguf")), Delta.load(source.delta), 1, hidden[0], 2)
    got = model.model.layers[1].mlp(hidden)
    got = (got[0] if isinstance(got, tuple) else got).reshape(20, -1)
    assert (got - expected).norm() < 0.01 * expected.norm()
    assert torch.isfinite(model(input_ids=torch.tensor([ids])).logits).all()
