"""Remote engines as their tests make and ask them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from parsers.load import Family
from tests.server.remote_doubles import Double, FrontDoor, SGLangDouble, VLLMDouble

Make = Callable[..., Double]


def incremental(family: Family, say: Any = "", **more: Any) -> Double:
    double = SGLangDouble(family, say, **more)
    double.repeats = False
    return double


def hidden(family: Family, say: Any = "", **more: Any) -> Double:
    double = SGLangDouble(family, say, **more)
    double.repeats, double.hidden = False, True
    return double


def old_vllm(family: Family, say: Any = "", **more: Any) -> Double:
    double = VLLMDouble(family, say, **more)
    double.token_ids = False
    return double


EVERY = pytest.mark.parametrize("make", [SGLangDouble, incremental, hidden, VLLMDouble, old_vllm])
BOTH = pytest.mark.parametrize("make", [SGLangDouble, VLLMDouble])


def asked(text: str = "hi", **body: Any) -> dict[str, Any]:
    return {"model": "local-moe", "max_tokens": 100, "messages": [{"role": "user", "content": text}], **body}


async def ask(door: FrontDoor, path: str = "/v1/messages", **body: Any) -> httpx.Response:
    async with door.http() as http:
        return await http.post(path, json=asked(**body))


def said(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return "".join(block["text"] for block in answer.json()["content"])


def prompt(body: dict[str, Any]) -> list[int]:
    ids: list[int] = body.get("input_ids") or body["prompt"]
    return ids


async def ask_get(door: FrontDoor, path: str) -> dict[str, Any]:
    async with door.http() as http:
        body: dict[str, Any] = (await http.get(path)).json()
        return body
