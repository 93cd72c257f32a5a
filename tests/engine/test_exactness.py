"""Resumed = uninterrupted = cold, bit for bit; alone = in company; prefill = decode."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_support import ARCHITECTURES, GREEDY, Bench, Sampling, prompt, replace, same_bits

SHORT = replace(GREEDY, max_tokens=3)


def check_cut(resuming: Bench, whole: Bench, seed: int) -> None:
    """One random prompt, computed up to a random cut by prefill, then by decoding on from a random point before it,
    and gone on from there; against one computed in a single prefill with other chunks."""
    rng = random.Random(seed)
    length = rng.randint(3, 330)
    cut, tokens = rng.randint(1, length - 1), prompt(seed, length)
    where = {"namespace": str(seed), "session": str(seed)}
    cold = whole.ask(tokens, SHORT, **where)
    assert cold.reuse.resumed == 0

    decoded = min(cut - 1, rng.randint(0, 20))
    start = cut - decoded
    forced = (
        Sampling(max_tokens=99, forced=tuple(tokens[start : cut + 1])) if decoded else replace(GREEDY, max_tokens=0)
    )
    first = resuming.ask(tokens[:start], forced, **where)
    assert first.done is not None and cut in first.done.checkpoints
    resumed = resuming.ask(tokens, SHORT, **where)
    assert resumed.reuse.resumed == cut, (seed, length, cut)
    assert resumed.reuse.replayed == 0 and resumed.reuse.new == length - cut
    assert len(resumed.logits) == 3 and same_bits(resumed.logits, cold.logits), (seed, length, cut)
    assert resumed.tokens == cold.tokens

    # Decoded to the end without interruption: the same logits wherever both have them.
    begin = max(1, length - rng.randint(1, 20))
    said = (*tokens[begin:], *cold.tokens)
    uninterrupted = whole.ask(tokens[:begin], Sampling(max_tokens=99, forced=said), namespace=f"again {seed}")
    assert same_bits(uninterrupted.logits, cold.logits)
    assert set(cold.logits) <= set(uninterrupted.logits)


def check_cuts(directory: Path, seeds: range) -> None:
    resuming, whole = Bench(directory, chunk_tokens=37), Bench(directory, chunk_tokens=512)
    for seed in seeds:
        check_cut(resuming, whole, seed)
    resuming.check()
    whole.check()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("block", range(4))
def test_random_cut_points(tiny: Callable[..., Path], arch: str, block: int) -> None:
    """Four blocks of 17 for each of three architectures: 204."""
    check_cuts(tiny(arch), range(17 * block, 17 * (block + 1)))


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_many_random_cut_points(tiny: Callable[..., Path], arch: str, dtype: str) -> None:
    check_cuts(tiny(arch, dtype=dtype), range(1000, 1400))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_bfloat16_cut_points(tiny: Callable[..., Path], arch: str) -> None:
    check_cuts(tiny(arch, dtype="bfloat16"), range(500, 505))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_four_at_once_compute_the_same_bits_as_alone(tiny: Callable[..., Path], arch: str) -> None:
    prompts = [prompt(seed, 40 + 90 * seed) for seed in range(4)]
    sampling = Sampling(max_tokens=20, temperature=0.8, top_p=0.9, seed=5)
    alone = [Bench(tiny(arch)).ask(tokens, sampling) for tokens in prompts]
    bench = Bench(tiny(arch), chunk_tokens=64)
    names = []
    for tokens in prompts:  # each arrives while the earlier ones are at different stages
        names.append(bench.submit(tokens, sampling))
        for _ in range(3):
            bench.step()
    bench.run()
    for name, single in zip(names, alone, strict=True):
        together = bench.outcomes[name]
        assert len(together.logits) == 20 and same_bits(together.logits, single.logits)
        assert together.tokens == single.tokens
    bench.check()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_after_an_abort_in_prefill_the_retry_goes_on(tiny: Callable[..., Path], arch: str) -> None:
    tokens = prompt(3, 400)
    bench = Bench(tiny(arch), chunk_tokens=50)
    name = bench.submit(tokens, session="s")
    for _ in range(4):  # admission, then three chunks
        bench.step()
    bench.scheduler.abort(name)
    bench.run()
    done = bench.outcomes[name].done
    assert done is not None and done.reason == "abort" and done.checkpoints == (150,)
    bench.check()
    retry = bench.ask(tokens, session="s")
    assert retry.reuse.resumed == 150 and retry.reuse.replayed == 0
    assert same_bits(retry.logits, Bench(tiny(arch)).ask(tokens).logits)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_preempted_sequences_end_with_the_same_bits(tiny: Callable[..., Path], arch: str) -> None:
    """Four sequences that fit one by one, but not together."""
    sampling = Sampling(max_tokens=150, temperature=1.0, seed=9)
    prompts = [prompt(seed, 130) for seed in range(4)]
    roomy = Bench(tiny(arch))
    tight = Bench(tiny(arch), kv_bytes=12 * int(roomy.stats()["page_bytes"]))
    names = [tight.submit(tokens, sampling) for tokens in prompts]
    tight.run()
    assert tight.stats()["preempted"] > 0
    tight.check()
    for name, tokens in zip(names, prompts, strict=True):
        expected = roomy.ask(tokens, sampling)
        assert tight.outcomes[name].tokens == expected.tokens and len(expected.tokens) == 150
        assert same_bits(tight.outcomes[name].logits, expected.logits)
