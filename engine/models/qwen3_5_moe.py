"""Qwen3.5/3.6-MoE, text: three Gated DeltaNet layers (arXiv 2412.06464) to one of gated attention, routed experts and
a shared expert in every layer.

RMSNorms here scale by 1 + weight, except the gated one inside Gated DeltaNet. The release rotates text and image
positions in interleaved sections (mRoPE); for text all three positions are equal and that is plain partial RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.layers.ffn import RoutedWithShared
from engine.layers.loader import Loader
from engine.layers.ops import Batch, DeltaNet, GatedHeads, Norm, Ops
from engine.models.fields import MOST_CONTEXT, MOST_LAYERS, Fields, Rope, check_counts, read_rope
from engine.models.model import Cache, Manifest, Progress
from engine.weights.errors import BadConfig

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class Qwen35MoeConfig:
    vocab: int
    hidden: int
    kinds: tuple[str, ...]
    """Of each layer: ``linear_attention`` or ``full_attention``."""
    heads: int
    kv_heads: int
    head_dim: int
    conv_width: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    experts: int
    expert_inner: int
    shared_inner: int
    top_k: int
    eps: float
    rope: Rope
    context: int
    tied: bool

    @classmethod
    def parse(cls, fields: Fields) -> Qwen35MoeConfig:
        """Reads the text model's part (``text_config`` where it is nested); raises BadConfig."""
        outer, fields = fields, fields.inner("text_config") or fields
        fields.refuse("hidden_act", "silu")
        fields.refuse("attention_bias", False)
        layers = fields.positive("num_hidden_layers", most=MOST_LAYERS)
        interval = fields.positive("full_attention_interval", 4)
        kinds = fields.texts("layer_types") or tuple(
            FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(layers)
        )
        if len(kinds) != layers or not set(kinds) <= {LINEAR, FULL}:
            raise BadConfig(f"config.json: layer_types must name {LINEAR} or {FULL} for each of {layers} layers")
        if FULL not in kinds:
            raise BadConfig(f"config.json: none of {layers} layers is {FULL}; it is damaged or of another model")
        head_dim = fields.positive("head_dim")
        config = cls(
            vocab=fields.positive("vocab_size"),
            hidden=fields.positive("hidden_size"),
            kinds=kinds,
            heads=fields.positive("num_attention_heads"),
            kv_heads=fields.positive("num_key_value_heads"),
            head_dim=head_dim,
            conv_width=fields.positive("linear_conv_kernel_dim"),
            key_heads=fields.positive("linear_num_key_heads"),
            key_dim=fields.positive("linear_key_head_dim"),
            value_heads=fields.positive("linear_num_value_heads"),
            value_dim=fields.positive("linear_value_head_dim"),
            experts=fields.positive("num_experts"),
            expert_inner=fields.positive("moe_intermediate_size"),
            shared_inner=fields.positive("shared_expert_intermediate_size"),
            top_k=fields.positive("num_experts_per_tok"),
            eps=fields.epsilon(),
            rope=read_rope(fields, 0.25, head_dim),
            context=fields.positive("max_position_embeddings", most=MOST_CONTEXT),
            tied=fields.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", False)),
        )
        check_counts(config.heads, config.kv_heads, config.experts, config.top_k)
        if config.value_heads % config.key_heads:
            raise BadConfig("config.json: linear_num_value_heads must be a multiple of linear_num_key_heads")
        return config

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim


class GatedDeltaNet:
    """conv(q, k, v) -> gated delta rule -> norm gated by z -> out."""

    def __init__(self, loader: Loader, config: Qwen35MoeConfig, name: str, index: int, norm: Norm) -> None:
        self.ops = loader.ops
        self.index = index
        hidden, channels = config.hidden, 2 * config.keys + config.values
        inputs = {
            "in_proj_qkv": channels,
            "in_proj_z": config.values,
            "in_proj_b": config.value_heads,
            "in_proj_a": config.value_heads,
        }
        self.net = DeltaNet(
            norm,
            loader.stacked(name, inputs, hidden),
            loader.vector(f"{name}.conv1d.weight", channels, 1, config.conv_width).squeeze(1).contiguous(),
            loader.vector(f"{name}.A_log", config.value_heads),
            loader.vector(f"{name}.dt_bias", config.value_heads),
            config.key_heads,
            config.key_dim,
            config.value_heads,
            config.value_dim,
        )
        self.out_norm = loader.norm(f"{name}.norm", config.value_dim, config.eps)
        self.out = loader.linear(f"{name}.out_proj", hidden, config.values)

    def __call__(self, x: Tensor, batch: Batch, cache: Cache) -> Tensor:
        window, state = cache.states[2 * self.index], cache.states[2 * self.index + 1]
        out, z = self.ops.delta_net(x, self.net, window, state, batch)
        return self.ops.add_gated_norm_linear(x, out, z, self.out_norm, self.out)


