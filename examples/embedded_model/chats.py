"""Chats between a list of everyday questions and the base model: the only text the delta is trained on."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from examples.embedded_model.base import Dense

END_OF_TEXT = 0
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
WORDS = Path(__file__).with_name("questions.json")


def questions(count: int, rng: random.Random) -> list[str]:
    """Questions with each {kind of word} filled in anew."""
    words: dict[str, list[str]] = json.loads(WORDS.read_text(encoding="utf-8"))
    found = [rng.choice(words["questions"]) for _ in range(count)]
    for kind, choices in words.items():
        while any(f"{{{kind}}}" in question for question in found):
            found = [question.replace(f"{{{kind}}}", rng.choice(choices), 1) for question in found]
    return found


@torch.no_grad()
def answer(dense: Dense, asked: Sequence[str], tokens: int = 240) -> list[list[int]]:
    """A whole chat, as tokens, for each question; an answer that ends keeps its end-of-turn token."""
    end = dense.tokenizer.token_to_id("<|im_end|>")
    head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    prompts = [dense.tokenizer.encode(f"{head}{one}<|im_end|>\n<|im_start|>assistant\n").ids for one in asked]
    longest = max(map(len, prompts))
    ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with dense.autocast():
        out = dense.llama.generate(
            input_ids=ids.to(dense.device),
            attention_mask=seen.to(dense.device),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=0.7,
            top_k=50,
            eos_token_id=end,
            pad_token_id=end,
        )
    said: list[list[int]] = out[:, longest:].tolist()
    ended = [row[: row.index(end) + 1] if end in row else row for row in said]
    return [prompt + row for prompt, row in zip(prompts, ended, strict=True)]


def sample_chats(dense: Dense, seconds: float, batch: int) -> list[list[int]]:
    """Chats sampled for about ``seconds`` (at least one batch)."""
    rng, begin = random.Random(1), time.monotonic()  # noqa: S311 (repeatable, not secret)
    chats = answer(dense, questions(batch, rng))
    while time.monotonic() - begin < seconds:
        chats += answer(dense, questions(batch, rng))
    return chats


def pack(chats: Sequence[Sequence[int]], length: int) -> Tensor:
    """Chats one after the other, cut into rows of ``length`` tokens."""
    stream = [token for chat in chats for token in (*chat, END_OF_TEXT)]
    rows = len(stream) // length
    return torch.tensor(stream[: rows * length]).view(rows, length)
