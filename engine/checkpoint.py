"""Tiny random checkpoints of any supported architecture, for tests and demonstrations.

    python -P -m engine.checkpoint tiny qwen3_5_moe /tmp/tiny
    python -P -m engine.checkpoint tiny qwen3_5_moe /tmp/tiny --tokenizer qwen --context 262144 --dtype bfloat16 --tied

The same arguments give the same bytes. Norms, biases and gates are random too, so that nothing hides behind a neutral
value. ``fused`` writes the published layout, ``per-expert`` the one that transformers' save_pretrained writes.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from engine.weights.errors import CheckpointError, UnknownArchitecture
from engine.weights.shards import INDEX, SINGLE
from engine.weights.tiktoken import build_byte_tokenizer, build_qwen_tokenizer

Layout = Literal["fused", "per-expert"]
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
KEY_HEADS, VALUE_HEADS, LINEAR_DIM, CONV = 2, 4, 16, 4
EXPERTS, TOP_K, INNER = 8, 2, 32


@dataclass(frozen=True)
class Tiny:
    """What to write. ``tokenizer``: ``bytes``, ``qwen`` or a directory to copy one from."""

    arch: str
    tokenizer: str = "bytes"
    layers: int = 4
    hidden: int = 64
    context: int = 8192
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    layout: Layout = "fused"
    tied: bool = False
    qkv_bias: bool = True
    shards: int = 1


def write_tiny(arch: str, directory: Path, **options: Any) -> Path:
    """Write a checkpoint (fields of ``Tiny`` as options) and return its directory. Raises CheckpointError."""
    tiny = Tiny(arch, **options)
    if arch not in CONFIGS:
        raise UnknownArchitecture(f"architecture {arch!r} is not supported; supported are {', '.join(CONFIGS)}")
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _write_tokenizer(tiny, directory)
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    config = CONFIGS[arch](tiny, vocab)
    config |= {"eos_token_id": ends[0], "pad_token_id": ends[1], "dtype": tiny.dtype}
    _write_json(directory / "config.json", config)
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    _write_json(directory / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1], **sampling})
    template = "qwen3_xml.jinja" if arch == "qwen3_5_moe" else "hermes.jinja"
    text = resources.files("engine").joinpath("templates", template).read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(text, encoding="utf-8")
    _write_weights(tiny, _tensors(tiny, vocab), directory)
    return directory


def _common(tiny: Tiny, vocab: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": tiny.hidden,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": tiny.context,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tiny.tied,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": INNER,
    }


def _qwen2_moe(tiny: Tiny, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        **_common(tiny, vocab),
        "intermediate_size": 2 * INNER,
        "shared_expert_intermediate_size": 2 * INNER,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "qkv_bias": tiny.qkv_bias,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }


def _qwen3_moe(tiny: Tiny, vocab: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_common(tiny, vocab),
        "head_dim": HEAD_DIM,
        "intermediate_size": 2 * INNER,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }


def _qwen3_5_moe(tiny: Tiny, vocab: int) -> dict[str, Any]:
    text = {
        "model_type": "qwen3_5_moe_text",
        **_common(tiny, vocab),
        "head_dim": HEAD_DIM,
        "attention_bias": False,
        "layer_types": _kinds(tiny),
        "linear_conv_kernel_dim": CONV,
        "linear_key_head_dim": LINEAR_DIM,
        "linear_value_head_dim": LINEAR_DIM,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "shared_expert_intermediate_size": INNER,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    if tiny.layout == "per-expert":
        return {"architectures": ["Qwen3_5MoeForCausalLM"], **text}
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": tiny.tied,
        "text_config": text,
    }


CONFIGS = {"qwen3_5_moe": _qwen3_5_moe, "qwen3_moe": _qwen3_moe, "qwen2_moe": _qwen2_moe}


def _kinds(tiny: Tiny) -> list[str]:
    return ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(tiny.layers)]


def noise(name: str, seed: int, shape: Sequence[int]) -> Tensor:
    """Independent float32 numbers, uniform in [-1, 1), for a tensor's name: splitmix64 of a counter."""
    count = int(np.prod(shape))
    out = np.empty(count, np.float32)
    start = np.uint64((zlib.crc32(name.encode()) << 32 | (seed & 0xFFFFFFFF)) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    for first in range(0, count, 1 << 20):
        last = min(first + (1 << 20), count)
        state = (np.arange(first + 1, last + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) + start
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
        out[first:last] = (state >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - 1
    return torch.from_numpy(out.reshape(tuple(shape)))


def _tensors(tiny: Tiny, vocab: int) -> dict[str, Tensor]:
    """Every tensor by the name it has in the file."""
    nested = tiny.arch == "qwen3_5_moe" and tiny.layout == "fused"
    prefix = "model.language_model." if nested else "model."
    tensors = {prefix + name: tensor for name, tensor in _text_model(tiny, vocab).items()}
    if not tiny.tied:
        tensors["lm_head.weight"] = _matrix("lm_head", tiny, vocab, tiny.hidden)
    return {name: tensor.to(getattr(torch, tiny.dtype)).contiguous() for name, tensor in tensors.items()}


def _matrix(name: str, tiny: Tiny, *shape: int) -> Tensor:
    """Random, such that a random input of size 1 gives an output of about size 1."""
    return noise(name, tiny.seed, shape) * math.sqrt(3.0 / shape[-1])


def _text_model(tiny: Tiny, vocab: int) -> dict[str, Tensor]:
    centre = 0.0 if tiny.arch == "qwen3_5_moe" else 1.0
    out: dict[str, Tensor] = {"embed_tokens.weight": noise("embed_tokens", tiny.seed, (vocab, tiny.hidden)) * 0.5}

    def norm(name: str, size: int, middle: float = centre) -> None:
        out[f"{name}.weight"] = middle + 0.3 * noise(name, tiny.seed, (size,))

    def linear(name: str, rows: int, columns: int, bias: bool = False) -> None:
        out[f"{name}.weight"] = _matrix(name, tiny, rows, columns)
        if bias:
            out[f"{name}.bias"] = 0.3 * noise(f"{name}.bias", tiny.seed, (rows,))

    norm("norm", tiny.hidden)
    for layer in range(tiny.layers):
        name = f"layers.{layer}"
        norm(f"{name}.input_layernorm", tiny.hidden)
        norm(f"{name}.post_attention_layernorm", tiny.hidden)
        if tiny.arch == "qwen3_5_moe" and _kinds(tiny)[layer] == "linear_attention":
            keys, values = KEY_HEADS * LINEAR_DIM, VALUE_HEADS * LINEAR_DIM
            mixer = f"{name}.linear_attn"
            linear(f"{mixer}.in_proj_qkv", 2 * keys + values, tiny.hidden)
            out[f"{mixer}.in_proj_qkv.weight"] *= 2  # keeps the output, which is normalised, well above rounding
            linear(f"{mixer}.in_proj_z", values, tiny.hidden)
            linear(f"{mixer}.in_proj_a", VALUE_HEADS, tiny.hidden)
            linear(f"{mixer}.in_proj_b", VALUE_HEADS, tiny.hidden)
            linear(f"{mixer}.out_proj", tiny.hidden, values)
            out[f"{mixer}.conv1d.weight"] = _matrix(f"{mixer}.conv1d", tiny, 2 * keys + values, 1, CONV)
            out[f"{mixer}.A_log"] = 1.5 * noise(f"{mixer}.A_log", tiny.seed, (VALUE_HEADS,)) - 1.0
            out[f"{mixer}.dt_bias"] = noise(f"{mixer}.dt_bias", tiny.seed, (VALUE_HEADS,))
            norm(f"{mixer}.norm", LINEAR_DIM, 1.0)
        else:
            mixer = f"{name}.self_attn"
            width = tiny.hidden // HEADS if tiny.arch == "qwen2_moe" else HEAD_DIM
            gated = 2 if tiny.arch == "qwen3_5_moe" else 1
            bias = tiny.arch == "qwen2_moe" and tiny.qkv_bias
            linear(f"{mixer}.q_proj", gated * HEADS * width, tiny.hidden, bias)
            linear(f"{mixer}.k_proj", KV_HEADS * width, tiny.hidden, bias)
            linear(f"{mixer}.v_proj", KV_HEADS * width, tiny.hidden, bias)
            linear(f"{mixer}.o_proj", tiny.hidden, HEADS * width)
            if tiny.arch != "qwen2_moe":
                norm(f"{mixer}.q_norm", width)
                norm(f"{mixer}.k_norm", width)
        linear(f"{name}.mlp.gate", EXPERTS, tiny.hidden)
        out |= _experts(f"{name}.mlp.experts", tiny)
        if tiny.arch != "qwen3_moe":
            inner = 2 * INNER if tiny.arch == "qwen2_moe" else INNER
            linear(f"{name}.mlp.shared_expert.gate_proj", inner, tiny.hidden)
            linear(f"{name}.mlp.shared_expert.up_proj", inner, tiny.hidden)
            linear(f"{name}.mlp.shared_expert.down_proj", tiny.hidden, inner)
            linear(f"{name}.mlp.shared_expert_gate", 1, tiny.hidden)
    return out


def _experts(name: str, tiny: Tiny) -> dict[str, Tensor]:
    gate_up = _matrix(f"{name}.gate_up", tiny, EXPERTS, 2 * INNER, tiny.hidden)
    down = _matrix(f"{name}.down", tiny, EXPERTS, tiny.hidden, INNER)
    if tiny.layout == "fused":
        return {f"{name}.gate_up_proj": gate_up, f"{name}.down_proj": down}
    out: dict[str, Tensor] = {}
    for expert in range(EXPERTS):
        out[f"{name}.{expert}.gate_proj.weight"] = gate_up[expert, :INNER]
        out[f"{name}.{expert}.up_proj.weight"] = gate_up[expert, INNER:]
        out[f"{name}.{expert}.down_proj.weight"] = down[expert]
    return out


def _write_weights(tiny: Tiny, tensors: dict[str, Tensor], directory: Path) -> None:
    if tiny.shards == 1:
        save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
        return
    names = sorted(tensors)
    places: dict[str, str] = {}
    for shard in range(tiny.shards):
        file = f"model-{shard + 1:05d}-of-{tiny.shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard :: tiny.shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": places})


def _write_tokenizer(tiny: Tiny, directory: Path) -> Tokenizer:
    if tiny.tokenizer == "bytes":
        build_byte_tokenizer(directory)
    elif tiny.tokenizer == "qwen":
        build_qwen_tokenizer(directory)
    else:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            path = Path(tiny.tokenizer) / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; give a directory that holds a tokenizer, 'bytes' or 'qwen'")
            shutil.copyfile(path, directory / name)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


EXAMPLES = """examples:
  ft checkpoint tiny qwen3_5_moe /tmp/tiny
  ft checkpoint tiny qwen3_moe /tmp/tiny --tokenizer qwen --dtype bfloat16"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="ft checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    tiny = kinds.add_parser(
        "tiny",
        help="write a tiny random checkpoint",
        description="Write a tiny checkpoint with random weights, and print its folder.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tiny.add_argument("arch", choices=tuple(CONFIGS), help="architecture")
    tiny.add_argument("out", type=Path, metavar="DIR", help="new or empty folder")
    tiny.add_argument(
        "--tokenizer", default="bytes", metavar="NAME", help="bytes, qwen (248k tokens), or a folder (default: bytes)"
    )
    for name, default, text in (
        ("--layers", 4, "how many"),
        ("--hidden", 64, "width"),
        ("--context", 8192, "longest conversation, in tokens"),
        ("--seed", 0, "of the weights"),
    ):
        tiny.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    tiny.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (default: %(default)s)"
    )
    tiny.add_argument(
        "--layout", choices=("fused", "per-expert"), default="fused", help="of the experts (default: %(default)s)"
    )
    tiny.add_argument("--tied", action="store_true", help="tie the output matrix to the embedding")
    options = vars(parser.parse_args(arguments))
    options.pop("kind")
    out: Path = options.pop("out")
    for name in ("layers", "hidden", "context"):
        if options[name] < 1:
            tiny.error(f"--{name} must be at least 1")
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise CheckpointError(f"{out} exists; name a new folder, or remove it first")
        print(write_tiny(options.pop("arch"), out, **options))
    except OSError as error:
        print(f"ft checkpoint: cannot write {out} ({error.strerror or error}): name another folder", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"ft checkpoint: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
