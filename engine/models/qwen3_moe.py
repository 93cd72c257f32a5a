"""Qwen3-MoE (arXiv 2505.09388): grouped-query attention with per-head RMSNorm of q and k, routed experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.ffn import Dense, FeedForward, Routed
from engine.layers.loader import Loader
from engine.layers.ops import Batch, Norm, Ops
from engine.models.fields import MOST_CONTEXT, MOST_LAYERS, Fields, Rope, check_counts, dense_layers, read_rope
from engine.models.model import Cache, Manifest, Progress


@dataclass(frozen=True)
class Qwen3MoeConfig:
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    experts: int
    expert_inner: int
    top_k: int
    renormalize: bool
    dense_layers: frozenset[int]
    eps: float
    rope: Rope
    context: int
    tied: bool

    @classmethod
    def parse(cls, fields: Fields) -> Qwen3MoeConfig:
        """Raises BadConfig."""
        fields.refuse("hidden_act", "silu")
        fields.refuse("attention_bias", False)
        fields.refuse("use_sliding_window", False)
        layers = fields.positive("num_hidden_layers", most=MOST_LAYERS)
        heads = fields.positive("num_attention_heads")
        hidden = fields.positive("hidden_size")
        head_dim = fields.positive("head_dim", hidden // heads)
        dense = dense_layers(fields, layers)
        config = cls(
            vocab=fields.positive("vocab_size"),
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=fields.positive("num_key_value_heads"),
            head_dim=head_dim,
            inner=fields.positive("intermediate_size") if dense else 0,
            experts=fields.positive("num_experts", fields.integer("num_local_experts", 0)),
            expert_inner=fields.positive("moe_intermediate_size"),
            top_k=fields.positive("num_experts_per_tok"),
            renormalize=fields.flag("norm_topk_prob", False),
            dense_layers=dense,
            eps=fields.epsilon(),
            rope=read_rope(fields, 1.0, head_dim),
            context=fields.positive("max_position_embeddings", most=MOST_CONTEXT),
            tied=fields.flag("tie_word_embeddings", False),
        )
        check_counts(config.heads, config.kv_heads, config.experts, config.top_k)
        return config


class Attention:
    """Causal attention; q and k are normalised per head, then rotated."""

    def __init__(
        self, loader: Loader, config: Qwen3MoeConfig, name: str, index: int, norm: Norm, table: Tensor
    ) -> None:
        self.ops = loader.ops
        self.norm = norm
        self.config = config
        self.index = index
        self.table = table
        hidden, width = config.hidden, config.head_dim
        inputs = {
            "q_proj": config.heads * width,
            "k_proj": config.kv_heads * width,
            "v_proj": config.kv_heads * width,
        }
        self.inputs = loader.stacked(name, inputs, hidden)
        self.sizes = [*inputs.values()]
        self.o = loader.linear(f"{name}.o_proj", hidden, config.heads * width)
        self.head_norms = (
            loader.norm(f"{name}.q_norm", width, config.eps),
            loader.norm(f"{name}.k_norm", width, config.eps),
        )

    def __call__(self, x: Tensor, batch: Batch, cache: Cache) -> Tensor:
        ops, rows, width = self.ops, x.shape[0], self.config.head_dim
        keys, values = cache.keys[self.index], cache.values[self.index]
        inputs, _ = ops.norm_linear(x, self.norm, self.inputs)
        q, k, v = (part.view(rows, -1, width) for part in torch.split(inputs, self.sizes, dim=1))
        q = ops.qk_norm_rope(q, k, v, self.head_norms, self.table, keys, values, batch)
        out = ops.attention(q, keys, values, batch, width**-0.5)
        return ops.add_linear(x, out.view(rows, -1), self.o)


@dataclass(frozen=True)
class Layer:
    attention: Attention
    ffn: FeedForward


class Qwen3Moe:
    def __init__(self, config: Qwen3MoeConfig, loader: Loader, context: int, progress: Progress) -> None:
        self.config = config
        self.ops: Ops = loader.ops
        self.embedding = loader.embedding(config.vocab, config.hidden)
        table = self.ops.rope_table(context, config.rope.dims, config.rope.theta)
        self.layers: list[Layer] = []
        for index in range(config.layers):
            self.layers.append(self._load_layer(loader, index, table))
            progress("layers", index + 1, config.layers)
        self.norm = loader.norm("norm", config.hidden, config.eps)
        self.head = loader.head(self.embedding, config.tied)

    def _load_layer(self, loader: Loader, index: int, table: Tensor) -> Layer:
        config, name = self.config, f"layers.{index}"
        norm = loader.norm(f"{name}.input_layernorm", config.hidden, config.eps)
        post_norm = loader.norm(f"{name}.post_attention_layernorm", config.hidden, config.eps)
        ffn: FeedForward
        if index in config.dense_layers:
            ffn = Dense.load(loader, f"{name}.mlp", post_norm, config.hidden, config.inner)
        else:
            ffn = Routed.load(
                loader, f"{name}.mlp", post_norm, config.hidden, config.expert_inner, config.experts, config.top_k,
                config.renormalize,
            )  # fmt: skip
        return Layer(Attention(loader, config, f"{name}.self_attn", index, norm, table), ffn)

    @property
    def manifest(self) -> Manifest:
        config = self.config
        return Manifest(config.layers, config.kv_heads, config.head_dim, attention_at=tuple(range(config.layers)))

    @property
    def vocab_size(self) -> int:
        return self.config.vocab

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        x = self.embedding[batch.tokens].float()
        for number, layer in enumerate(self.layers):
            cache.wait(number)
            x = layer.ffn(layer.attention(x, batch, cache))
        x = x[batch.logit_rows]
        return self.ops.norm_linear(x, self.norm, self.head)[0] if x.shape[0] else x.new_empty(0, self.vocab_size)
