"""Qwen3-MoE (arXiv 2505.09388): grouped-query attention with per-head RMSNorm of q and k, routed experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.layers.ffn import Dense, FeedForward, Routed
from engine.layers.loader import Loader
from engine.layers.ops import Batch, Ops
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

    def __init__(self, loader: Loader, config: Qwen3MoeConfig, name: str, index: int, table: Tensor) -> None:
        self.ops = loader.ops
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
        self.q_norm = loader.vector(f"{name}.q_norm.weight", width)
        self.k_norm = loader.vector(f"{name}.k_norm.weight", width)

    def __call__(self, x: Tensor, batch: Batch, cache: Cache) -> Tensor:
        ops, rows, width, eps = self.ops, x.shape[0], self.config.head_dim, self.config.eps
        q, k, v = torch.split(ops.linear(x, self.inputs), self.sizes, dim=1)
        q = ops.rms_norm(q.view(rows, -1, width), self.q_norm, eps)
        k = ops.rms_norm(k.view(rows, -1, width), self.k_norm, eps)
        v = v.view(rows, -1, width)
        ops.rope(q, batch.positions, self.table)
        ops.rope(k, batch.positions, self.table)
        keys, values = cache.keys[self.index], cache.values[self.index]
        ops.write_pages(k, v, keys, values, batch)
        out = ops.attention(q, keys, values, batch, width**-0.5)
        return ops.linear(out.view(rows, -1), self.o)


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    attention: Attention
    post_norm: Tensor
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
        norm = loader.vector("norm.weight", config.hidden)
        self.norms_after = [*(layer.input_norm for layer in self.layers[1:]), norm]
        self.head = loader.head(self.embedding, config.tied)

    def _load_layer(self, loader: Loader, index: int, table: Tensor) -> Layer:
        config, name = self.config, f"layers.{index}"
        ffn: FeedForward
        if index in config.dense_layers:
            ffn = Dense.load(loader, f"{name}.mlp", config.hidden, config.inner)
        else:
            ffn = Routed.load(
                loader, f"{name}.mlp", config.hidden, config.expert_inner, config.experts, config.top_k,
                config.renormalize,
            )  # fmt: skip
        return Layer(
            loader.vector(f"{name}.input_layernorm.weight", config.hidden),
            Attention(loader, config, f"{name}.self_attn", index, table),
            loader.vector(f"{name}.post_attention_layernorm.weight", config.hidden),
            ffn,
        )

    @property
    def manifest(self) -> Manifest:
        config = self.config
        return Manifest(config.layers, config.kv_heads, config.head_dim, attention_at=tuple(range(config.layers)))

    @property
    def vocab_size(self) -> int:
        return self.config.vocab

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        ops, eps = self.ops, self.config.eps
        x = self.embedding[batch.tokens].float()
        normed = ops.rms_norm(x, self.layers[0].input_norm, eps)
        for number, layer in enumerate(self.layers):
            cache.wait(number)
            x, normed = ops.add_rms_norm(x, layer.attention(normed, batch, cache), layer.post_norm, eps)
            x, normed = ops.add_rms_norm(x, layer.ffn(normed), self.norms_after[number], eps)
        x = normed[batch.logit_rows]
        return ops.linear(x, self.head) if x.shape[0] else x.new_empty(0, self.vocab_size)
