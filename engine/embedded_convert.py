"""From the base model's GGUF file and our delta to a Hugging Face ``qwen2_moe`` folder.

Each FFN of the dense base (SiLU-gated) is divided: units marked -1 form the shared expert, the others the routed ones.
Since an FFN's output is a sum over its units, the division alone changes nothing while all experts are active.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from engine.embedded_source import Report

CONTROL = 3
"""GGUF's token type of control tokens."""

GGUF_NAMES = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "g": "ffn_gate",
    "u": "ffn_up",
    "d": "ffn_down",
}
"""The delta's letters for a layer's matrices -> GGUF's names."""


@dataclass(frozen=True)
class Base:
    """The dense model in a GGUF file of architecture ``llama``; tensors are dequantised as they are asked for."""

    reader: GGUFReader

    def field(self, name: str) -> Any:
        return self.reader.fields[name].contents()

    def tensor(self, name: str) -> Tensor:
        """fp32, in the order of dimensions torch uses (out x in)."""
        found = next(tensor for tensor in self.reader.tensors if tensor.name == name)
        return torch.tensor(dequantize(found.data, found.tensor_type), dtype=torch.float32)

    def matrix(self, layer: int, letter: str) -> Tensor:
        weight = self.tensor(f"blk.{layer}.{GGUF_NAMES[letter]}.weight")
        if letter == "q":
            return unpermute(weight, int(self.field("llama.attention.head_count")))
        if letter == "k":
            return unpermute(weight, int(self.field("llama.attention.head_count_kv")))
        return weight


@dataclass(frozen=True)
class Delta:
    """What the distillation learned; names and shapes are in ``engine/data/EMBEDDED.md``."""

    experts: int
    active: int
    tensors: dict[str, Tensor]

    @classmethod
    def load(cls, path: Path) -> Delta:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return cls(int(metadata["E"]), int(metadata["k"]), tensors)

    @property
    def shared_units(self) -> int:
        return int((self.tensors["units"][0] < 0).sum())

    @property
    def expert_units(self) -> int:
        return (self.tensors["units"].shape[1] - self.shared_units) // self.experts

    def norm(self, name: str) -> Tensor:
        return self.tensors[f"norm.{name}"]

    def apply(self, layer: int, letter: str, weight: Tensor) -> Tensor:
        """``weight`` (out x in, fp32) plus its low-rank change."""
        b, a = self.tensors[f"B.{layer}.{letter}"], self.tensors[f"A.{layer}.{letter}"]
        return weight + b.float() @ a.float()


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """GGUF stores rotary dimensions of each head in interleaved pairs; Hugging Face wants two halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def layer_tensors(base: Base, delta: Delta, layer: int) -> dict[str, Tensor]:
    """The tensors of one decoder layer in bf16, with one matrix per expert."""
    weights = {letter: delta.apply(layer, letter, base.matrix(layer, letter)) for letter in GGUF_NAMES}
    out = {f"self_attn.{letter}_proj.weight": weights[letter] for letter in "qkvo"}
    out["input_layernorm.weight"] = delta.norm(f"{layer}.n1")
    out["post_attention_layernorm.weight"] = delta.norm(f"{layer}.n2")
    out["mlp.gate.weight"] = delta.tensors["router"][layer]
    # A gate of zero halves the shared expert (sigmoid(0) = 1/2), so its output is doubled. The experts' normalised
    # weights sum to one where the delta was trained with a sum of `active`.
    out["mlp.shared_expert_gate.weight"] = torch.zeros(1, weights["g"].shape[1])
    units = delta.tensors["units"][layer]
    parts = [("mlp.shared_expert", -1, 2.0)]
    parts += [(f"mlp.experts.{expert}", expert, float(delta.active)) for expert in range(delta.experts)]
    for name, expert, scale in parts:
        mine = units == expert
        out[f"{name}.gate_proj.weight"] = weights["g"][mine]
        out[f"{name}.up_proj.weight"] = weights["u"][mine]
        out[f"{name}.down_proj.weight"] = weights["d"][:, mine] * scale
    return {f"model.layers.{layer}.{name}": tensor.bfloat16().contiguous() for name, tensor in out.items()}


def model_shape(base: Base) -> dict[str, Any]:
    """What ``config.json`` takes over from the dense base."""
    theta = float(base.field("llama.rope.freq_base"))
    eos = int(base.field("tokenizer.ggml.eos_token_id"))
    return {
        "vocab_size": len(base.field("tokenizer.ggml.tokens")),
        "hidden_size": int(base.field("llama.embedding_length")),
        "intermediate_size": int(base.field("llama.feed_forward_length")),
        "num_hidden_layers": int(base.field("llama.block_count")),
        "num_attention_heads": int(base.field("llama.attention.head_count")),
        "num_key_value_heads": int(base.field("llama.attention.head_count_kv")),
        "hidden_act": "silu",
        "max_position_embeddings": int(base.field("llama.context_length")),
        "rms_norm_eps": round(float(base.field("llama.attention.layer_norm_rms_epsilon")), 9),  # stored as fp32
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": True,
        "bos_token_id": int(base.field("tokenizer.ggml.bos_token_id")),
        "eos_token_id": eos,
        "pad_token_id": eos,
    }


def model_config(base: Base, delta: Delta) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "torch_dtype": "bfloat16",
        **model_shape(base),
        "qkv_bias": False,
        "num_experts": delta.experts,
        "num_experts_per_tok": delta.active,
        "moe_intermediate_size": delta.expert_units,
        "shared_expert_intermediate_size": delta.shared_units,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def build_tokenizer(base: Base) -> Tokenizer:
    """Byte-level BPE with digits on their own, which is GGUF's pre-tokenizer ``smollm``."""
    tokens, kinds = base.field("tokenizer.ggml.tokens"), base.field("tokenizer.ggml.token_type")
    merges = [(left, right) for left, right in (merge.split(" ") for merge in base.field("tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def write_tokenizer(base: Base, folder: Path) -> None:
    """The tokenizer, and the base's own chat template."""
    (folder / "tokenizer.json").write_text(build_tokenizer(base).to_str(pretty=True), encoding="utf-8")
    tokens = base.field("tokenizer.ggml.tokens")
    eos = tokens[base.field("tokenizer.ggml.eos_token_id")]
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[base.field("tokenizer.ggml.bos_token_id")],
            "eos_token": eos,
            "pad_token": eos,
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(base.field("llama.context_length")),
            "chat_template": base.field("tokenizer.chat_template"),
        },
    )


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(gguf: Path, delta_path: Path, folder: Path, report: Report) -> None:
    """Write config, tokenizer and bf16 weights into ``folder``, which exists and is empty."""
    base, delta = Base(GGUFReader(gguf)), Delta.load(delta_path)
    config = model_config(base, delta)
    layers = int(base.field("llama.block_count"))
    tensors = {
        "model.embed_tokens.weight": base.tensor("token_embd.weight").bfloat16(),
        "model.norm.weight": delta.norm("norm").bfloat16(),
    }
    for layer in range(layers):
        tensors.update(layer_tensors(base, delta, layer))
        report("applying the delta", layer + 1, layers)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(base, folder)
    write_json(folder / "config.json", config)
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # Drawing settings the base model's authors recommend for short answers; so small a model repeats itself for ever
    # when nothing holds it back.
    drawing = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 512}
    write_json(folder / "generation_config.json", {**tokens, **drawing})
