"""Requests that wait cost nothing per step, and are looked at again as soon as that can help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_support import GREEDY, Bench, prompt, replace


def count_plans(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every plan made from now on."""
    plan, made = bench.memory.plan, list[int]()

    def counted(tokens: bytes, namespace: str, limit: int | None = None) -> Any:
        made.append(len(tokens) // 4)
        return plan(tokens, namespace, limit)

    monkeypatch.setattr(bench.memory, "plan", counted)
    return made


@pytest.mark.parametrize("arch", ["qwen3_5_moe", "qwen3_moe"])
def test_who_waits_for_a_prefill_is_planned_when_it_got_there(
    tiny: Callable[..., Path], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tiny(arch), chunk_tokens=64)
    made = count_plans(bench, monkeypatch)
    shared = prompt(1, 640)
    names = [bench.submit(shared + prompt(seed, 30)) for seed in range(2, 10)]
    bench.run()
    assert [bench.outcomes[name].reuse.resumed for name in names] == [0] + [640] * 7
    assert len(made) == 8 + 7  # each when it comes and, but the first, when the prefill is where they share


@pytest.mark.parametrize("arch", ["qwen3_5_moe", "qwen3_moe"])
def test_who_waits_for_a_prefill_that_is_aborted_goes_on(
    tiny: Callable[..., Path], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tiny(arch), chunk_tokens=64)
    shared = prompt(1, 640)
    first, second, third = (bench.submit(shared + prompt(seed, 30)) for seed in (2, 3, 4))
    for _ in range(4):
        bench.step()
    bench.scheduler.abort(first)
    bench.run()
    assert bench.outcomes[second].reuse.resumed < 640 and bench.outcomes[third].reuse.resumed == 640
    bench.check()


@pytest.mark.parametrize("side", [False, True])
def test_who_does_not_fit_is_planned_when_pages_were_let_go(
    tiny: Callable[..., Path], side: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny("qwen3_moe")
    page = int(Bench(directory).stats()["page_bytes"])
    bench = Bench(directory, kv_bytes=16 * page)
    made = count_plans(bench, monkeypatch)
    running = bench.submit(prompt(1, 600), replace(GREEDY, max_tokens=60))
    bench.run(lambda: len(bench.outcomes[running].tokens) >= 2)
    waiting = bench.submit(prompt(2, 700), side=side)
    bench.run(lambda: bench.outcomes[running].done is not None)
    assert len(made) <= 3
    bench.run()
    assert bench.outcomes[waiting].done is not None
    bench.check()
