"""Numbers a request may bring: finite and of use, else a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parsers.load import Family
from tests.server.support import serving

pytestmark = pytest.mark.anyio

PATHS = {
    "/v1/messages": ("temperature", "top_p"),
    "/v1/responses": ("temperature", "top_p"),
    "/v1/chat/completions": (
        "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"
    ),
}  # fmt: skip


def body(path: str, **fields: Any) -> dict[str, Any]:
    said = {"input": "Hi"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "Hi"}]}
    return {"model": "local-moe", **({"max_tokens": 9} if path == "/v1/messages" else {}), **said, **fields}


@pytest.mark.parametrize("path", PATHS)
async def test_numbers_out_of_all_bounds_are_refused(family: Family, path: str) -> None:
    async with serving(family, "Yes.<|im_end|>") as server:
        http = server.http()
        wrong = [(name, number) for name in PATHS[path] for number in ("1e999", "-1e999", "NaN", "1e308", "-1e308")]
        if path != "/v1/responses":
            wrong += [("top_k", "-1")]
        if path == "/v1/chat/completions":
            wrong += [("repetition_penalty", "1e-308"), ("repetition_penalty", "0"), ("logit_bias", '{"1": 1e999}')]
        for name, number in wrong:
            text = json.dumps(body(path, **{name: "@"})).replace('"@"', number)
            answer = await http.post(path, content=text, headers={"content-type": "application/json"})
            assert answer.status_code == 400, (name, number, answer.text)
        assert not server.worker.requests


@pytest.mark.parametrize("path", PATHS)
async def test_the_smallest_numbers_are_passed_on(family: Family, path: str) -> None:
    async with serving(family, "Yes.<|im_end|>") as server:
        answer = await server.http().post(path, json=body(path, temperature=1e-320, top_p=1e-320))
        assert answer.status_code == 200
        assert server.worker.requests[0].sampling.temperature == 1e-320
