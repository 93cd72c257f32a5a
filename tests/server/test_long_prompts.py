"""Text that cannot fit the context is refused before any of it is tokenized."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from parsers.load import Family, Prompt
from parsers.tokens import Tokenizer
from tests.server.support import CONTEXT, serving

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"])
async def test_what_cannot_fit_is_refused_untokenized(
    family: Family, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    encoded: list[str] = []
    encode = Tokenizer.encode_trusted

    def counting(tokenizer: Tokenizer, text: str, remember: bool = False) -> list[int]:
        encoded.append(text)
        return encode(tokenizer, text, remember)

    monkeypatch.setattr(Tokenizer, "encode_trusted", counting)
    tokens = 2 * CONTEXT  # the longest token of this vocabulary is one byte
    content: Any = [{"type": "text", "text": "a" * CONTEXT} for _ in range(2)]
    body = {"model": "local-moe", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    async with serving(family, "Yes.<|im_end|>") as server:
        refused = await server.http().post(path, json=body)
        assert refused.status_code == 400 and not encoded
        message = refused.json()["error"]["message"]
        if path == "/v1/chat/completions":
            assert (
                f"maximum context length is {CONTEXT - 1} tokens" in message
                and f"in at least {tokens} tokens" in message
            )
            assert refused.json()["error"]["code"] == "context_length_exceeded"
        else:
            assert message == f"prompt is too long: at least {tokens} tokens > {CONTEXT - 1} maximum"
        await server.idle()


async def test_only_what_is_short_is_rendered_on_the_event_loop(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    render = Family.render

    def noting(one: Family, *conversation: Any, **options: Any) -> Prompt:
        threads.append(threading.current_thread() is threading.main_thread())
        return render(one, *conversation, **options)

    messages: list[dict[str, str]] = []
    apart: list[list[bool]] = []
    monkeypatch.setattr(Family, "render", noting)
    async with serving(family, "Yes.<|im_end|>", idle_prefill=False) as server:
        for size in (9, 9, 9, 9, 4200):
            messages.append({"role": "user", "content": "a" * size})
            threads.clear()
            body = {"model": "local-moe", "max_tokens": 9, "messages": messages}
            (await server.http().post("/v1/chat/completions", json=body)).raise_for_status()
            apart.append([*threads])
            messages.append({"role": "assistant", "content": "Yes."})
        await server.idle()
    assert apart[0] == apart[-1] == [False] and apart[-2] == [], apart
