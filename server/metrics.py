"""``GET /metrics``: the numbers of ``/v1/stats`` as Prometheus reads them, under the same names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES = re.compile(
    # of the engine
    "running|restoring|waiting|(pages|checkpoints)_(total|free|held|cached|kept)|page_bytes|checkpoint_slot_bytes"
    "|peak_resident_bytes"
    # of the store
    "|(unavailable|extents|queue_bytes|queue_extents|host_bytes|writable|disk_bytes|segments|live_bytes|index_bytes)"
    "|write_budget_level|write_paused|read_only|disk_off"
    # of sessions and server
    "|sessions|session_tokens|session_prefix_keys|persist_(on|bytes|groups|waiting)|open_generations|max_body_bytes"
)
"""Numbers that may fall. All others only rise, and are called ``_total``."""

_OF_KEYS = (
    ("requests", "ft_key_requests_total", "counter", "Generations asked for, by API key."),
    ("refused", "ft_key_refused_total", "counter", "Those refused because their key had too many."),
    ("running", "ft_key_running", "gauge", "Those being answered."),
    ("waiting", "ft_key_waiting", "gauge", "Those that wait for others of their key."),
)

_Sample = tuple[dict[str, str], float]


def exposition(stats: Mapping[str, Any], family: str) -> str:
    """The answer of ``/v1/stats`` in text. A worker that is absent has no numbers."""
    return "".join(
        line
        for name, kind, text, samples in _metrics(stats, family)
        for line in (
            f"# HELP {name} {text}\n",
            f"# TYPE {name} {kind}\n",
            *(f"{name}{_labels(labels)} {value!r}\n" for labels, value in samples),
        )
    )


def _metrics(stats: Mapping[str, Any], family: str) -> Iterator[tuple[str, str, str, list[_Sample]]]:
    """Name, type, help and samples of each metric."""
    engine: Mapping[str, float] = stats["engine"] or {}
    sessions: Mapping[str, float] = stats["sessions"]
    yield "ft_worker_up", "gauge", "1 while a worker answers.", [({}, float(stats["engine"] is not None))]
    yield from _plain("ft_engine", "engine", _without(engine, "store_"))
    yield from _plain("ft_store", "engine, name begins with store_", _only(engine, "store_"))
    yield from _plain("ft_sessions", "sessions", _without(sessions, "cause_"))
    yield from _plain("ft_server", "server", stats["server"])
    causes: list[_Sample] = [({"cause": cause}, float(count)) for cause, count in _only(sessions, "cause_").items()]
    yield "ft_requests_by_cause_total", "counter", "Requests by why their prompt was not simply longer.", causes
    rules: list[_Sample] = [
        ({"family": family, "rule": rule}, float(count)) for rule, count in stats["tolerated"].items()
    ]
    yield "ft_parser_tolerated_total", "counter", "Deviations from the wire format that were accepted.", rules
    for number, name, kind, text in _OF_KEYS:
        yield name, kind, text, [({"key": key}, float(numbers[number])) for key, numbers in stats["keys"].items()]


def _plain(prefix: str, room: str, values: Mapping[str, float]) -> Iterator[tuple[str, str, str, list[_Sample]]]:
    for key, value in values.items():
        gauge = _GAUGES.fullmatch(key) is not None
        name = f"{prefix}_{key.removeprefix(prefix.removeprefix('ft_') + '_')}" + ("" if gauge else "_total")
        yield name, "gauge" if gauge else "counter", f"{key} of /v1/stats ({room}).", [({}, float(value))]


def _only(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _without(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name: value for name, value in values.items() if not name.startswith(prefix)}


def _labels(labels: Mapping[str, str]) -> str:
    return f"{{{','.join(_pairs(labels.items()))}}}" if labels else ""


def _pairs(labels: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in labels:
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        yield f'{name}="{escaped}"'
