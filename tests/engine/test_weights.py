"""Broken checkpoints say what is wrong and what to do; the fingerprint follows content and nothing else."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api import EngineConfig
from engine.checkpoint import main, write_tiny
from engine.device.virtual import OutOfMemory
from engine.loading import load_engine
from engine.weights import errors
from engine.weights.fingerprint import fingerprint
from engine.weights.shards import Shards

SMALL = {"kv_bytes": 8 << 20, "checkpoint_bytes": 1 << 20, "threads": 1}


@pytest.fixture
def copy(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def make(arch: str = "qwen3_5_moe", name: str = "copy", **options: object) -> Path:
        shutil.copytree(tiny(arch, **options), tmp_path / name)
        return tmp_path / name

    return make


def load(directory: Path, **config: Any) -> str:
    return load_engine(EngineConfig(model=str(directory), **{**SMALL, **config}), lambda *_: None).info.fingerprint


def refuse(directory: Path, kind: type[errors.CheckpointError], *words: str, **config: Any) -> None:
    with pytest.raises(kind) as raised:
        load(directory, **config)
    for word in words:
        assert word in str(raised.value)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    part = config.get("text_config", config)
    for key, value in changes.items():
        part.pop(key) if value is ... else part.__setitem__(key, value)
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_missing_directory_and_config(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", errors.MissingCheckpoint, "nowhere", "downloaded model")
    refuse(tmp_path, errors.MissingCheckpoint, "no config.json")
    (tmp_path / "config.json").write_text("{")
    refuse(tmp_path, errors.BadConfig, "not JSON", "download it again")
    (tmp_path / "config.json").write_text("[]")
    refuse(tmp_path, errors.BadConfig, "not a JSON object")


def test_unknown_architecture_names_the_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    refuse(tmp_path, errors.UnknownArchitecture, "'llama'", "qwen3_5_moe", "qwen3_moe", "qwen2_moe")


def test_a_missing_shard_is_named(copy: Callable[..., Path]) -> None:
    directory = copy(shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    refuse(directory, errors.MissingShard, "model-00002-of-00002.safetensors", "finish the download")
    (directory / "model.safetensors.index.json").unlink()
    refuse(directory, errors.MissingShard, "holds neither")


def test_a_broken_index(copy: Callable[..., Path]) -> None:
    directory = copy(shards=2)
    (directory / "model.safetensors.index.json").write_text("{}")
    refuse(directory, errors.BrokenShard, "index.json", "download it again")


@pytest.mark.parametrize("keep", [0, 7, 100, -1, -100_000])
def test_a_truncated_file(copy: Callable[..., Path], keep: int) -> None:
    path = copy() / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    refuse(path.parent, errors.BrokenShard, "model.safetensors is truncated")


def test_garbage_in_place_of_a_header(copy: Callable[..., Path]) -> None:
    path = copy() / "model.safetensors"
    for header in (b"not json", b"[1, 2]", b'{"a": {"dtype": "F32"}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        refuse(path.parent, errors.BrokenShard, "unreadable header")


@pytest.mark.parametrize(
    "name",
    ["layers.2.linear_attn.A_log", "layers.3.mlp.experts.down_proj", "embed_tokens.weight", "norm.weight"],
)
def test_a_missing_tensor_is_named(copy: Callable[..., Path], name: str) -> None:
    directory = copy()
    edit_tensors(directory, lambda tensors: tensors.pop(f"model.language_model.{name}"))
    refuse(directory, errors.MissingTensor, name)


def test_a_missing_head_and_a_missing_expert(copy: Callable[..., Path]) -> None:
    directory = copy("qwen3_moe", layout="per-expert")
    edit_tensors(directory, lambda tensors: tensors.pop("model.layers.1.mlp.experts.6.up_proj.weight"))
    refuse(directory, errors.MissingTensor, "layers.1.mlp.experts.6.up_proj.weight")
    other = copy("qwen2_moe", name="other")
    edit_tensors(other, lambda tensors: tensors.pop("lm_head.weight"))
    refuse(other, errors.MissingTensor, "lm_head.weight", "tie_word_embeddings")


def test_a_wrong_shape_says_both(copy: Callable[..., Path]) -> None:
    directory = copy()
    edit_config(directory, moe_intermediate_size=48)
    refuse(directory, errors.WrongTensor, "experts.gate_up_proj", "[8, 64, 64]", "[8, 96, 64]")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["layers.1.mlp.experts.down_proj", "layers.0.linear_attn.A_log"])
def test_numbers_that_are_none(copy: Callable[..., Path], name: str, bad: float) -> None:
    directory = copy()

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"model.language_model.{name}"].view(-1)[-3] = bad

    edit_tensors(directory, spoil)
    refuse(directory, errors.BrokenShard, "model.safetensors", name, "infinite or none")


def test_an_unsupported_dtype(copy: Callable[..., Path]) -> None:
    directory = copy("qwen3_moe")

    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.self_attn.q_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    edit_tensors(directory, quantize)
    refuse(directory, errors.WrongTensor, "F8_E4M3", "unquantized")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": ...}, ("hidden_size is missing",)),
        ({"hidden_size": "64"}, ("hidden_size is '64'", "whole number")),
        ({"num_experts": 0}, ("num_experts",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "'silu'")),
        ({"attention_bias": True}, ("attention_bias",)),
        ({"layer_types": ["full_attention"]}, ("layer_types",)),
        ({"layer_types": ["sliding_attention"] * 4}, ("layer_types",)),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ("rope_type", "'yarn'")),
        ({"linear_num_value_heads": 3}, ("linear_num_value_heads",)),
    ],
)
def test_a_config_that_asks_for_something_else(
    copy: Callable[..., Path], changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    directory = copy()
    edit_config(directory, **changes)
    refuse(directory, errors.BadConfig, *words)


@pytest.mark.parametrize("arch", ["qwen3_5_moe", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 9}, ("num_experts_per_tok 9", "num_experts 8")),
        ({"num_key_value_heads": 3}, ("num_attention_heads 4", "num_key_value_heads 3")),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers", "4096")),
        ({"hidden_size": 10**30}, ("hidden_size",)),
        *(({"rms_norm_eps": bad}, ("rms_norm_eps",)) for bad in (math.nan, math.inf, -1.0, 0.0, 1e-40, 10**400)),
        *(({"max_position_embeddings": bad}, ("max_position_embeddings",)) for bad in (10**12, 0, 2**25)),
    ],
)
def test_a_config_that_cannot_be_computed_with(
    copy: Callable[..., Path], arch: str, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    directory = copy(arch)
    edit_config(directory, **changes)
    refuse(directory, errors.BadConfig, *words)


@pytest.mark.parametrize("arch", ["qwen3_5_moe", "qwen3_moe", "qwen2_moe"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rope_theta", bad) for bad in (0, -5.0, 0.5, math.nan, math.inf, 10**400, "1e6")),
        *(("partial_rotary_factor", bad) for bad in (2.0, 0, -1.0, math.nan, 0.01, 0.1, True)),
    ],
)
def test_a_rotation_that_cannot_be(
    copy: Callable[..., Path], arch: str, nested: bool, name: str, value: object
) -> None:
    directory = copy(arch)
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    edit_config(
        directory,
        **(
            {"rope_parameters": {**plain["rope_parameters"], name: value}}
            if nested
            else {"rope_parameters": ..., name: value}
        ),
    )
    refuse(directory, errors.BadConfig, name)


def test_layers_that_cannot_be(copy: Callable[..., Path]) -> None:
    directory = copy()
    edit_config(directory, layer_types=["linear_attention"] * 4)
    refuse(directory, errors.BadConfig, "full_attention")
    edit_config(directory, layer_types=None, full_attention_interval=10)
    refuse(directory, errors.BadConfig, "full_attention")
    for number, listed in enumerate(([-1], [True], [0.0], 1)):
        other = copy("qwen3_moe", name=f"listed{number}")
        edit_config(other, mlp_only_layers=listed)
        refuse(other, errors.BadConfig, "mlp_only_layers")
    dense = copy("qwen2_moe", name="dense")
    edit_config(dense, mlp_only_layers=[0], intermediate_size=0)
    refuse(dense, errors.BadConfig, "intermediate_size")


@pytest.mark.parametrize("deep", [b"[" * 200_000, b'{"a":' * 200_000])
def test_what_is_nested_too_deeply_to_be_read(copy: Callable[..., Path], deep: bytes) -> None:
    directory = copy(shards=2)
    (directory / "model.safetensors.index.json").write_bytes(deep)
    refuse(directory, errors.BrokenShard, "index.json")
    (directory / "config.json").write_bytes(deep)
    refuse(directory, errors.BadConfig, "not JSON")
    path = copy(name="other") / "model.safetensors"
    path.write_bytes(len(deep).to_bytes(8, "little") + deep)
    refuse(path.parent, errors.BrokenShard, "unreadable header")


def test_expert_weights_are_looked_for_before_room_is_made(copy: Callable[..., Path]) -> None:
    directory = copy("qwen3_moe", layout="per-expert")
    edit_config(directory, moe_intermediate_size=2**31 - 1)
    refuse(directory, errors.WrongTensor, "experts.0.gate_proj", "2147483647")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shape", [10**30]),
        ("shape", [-1, 64]),
        ("data_offsets", [10**30, 10**30 + 8]),
        ("data_offsets", [-8, 8]),
        ("data_offsets", [100, 0]),
        ("data_offsets", [0, math.inf]),
        ("data_offsets", [0, 64 * 64 * 4]),
    ],
)
def test_a_header_that_lies(copy: Callable[..., Path], key: str, value: object) -> None:
    path = copy("qwen3_moe") / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.layers.1.self_attn.q_proj.weight"][key] = value
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    with pytest.raises((errors.BrokenShard, errors.WrongTensor)):
        load(path.parent)


def test_quantized_releases_are_refused(copy: Callable[..., Path]) -> None:
    directory = copy("qwen3_moe")
    edit_config(directory, quantization_config={"quant_method": "fp8"})
    refuse(directory, errors.BadConfig, "unquantized")


def test_configuration_that_cannot_be(tiny: Callable[..., Path]) -> None:
    directory = tiny("qwen3_5_moe")
    refuse(directory, errors.BadConfig, "--context-length", context_length=1 << 20)
    refuse(directory, errors.BadConfig, "--kv-bytes", kv_bytes=1000)
    refuse(directory, errors.BadConfig, "--instruction-set", instruction_set="mmx")
    refuse(directory, errors.BadConfig, "--kv-bytes", "this machine has", kv_bytes=500 << 40)
    refuse(directory, errors.BadConfig, "this machine has", checkpoint_bytes=500 << 40, kv_bytes=1 << 50)
    for name in ("kv_bytes", "checkpoint_bytes", "threads", "max_sequences", "chunk_tokens", "queue", "context_length"):
        for bad in (-1, 1 << 61):
            flag = f"--{name.replace('_', '-')}"
            refuse(directory, errors.BadConfig, f"{flag} {bad} is not from", **{name: bad})
    for name in ("max_sequences", "queue"):
        refuse(directory, errors.BadConfig, f"--{name.replace('_', '-')} 0 is not from", **{name: 0})


def test_memory_that_cannot_be_had(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OutOfMemory("can't allocate memory")

    monkeypatch.setattr("engine.loading.Arena", refused)
    refuse(tiny("qwen3_moe"), errors.BadConfig, "--kv-bytes", "cannot be had")


def test_the_fingerprint_follows_content_only(tiny: Callable[..., Path], copy: Callable[..., Path]) -> None:
    original = load(tiny("qwen3_5_moe"))
    directory = copy()
    assert load(directory) == original
    assert load(directory, kv_bytes=4 << 20, context_length=100, max_sequences=2, threads=2) == original
    assert load(directory, kernels="reference") != original
    assert load(directory, dtype="bfloat16") != original
    changed = {original}
    edit_config(directory, _name_or_path="/elsewhere", transformers_version="9")
    assert load(directory) == original
    edit_config(directory, rms_norm_eps=1e-5)
    changed.add(load(directory))
    for name in ("tokenizer.json", "tekken.json", "tiktoken.model"):
        (directory / name).write_text("{}")
        changed.add(load(directory))

    def nudge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.language_model.layers.1.mlp.experts.down_proj"][3, 5, 7] += 0.01

    edit_tensors(directory, nudge)
    changed.add(load(directory))
    assert len(changed) == 6


def _identity(directory: Path, dtype: str = "float32", kernels: str = "native", isa: str = "avx2") -> str:
    config = json.loads((directory / "config.json").read_text())
    return fingerprint(directory, Shards(directory), config, dtype, kernels, isa)


def _flip(path: Path, place: float) -> None:
    """One bit of a file, in place: neither its size nor, as after a copy that keeps times, its age tell."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(int((times.st_size - 1) * place))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_twelve_changes_of_identity_give_no_false_hit(
    copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copy()
    seen = [_identity(directory)]
    assert _identity(directory) == seen[0]
    seen += [_identity(directory, dtype="bfloat16"), _identity(directory, kernels="reference")]
    seen.append(_identity(directory, isa="avx512"))
    for place in (0.5, 0.73, 1.0):  # in the weights, the last bit included
        _flip(directory / "model.safetensors", place)
        seen.append(_identity(directory))
    for change in ({"rms_norm_eps": 1e-5}, {"num_experts_per_tok": 1}):
        edit_config(directory, **change)
        seen.append(_identity(directory))
    for name in ("tokenizer.json", "tekken.json"):
        (directory / name).write_text("{}")
        seen.append(_identity(directory))
    (directory / "tokenizer_config.json").write_text('{"other": 1}')
    seen.append(_identity(directory))
    monkeypatch.setattr("engine.weights.fingerprint.ARITHMETIC", 999)
    seen.append(_identity(directory))
    assert len(seen) == 13
    assert len(set(seen)) == 13