class GatedAttention:
    """Causal attention; q and k normalised per head and partly rotated, the output gated by sigmoid."""

    def __init__(
        self, loader: Loader, config: Qwen35MoeConfig, name: str, index: int, norm: Norm, table: Tensor
    ) -> None:
        self.ops = loader.ops
        self.index = index
        hidden, width = config.hidden, config.head_dim
        inputs = {
            "q_proj": 2 * config.heads * width,
            "k_proj": config.kv_heads * width,
            "v_proj": config.kv_heads * width,
        }
        stacked = loader.stacked(name, inputs, hidden)
        self.o = loader.linear(f"{name}.o_proj", hidden, config.heads * width)
        norms = (
            loader.norm(f"{name}.q_norm", width, config.eps, 1.0),
            loader.norm(f"{name}.k_norm", width, config.eps, 1.0),
        )
        self.gated = GatedHeads(norm, stacked, norms, table, config.heads, config.kv_heads, width)

    def __call__(self, x: Tensor, batch: Batch, cache: Cache) -> Tensor:
        ops, keys, values = self.ops, cache.keys[self.index], cache.values[self.index]
        q, gate = ops.gated_heads(x, self.gated, keys, values, batch)
        out = ops.attention(q, keys, values, batch, self.gated.head_dim**-0.5)
        return ops.add_sigmoid_linear(x, out, gate, self.o)


@dataclass(frozen=True)
class Layer:
    mixer: GatedDeltaNet | GatedAttention
    ffn: RoutedWithShared


class Qwen35Moe:
    def __init__(self, config: Qwen35MoeConfig, loader: Loader, context: int, progress: Progress) -> None:
        self.config = config
        self.ops: Ops = loader.ops
        self.embedding = loader.embedding(config.vocab, config.hidden)
        table = self.ops.rope_table(context, config.rope.dims, config.rope.theta)
        self.layers: list[Layer] = []
        for index in range(len(config.kinds)):
            self.layers.append(self._load_layer(loader, index, table))
            progress("layers", index + 1, len(config.kinds))
        self.norm = loader.norm("norm", config.hidden, config.eps, 1.0)
        self.head = loader.head(self.embedding, config.tied)

    def _load_layer(self, loader: Loader, index: int, table: Tensor) -> Layer:
        config, name, kind = self.config, f"layers.{index}", self.config.kinds[index]
        among_kind = config.kinds[:index].count(kind)
        norm = loader.norm(f"{name}.input_layernorm", config.hidden, config.eps, 1.0)
        mixer: GatedDeltaNet | GatedAttention
        if kind == LINEAR:
            mixer = GatedDeltaNet(loader, config, f"{name}.linear_attn", among_kind, norm)
        else:
            mixer = GatedAttention(loader, config, f"{name}.self_attn", among_kind, norm, table)
        return Layer(
            mixer,
            RoutedWithShared.load(
                loader,
                f"{name}.mlp",
                loader.norm(f"{name}.post_attention_layernorm", config.hidden, config.eps, 1.0),
                config.hidden,
                config.expert_inner,
                config.experts,
                config.top_k,
                renormalize=True,
                shared_inner=config.shared_inner,
            ),
        )

    @property
    def manifest(self) -> Manifest:
        config = self.config
        window = (2 * config.keys + config.values, config.conv_width - 1)
        state = (config.value_heads, config.key_dim, config.value_dim)
        return Manifest(
            attention_layers=config.kinds.count(FULL),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            recurrent=(window, state) * config.kinds.count(LINEAR),
            attention_at=tuple(layer for layer, kind in enumerate(config.kinds) if kind == FULL),
            recurrent_at=tuple(layer for layer, kind in enumerate(config.kinds) if kind == LINEAR for _ in range(2)),
        )

    @property
    def vocab_size(self) -> int:
        return self.config.vocab

    def forward(self, batch: Batch, cache: Cache) -> Tensor:
        x = self.embedding[batch.tokens].float()
        for number, layer in enumerate(self.layers):
            cache.wait(number)
            x = layer.ffn(layer.mixer(x, batch, cache))
        x = x[batch.logit_rows]
        return self.ops.norm_linear(x, self.norm, self.head)[0] if x.shape[0] else x.new_empty(0, self.vocab_size)
