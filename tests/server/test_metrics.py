"""The numbers, as Prometheus reads them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from parsers.load import Family
from server.metrics import exposition
from tests.server.support import Answer, serving
from tests.server.test_control import BODY

pytestmark = pytest.mark.anyio

SAMPLE = re.compile(r'([a-z_:][a-z0-9_:]*)(\{(?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*\})? (-?[0-9.e+-]+|nan|inf)')


def parse(text: str) -> dict[str, float]:
    """Samples by name and labels; every line must be one that Prometheus reads, and every sample have a type."""
    out: dict[str, float] = {}
    types: dict[str, str] = {}
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types, "told twice"
            types[name] = kind
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            assert types[match[1]] == ("counter" if match[1].endswith("_total") else "gauge") or "s_total" in match[1]
            assert match[1] + (match[2] or "") not in out
            out[match[1] + (match[2] or "")] = float(match[3])
    return out


async def test_the_same_numbers_as_stats(family: Family) -> None:
    bad = "<tool_call>\n<function=t>\nnonsense</tool_call><|im_end|>"
    tools: Any = [{"name": "t", "input_schema": {"type": "object"}}]
    async with serving(family, Answer(bad), api_keys=({"name": "ann", "secret": "a"},)) as server:
        http = server.http(headers={"x-api-key": "a"})
        await http.post("/v1/messages", json={**BODY, "tools": tools})
        stats = (await http.get("/v1/stats")).json()
        got = await http.get("/metrics")
        refused = await server.http().get("/metrics")
    numbers = parse(got.text)
    assert got.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert refused.status_code == 401
    assert stats["tolerated"]
    for rule, count in stats["tolerated"].items():
        assert numbers[f'ft_parser_tolerated_total{{family="{family.name}",rule="{rule}"}}'] == count
    assert numbers['ft_requests_by_cause_total{cause="first_request"}'] == 1
    assert numbers['ft_key_requests_total{key="ann"}'] == 1
    assert numbers["ft_worker_up"] == numbers["ft_server_requests_total"] == 1
    assert numbers["ft_server_output_tokens_total"] == stats["server"]["output_tokens"]
    assert numbers["ft_server_open_generations"] == 0
    assert numbers["ft_sessions_misses_without_cause_total"] == 0


async def test_an_absent_worker_has_no_numbers(family: Family) -> None:
    async with serving(family, connect=False) as server, server.http() as http:
        numbers = parse((await http.get("/metrics")).text)
    assert numbers["ft_worker_up"] == 0
    assert not [name for name in numbers if name.startswith(("ft_engine", "ft_store"))]


def test_every_number_of_every_room_is_there() -> None:
    """Gauges keep their names, counters end in ``_total``; a store's numbers are its own."""
    stats = {
        "engine": {"running": 2, "pages_total": 9, "steps": 5, "store_disk_bytes": 1e9, "store_bytes_written": 3.5},
        "sessions": {"sessions": 3, "echo_exact": 1, "cause_none": 7},
        "server": {"requests": 4},
        "tolerated": {'say "x"\\': 1},
        "keys": {"": {"requests": 1, "refused": 0, "running": 0, "waiting": 2}},
    }
    assert parse(exposition(stats, "f")) == {
        "ft_worker_up": 1,
        "ft_engine_running": 2,
        "ft_engine_pages_total": 9,
        "ft_engine_steps_total": 5,
        "ft_store_disk_bytes": 1e9,
        "ft_store_bytes_written_total": 3.5,
        "ft_sessions_sessions": 3,
        "ft_sessions_echo_exact_total": 1,
        "ft_server_requests_total": 4,
        'ft_requests_by_cause_total{cause="none"}': 7,
        'ft_parser_tolerated_total{family="f",rule="say \\"x\\"\\\\"}': 1,
        'ft_key_requests_total{key=""}': 1,
        'ft_key_refused_total{key=""}': 0,
        'ft_key_running{key=""}': 0,
        'ft_key_waiting{key=""}': 2,
    }
