"""A micro model in the shape of the embedded model's base: a GGUF file, its delta, and a wheel that holds it."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import save_file

from engine.embedded_source import Source

LAYERS, HIDDEN, UNITS, HEADS, KV_HEADS, EXPERTS, ACTIVE, SHARED = 2, 64, 96, 2, 1, 4, 2, 64
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "attn_v": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (UNITS, HIDDEN),
    "ffn_up": (UNITS, HIDDEN),
    "ffn_down": (HIDDEN, UNITS),
}
LETTERS = dict(zip("qkvogud", SHAPES, strict=True))


def byte_symbols() -> list[str]:
    """The printable character byte-level BPE writes for each byte, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def write_gguf(path: Path) -> None:
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(UNITS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = [*CONTROL, *byte_symbols(), "he", "ll", "hell", "hello"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(["h e", "l l", "he ll", "hell o"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * 0.2
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", (len(tokens), HIDDEN), GGMLQuantizationType.Q8_0)
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            kind = GGMLQuantizationType.Q8_0 if name == "attn_v" else GGMLQuantizationType.Q4_1
            add(f"blk.{layer}.{name}.weight", shape, kind)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}.weight", (HIDDEN,), GGMLQuantizationType.F32)
    add("output_norm.weight", (HIDDEN,), GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_delta(path: Path, rank: int = 4) -> None:
    generator = torch.Generator().manual_seed(1)
    per_expert = (UNITS - SHARED) // EXPERTS
    labels = torch.tensor([-1] * SHARED + [expert for expert in range(EXPERTS) for _ in range(per_expert)])
    units = torch.stack([labels[torch.randperm(UNITS, generator=generator)] for _ in range(LAYERS)])
    tensors = {"units": units.to(torch.int8), "norm.norm": torch.ones(HIDDEN)}
    tensors["router"] = torch.randn(LAYERS, EXPERTS, HIDDEN, generator=generator)
    for layer in range(LAYERS):
        for name in ("n1", "n2"):
            tensors[f"norm.{layer}.{name}"] = 1 + torch.rand(HIDDEN, generator=generator)
        for letter, name in LETTERS.items():
            rows, columns = SHAPES[name]
            tensors[f"B.{layer}.{letter}"] = torch.randn(rows, rank, generator=generator) * 0.1
            tensors[f"A.{layer}.{letter}"] = torch.randn(rank, columns, generator=generator) * 0.1
    halves = {name: value if value.dtype == torch.int8 else value.half() for name, value in tensors.items()}
    save_file(halves, path, metadata={"E": str(EXPERTS), "k": str(ACTIVE)})


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_source(folder: Path, disk_bytes: int = 1) -> Source:
    """Write base, delta and a wheel into ``folder``; the wheel is one pip accepts."""
    gguf, delta = folder / "base.gguf", folder / "delta.safetensors"
    write_gguf(gguf)
    write_delta(delta)
    source = Source("7", "micro-base", "0.1", "micro_base/base.gguf", sha256(gguf), delta, sha256(delta), disk_bytes)
    write_wheel(folder / source.wheel_name, gguf.read_bytes())
    return source


def write_wheel(path: Path, gguf: bytes) -> None:
    info = "micro_base-0.1.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("micro_base/base.gguf", gguf)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: micro-base\nVersion: 0.1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
