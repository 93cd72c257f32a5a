"""Make the embedded model's delta: sample chats, split the FFNs, distil router, norms and low-rank changes.

python -m examples.embedded_model.distill GGUF DELTA
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import LlamaForCausalLM

from engine.embedded_source import file_sha256
from examples.embedded_model.base import MODULES, Dense, layers
from examples.embedded_model.chats import pack, sample_chats
from examples.embedded_model.split import Split, split


class LowRank(nn.Module):
    """Added to a frozen matrix (out x in): B A, zero at first."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.a = nn.Parameter(torch.randn(rank, columns, device=weight.device) / columns**0.5)
        self.b = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.b @ self.a


class Routed(nn.Module):
    """A dense FFN in which each unit is multiplied by its expert's gate. The gates of the chosen experts sum to their
    number, the shared expert's is 1. ``load`` and ``imbalance`` are those of the last batch."""

    def __init__(self, mlp: Any, parts: Split, active: int) -> None:
        super().__init__()
        self.mlp, self.units, self.active = mlp, parts.units, active
        self.router = nn.Parameter(parts.router.clone())
        self.load = self.imbalance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            chances = F.linear(x.float(), self.router).softmax(-1)
        top, chosen = chances.topk(self.active, -1)
        gates = torch.zeros_like(chances).scatter(-1, chosen, top / top.sum(-1, keepdim=True) * self.active)
        self.load = torch.zeros_like(chances).scatter(-1, chosen, 1.0).mean((0, 1)) * len(self.router) / self.active
        self.imbalance = (self.load * chances.mean((0, 1))).sum()
        gates = F.pad(gates, (0, 1), value=1.0)  # unit label -1 finds this last one
        hidden = self.mlp.act_fn(self.mlp.gate_proj(x)) * self.mlp.up_proj(x)
        out: Tensor = self.mlp.down_proj(hidden * gates[..., self.units].to(hidden.dtype))
        return out


class Student:
    """The mixture, with names for what it learns; all else is frozen."""

    def __init__(self, dense: Dense, parts: list[Split], active: int, rank: int = 16) -> None:
        self.llama: LlamaForCausalLM = copy.deepcopy(dense.llama)
        self.norms: dict[str, nn.Parameter] = {"norm": self.llama.model.norm.weight}
        self.low_rank: dict[str, LowRank] = {}
        self.routed: list[Routed] = []
        for index, (layer, part) in enumerate(zip(layers(self.llama), parts, strict=True)):
            self.norms[f"{index}.n1"] = layer.input_layernorm.weight
            self.norms[f"{index}.n2"] = layer.post_attention_layernorm.weight
            for letter, path in MODULES.items():
                linear = layer.get_submodule(path)
                self.low_rank[f"{index}.{letter}"] = LowRank(linear.weight, rank)
                register_parametrization(linear, "weight", self.low_rank[f"{index}.{letter}"])
            layer.mlp = Routed(layer.mlp, part, active)
            self.routed.append(layer.mlp)
        for norm in self.norms.values():
            norm.requires_grad_()

    def groups(self) -> list[tuple[float, list[Tensor]]]:
        """Learning rates with what is learned at them."""
        changes = [*(one.a for one in self.low_rank.values()), *(one.b for one in self.low_rank.values())]
        return [(3e-3, [one.router for one in self.routed]), (1.5e-3, [*changes]), (3e-4, [*self.norms.values()])]

    def save(self, path: Path, metadata: dict[str, str]) -> None:
        tensors: dict[str, Tensor] = {f"norm.{name}": weight for name, weight in self.norms.items()}
        tensors |= {f"A.{name}": change.a for name, change in self.low_rank.items()}
        tensors |= {f"B.{name}": change.b for name, change in self.low_rank.items()}
        tensors["router"] = torch.stack([one.router for one in self.routed])
        halves = {name: tensor.detach().half().cpu().contiguous() for name, tensor in tensors.items()}
        units = torch.stack([one.units for one in self.routed]).to(torch.int8).cpu()
        save_file({"units": units, **halves}, path, metadata=metadata)


