"""What the offload bench computes from what it measured."""

from __future__ import annotations

import pytest

from engine.bench_offload import FirstToken


@pytest.mark.parametrize(("tokens", "seconds"), [(8, 5.0), (9, 5.0 + 3.0), (17, 5.0 + 2.0 + 3.0), (25, 5.0 + 7.0)])
def test_first_token_is_of_all_chunks(tokens: int, seconds: float) -> None:
    one = FirstToken(gigabytes=1, tokens=tokens, chunk=8, cold=5.0, first=1.0, last=3.0)
    assert one.seconds == pytest.approx(seconds)
