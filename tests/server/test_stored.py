"""Responses that are stored: asked for, continued, forgotten, bounded, and there again after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from parsers.load import Family
from server.history import Bounds, Stored
from sessions.persist import Persist, PersistConfig
from tests.server.support import Answer, serving
from tests.server.test_responses import EXEC, THOUGHT, call

pytestmark = pytest.mark.anyio

HELLO = f"{THOUGHT}Hello<|im_end|>"
LOOK = f"{THOUGHT}{call('exec_command', cmd='ls')}<|im_end|>"


def response(id: str, text: str = "x", *, store: bool = True) -> dict[str, Any]:
    return {"id": id, "store": store, "output": [{"type": "message", "role": "assistant", "content": text}]}


async def test_a_stored_response_is_continued_by_its_name(family: Family) -> None:
    answers = [Answer(LOOK), Answer(HELLO), Answer(HELLO)]
    async with serving(family, lambda request: answers.pop(0)) as server:
        create = server.openai().responses.create
        first = await create(model="local-moe", input="Hi", tools=[EXEC])
        output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "a b"}  # type: ignore[union-attr]
        second = await create(
            model="local-moe",
            input=[output],
            tools=[EXEC],
            previous_response_id=first.id,
            store=True,  # type: ignore[list-item]
        )
        stream = await create(model="local-moe", input="More", previous_response_id=second.id, stream=True)
        last = [event async for event in stream][-1]
        before, after, third = server.worker.requests
    assert second.previous_response_id == first.id
    assert last.response.previous_response_id == second.id  # type: ignore[union-attr]
    sampled = family.encode_raw(LOOK)
    assert after.tokens[: len(before.tokens) + len(sampled)] == before.tokens + sampled
    text = family.tokenizer.decode(third.tokens)
    assert text.index("Hi") < text.index("a b") < text.index("Hello") < text.index("More")


async def test_a_stored_response_can_be_looked_at_and_deleted(family: Family) -> None:
    async with serving(family, HELLO) as server:
        client = server.openai().responses
        made = await client.create(model="local-moe", input="Hi", instructions="Be brief.")
        got = await client.retrieve(made.id)
        items = (await client.input_items.list(made.id)).data
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.cancel(made.id)
        await client.delete(made.id)
        for ask in (client.retrieve, client.delete, client.cancel, client.input_items.list):
            with pytest.raises(openai.NotFoundError) as caught:
                await ask(made.id)  # type: ignore[operator]
            assert made.id in caught.value.message
        with pytest.raises(openai.BadRequestError) as lost:
            await client.create(model="local-moe", input="More", previous_response_id=made.id)
    assert got == made
    (item,) = items
    assert (item.type, item.content[0].text) == ("message", "Hi")  # type: ignore[union-attr]
    assert lost.value.code == "previous_response_not_found"
    assert lost.value.param == "previous_response_id"


async def test_what_is_not_to_be_stored_is_not(family: Family) -> None:
    async with serving(family, HELLO) as server:
        client = server.openai().responses
        made = await client.create(model="local-moe", input="Hi", store=False)
        assert made.store is False  # type: ignore[attr-defined]
        with pytest.raises(openai.NotFoundError):
            await client.retrieve(made.id)


async def test_pages_of_input_items(family: Family) -> None:
    said: Any = [{"role": "user", "content": str(number)} for number in range(7)]
    async with serving(family, HELLO) as server, server.http() as http:
        client = server.openai().responses
        made = await client.create(model="local-moe", input=said)
        for order, expected in (("asc", "0123456"), ("desc", "6543210")):
            items = [item async for item in client.input_items.list(made.id, limit=3, order=order)]  # type: ignore[arg-type]
            assert "".join(item.content[0].text for item in items) == expected  # type: ignore[union-attr]
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=none"):
            assert (await http.get(f"/v1/responses/{made.id}/input_items?{query}")).status_code == 400
        assert (await http.get(f"/v1/responses/{made.id}?stream=true")).status_code == 400


async def test_each_key_has_its_own(family: Family) -> None:
    async with serving(family, HELLO, api_keys=("one", "two")) as server:
        one, two = (server.openai().with_options(api_key=key).responses for key in ("one", "two"))
        made = await one.create(model="local-moe", input="Hi")
        for ask in (two.retrieve, two.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)  # type: ignore[operator]
        with pytest.raises(openai.BadRequestError):
            await two.create(model="local-moe", input="More", previous_response_id=made.id)
        assert (await one.retrieve(made.id)).id == made.id


async def test_a_forgotten_session_takes_its_responses_along(family: Family) -> None:
    async with serving(family, HELLO) as server, server.http() as http:
        client = server.openai().responses
        made = await client.create(model="local-moe", input="Hi")
        (session,) = server.state.sessions.list()
        assert (await http.delete(f"/v1/sessions/{session.id}")).status_code == 200
        with pytest.raises(openai.NotFoundError):
            await client.retrieve(made.id)


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_they_are_there_after_a_restart(tmp_path: Path, key: bytes | None) -> None:
    for start in range(3):
        persist = Persist(PersistConfig(tmp_path / "sessions", key=key))
        stored = Stored(persist)
        if start == 0:
            stored.keep("", "s", response("resp_1", "secret text"), [{"role": "user", "content": "Hi"}])
            stored.keep("", "t", response("resp_2"), [])
        kept = stored.get("", "resp_1")
        assert (kept is not None) is (start < 2)
        if kept is not None:
            assert kept.response == response("resp_1", "secret text")
            assert kept.items == [{"role": "user", "content": "Hi"}]
        if start == 1:
            stored.forget("s")
        assert stored.get("", "resp_2") is not None
        persist.close()
        files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert (b"secret text" in files) is (key is None and start == 0)


def test_the_oldest_go(tmp_path: Path) -> None:
    now = [0.0]
    persist = Persist(PersistConfig(tmp_path / "sessions", clock=lambda: now[0]))
    for database in (None, persist):
        now[0] = 0.0
        stored = Stored(database, Bounds(count=3, bytes=1000, memory=400, days=1.0), lambda: now[0])
        for number in range(5):
            stored.keep("", "s", response(f"resp_{number}"), [])
        assert [stored.get("", f"resp_{number}") is not None for number in range(5)] == [False, False, True, True, True]
        stored.keep("", "s", response("resp_large", "x" * 700), [])
        assert stored.get("", "resp_2") is None
        assert (stored.get("", "resp_large") is not None) is (database is not None)
        stored.keep("", "s", response("resp_larger", "x" * 2000), [])
        assert stored.get("", "resp_larger") is None
        now[0] = 2 * 86400.0
        assert stored.get("", "resp_large") is None
        assert len(stored) == 0
    persist.close()


def test_a_damaged_one_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    persist = Persist(PersistConfig(tmp_path / "sessions"))
    stored = Stored(persist, Bounds(memory=0))
    stored.keep("", "s", response("resp_1"), [])
    persist.flush(10.0)
    for group, _ in persist.heads(b""):
        persist.write(group, b"[", {b"response": b"["}, used=1e12)
    persist.flush(10.0)
    assert len(Stored(persist)) == 0
    assert stored.get("", "resp_1") is None
    persist.close()
