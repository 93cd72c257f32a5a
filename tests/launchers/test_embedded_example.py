"""The program that makes the embedded model's delta, on a micro model: what it writes is what the engine applies."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import fake_base
import pytest
import torch
from gguf import GGUFReader
from safetensors import safe_open
from torch.nn.functional import silu

from engine.embedded_convert import Base, Delta, convert, layer_tensors
from examples.embedded_model import chats, distill
from examples.embedded_model.base import Dense, layers
from examples.embedded_model.split import Split, balanced_kmeans, split

CPU = torch.device("cpu")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    fake_base.write_gguf(tmp_path / "base.gguf")
    return tmp_path / "base.gguf"


def test_the_whole_program(gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    delta = tmp_path / "delta.safetensors"
    flags = (
        "--shared 64 --experts 4 --active 2 --sample-seconds 0 --sample-batch 12 --train-seconds 0.5 --train-batch 2"
    )
    distill.main([str(gguf), str(delta), *flags.split(), "--length", "32", "--held-out", "4"])
    assert re.search(r"dense [\d.]+, split [\d.]+, after \d+ steps [\d.]+", capsys.readouterr().out)
    loaded = Delta.load(delta)
    assert (loaded.experts, loaded.active, loaded.shared_units, loaded.expert_units) == (4, 2, 64, 8)
    assert any(value.abs().sum() > 0 for name, value in loaded.tensors.items() if name.startswith("B."))
    with safe_open(delta, "pt") as file:
        assert file.metadata()["sha256"] == fake_base.sha256(gguf)
    (tmp_path / "model").mkdir()
    convert(gguf, delta, tmp_path / "model", lambda *_: None)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_experts"] == 4


def test_the_engine_applies_what_the_student_computes(gguf: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    dense = Dense.load(gguf, CPU)
    parts = split(dense, torch.randint(3, 250, (4, 64)), shared=64, experts=4)
    student = distill.Student(dense, parts, active=2)
    with torch.no_grad():
        for change in student.low_rank.values():
            change.b.normal_(std=0.05)
        for one in student.routed:
            one.router.normal_()
    student.save(tmp_path / "delta.safetensors", {"E": "4", "k": "2"})
    tensors = layer_tensors(Base(GGUFReader(gguf)), Delta.load(tmp_path / "delta.safetensors"), 0)
    weight = {name.removeprefix("model.layers.0.mlp."): value.float() for name, value in tensors.items()}
    x = torch.randn(30, fake_base.HIDDEN)
    got = torch.zeros_like(x)
    chances = (x @ weight["gate.weight"].T).softmax(-1)
    top, chosen = chances.topk(2, -1)
    names = ["shared_expert", *(f"experts.{expert}" for expert in range(4))]
    shares = torch.zeros_like(chances).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
    for name, share in zip(names, torch.cat([torch.full((30, 1), 0.5), shares], 1).T, strict=True):
        up = silu(x @ weight[f"{name}.gate_proj.weight"].T) * (x @ weight[f"{name}.up_proj.weight"].T)
        got += share[:, None] * (up @ weight[f"{name}.down_proj.weight"].T)
    with torch.no_grad():
        expected = layers(student.llama)[0].mlp(x[None])[0]
    assert (got - expected).norm() < 0.01 * expected.norm()


def test_nothing_but_the_named_parts_learns(gguf: Path) -> None:
    dense = Dense.load(gguf, CPU)
    labels = torch.tensor([-1] * 64 + [0, 1, 2, 3] * 8)
    student = distill.Student(dense, [Split(labels, torch.randn(4, 64))] * fake_base.LAYERS, active=2)
    learned = {id(tensor) for _, tensors in student.groups() for tensor in tensors}
    assert {id(p) for p in student.llama.parameters() if p.requires_grad} == learned
    assert not any(parameter.requires_grad for parameter in dense.llama.parameters())


def test_before_training_all_experts_together_are_the_dense_model(gguf: Path) -> None:
    dense = Dense.load(gguf, CPU)
    labels = torch.tensor([-1] * 64 + [0, 1, 2, 3] * 8)
    student = distill.Student(dense, [Split(labels, torch.zeros(4, 64))] * fake_base.LAYERS, active=4)
    ids = torch.randint(3, 250, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(dense.hidden(student.llama, ids), dense.hidden(dense.llama, ids))


def test_training_brings_the_student_closer(gguf: Path) -> None:
    """Gradient steps in the direction ``compare`` gives lower the divergence it measures."""
    torch.manual_seed(2)
    dense = Dense.load(gguf, CPU)
    wanted, hidden = torch.randn(4, 8, 64), torch.randn(4, 8, 64)
    before, gradient = distill.compare(dense, hidden.clone(), wanted, rows=3)
    whole, same = distill.compare(dense, hidden.clone(), wanted, rows=4)
    after, _ = distill.compare(dense, hidden - gradient, wanted)
    assert before == pytest.approx(whole) and torch.allclose(gradient, same) and 0 < after < before


def test_clusters_are_balanced_and_follow_the_points() -> None:
    generator = torch.Generator().manual_seed(0)
    blobs = torch.eye(3).repeat_interleave(8, 0) * 10 + torch.randn(24, 3, generator=generator) * 0.1
    shuffle = torch.randperm(24, generator=generator)
    labels = balanced_kmeans(blobs[shuffle], 3)
    assert labels.bincount().tolist() == [8, 8, 8]
    uneven = balanced_kmeans(torch.cat([torch.zeros(20, 3), torch.ones(4, 3)]), 3)
    assert uneven.bincount().tolist() == [8, 8, 8]


def test_chats_are_questions_with_answers(gguf: Path) -> None:
    torch.manual_seed(0)
    dense = Dense.load(gguf, CPU)
    asked = chats.questions(200, random.Random(0))
    assert len(set(asked)) > 150 and not any("{" in question for question in asked)
    said = chats.answer(dense, ["Hi", "What is tea?"], tokens=8)
    for question, chat in zip(("Hi", "What is tea?"), said, strict=True):
        text = dense.tokenizer.decode(chat, skip_special_tokens=False)
        assert (
            text.startswith("<|im_start|>system\n") and f"user\n{question}<|im_end|>\n<|im_start|>assistant\n" in text
        )
        assert 2 not in chat[-8:-1]


def test_packing_keeps_order_and_separates() -> None:
    assert chats.pack([[5, 6], [7], [8, 9]], 3).tolist() == [[5, 6, 0], [7, 0, 8]]