def train(dense: Dense, student: Student, rows: Tensor, seconds: float, batch: int) -> int:
    """Bring the student's next-token distributions close to the dense model's; returns the number of steps."""
    groups = student.groups()
    parameters = [tensor for _, tensors in groups for tensor in tensors]
    optimizer = torch.optim.AdamW([{"params": tensors} for _, tensors in groups], betas=(0.9, 0.98), weight_decay=0.0)
    generator, begin, step = torch.Generator().manual_seed(3), time.monotonic(), 0
    while (spent := (time.monotonic() - begin) / seconds) < 1:
        scale = min(1.0, (step + 1) / 30) * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * spent)))
        for group, (rate, _) in zip(optimizer.param_groups, groups, strict=True):
            group["lr"] = rate * scale
        ids = rows[torch.randint(len(rows), (batch,), generator=generator)].to(dense.device)
        with torch.no_grad():
            wanted = dense.hidden(dense.llama, ids)
        hidden = dense.hidden(student.llama, ids)
        divergence, gradient = compare(dense, hidden.detach(), wanted)
        imbalance = torch.stack([one.imbalance for one in student.routed]).mean()
        torch.autograd.backward([hidden, 0.02 * imbalance], [gradient, None])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 100 == 0:
            print(f"step {step}: KL {divergence:.4f} nats a token", flush=True)
    return step


def compare(dense: Dense, hidden: Tensor, wanted: Tensor, rows: int = 16) -> tuple[float, Tensor]:
    """Mean KL(dense || student) over tokens, and its gradient by ``hidden``; logits exist for a few rows at a time."""
    hidden, total, tokens = hidden.requires_grad_(), 0.0, hidden.shape[0] * hidden.shape[1]
    for mine, theirs in zip(hidden.split(rows), wanted.split(rows), strict=True):
        student, teacher = dense.logits(mine).log_softmax(-1), dense.logits(theirs).log_softmax(-1)
        loss = F.kl_div(student, teacher, log_target=True, reduction="sum") / tokens
        loss.backward()
        total += loss.item()
    assert hidden.grad is not None
    return total, hidden.grad


@torch.no_grad()
def perplexity(dense: Dense, llama: LlamaForCausalLM, rows: Tensor) -> float:
    total = 0.0
    for part in rows.to(dense.device).split(16):
        logits = dense.logits(dense.hidden(llama, part)[:, :-1])
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / rows[:, 1:].numel())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path, help="the base model")
    parser.add_argument("delta", type=Path, help="safetensors file to write")
    for name, value, meaning in (
        ("shared", 768, "units of the shared expert"),
        ("experts", 16, "routed experts"),
        ("active", 8, "experts a token uses"),
        ("sample-seconds", 150.0, "time to sample chats"),
        ("sample-batch", 4096, "chats sampled at once"),
        ("train-seconds", 200.0, "time to distil"),
        ("train-batch", 48, "rows in a step"),
        ("length", 512, "tokens in a row"),
        ("held-out", 256, "chats kept for measuring"),
    ):
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{meaning} (default: {value})")
    options = parser.parse_args(argv)

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    dense = Dense.load(options.gguf, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    chats = sample_chats(dense, options.sample_seconds, options.sample_batch)
    held_out, rows = (pack(part, options.length) for part in (chats[: options.held_out], chats[options.held_out :]))
    print(f"{len(chats)} chats, {len(rows)} rows of {options.length} tokens", flush=True)

    parts = split(dense, rows[:48].to(dense.device), options.shared, options.experts)
    student = Student(dense, parts, options.active)
    before = perplexity(dense, student.llama, held_out)
    steps = train(dense, student, rows, options.train_seconds, options.train_batch)
    after = perplexity(dense, student.llama, held_out)
    print(
        f"perplexity on {len(held_out)} held-out rows: dense {perplexity(dense, dense.llama, held_out):.3f}, ", end=""
    )
    print(f"split {before:.3f}, after {steps} steps {after:.3f}")
    load = torch.stack([one.load for one in student.routed])
    print(f"expert load / mean: most {load.max(1).values.mean():.2f}, least {load.min(1).values.mean():.2f}")
    numbers = {"E": str(options.experts), "k": str(options.active), "ppl": f"{after:.3f}"}
    student.save(options.delta, {**numbers, "base": options.gguf.name, "sha256": file_sha256(options.gguf)})


if __name__ == "__main__":
    main()