def test_a_bit_anywhere_in_large_weights_counts(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(40 << 20, dtype=torch.int16)}, path)  # above what was once only sampled
    (tmp_path / "config.json").write_text("{}")
    before = _identity(tmp_path)
    _flip(path, 0.0773)
    assert _identity(tmp_path) != before


@pytest.mark.parametrize("arch", ["qwen3_5_moe", "qwen3_moe", "qwen2_moe"])
def test_tiny_checkpoints_are_deterministic_and_whole(tmp_path: Path, arch: str) -> None:
    for name in ("a", "b"):
        assert main(["tiny", arch, str(tmp_path / name), "--seed", "3"]) == 0
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for name, tensor in load_file(tmp_path / "a" / "model.safetensors").items():
        assert tensor.isfinite().all() and tensor.unique().numel() > tensor.numel() * 0.9, name
    write_tiny(arch, tmp_path / "c", seed=4)
    assert load(tmp_path / "c") != load(tmp_path / "a")


def test_tiny_refuses_what_it_cannot_make(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(errors.UnknownArchitecture, match="llama"):
        write_tiny("llama", tmp_path)
    assert main(["tiny", "qwen3_moe", str(tmp_path / "x"), "--tokenizer", str(tmp_path / "none")]) == 2
    assert "tokenizer.json is missing" in capsys.readouterr().err
