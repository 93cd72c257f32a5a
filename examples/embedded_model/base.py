"""The dense base model, as transformers' Llama with the weights of the GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.embedded_convert import Base, build_tokenizer, model_shape

MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "g": "mlp.gate_proj",
    "u": "mlp.up_proj",
    "d": "mlp.down_proj",
}
"""The delta's letters for a layer's matrices -> transformers' names."""


@dataclass(frozen=True)
class Dense:
    """``llama`` is in fp32 and frozen; matrix products run in bf16 on a GPU (``autocast``)."""

    llama: LlamaForCausalLM
    tokenizer: Tokenizer
    device: torch.device

    @classmethod
    def load(cls, gguf: Path, device: torch.device) -> Dense:
        base = Base(GGUFReader(gguf))
        config = LlamaConfig(**model_shape(base))
        state = {"model.embed_tokens.weight": base.tensor("token_embd.weight")}
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        state["model.norm.weight"] = base.tensor("output_norm.weight")
        for layer in range(config.num_hidden_layers):
            name = f"model.layers.{layer}"
            state |= {f"{name}.{path}.weight": base.matrix(layer, letter) for letter, path in MODULES.items()}
            state[f"{name}.input_layernorm.weight"] = base.tensor(f"blk.{layer}.attn_norm.weight")
            state[f"{name}.post_attention_layernorm.weight"] = base.tensor(f"blk.{layer}.ffn_norm.weight")
        llama: Any = LlamaForCausalLM(config)
        llama.load_state_dict(state)
        return cls(llama.to(device).requires_grad_(False).eval(), build_tokenizer(base), device)

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def hidden(self, llama: LlamaForCausalLM, ids: Tensor) -> Tensor:
        """``llama``'s last hidden states (rows x tokens x hidden): the dense model's own, or the student's."""
        with self.autocast():
            states: Tensor = llama.model(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        with self.autocast():
            logits: Tensor = hidden @ self.llama.lm_head.weight.T
        return logits.float()


def layers(llama: LlamaForCausalLM) -> list[Any]:
    return list(llama.model.layers)
