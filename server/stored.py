"""The responses that are kept, over HTTP. Those of other API keys do not exist."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from server.dump import Json
from server.errors import ApiError
from server.history import Kept
from server.protocols.base import invalid
from server.state import ServerState
from sessions.digest import digest

_PAGE, _LONGEST_PAGE = 20, 100
_PREFIX = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
}


async def get(state: ServerState, request: Request) -> Json:
    """Raises ApiError."""
    if request.query_params.get("stream", "false").lower() == "true":
        raise invalid("stream: a response is kept when it is finished, without its events", "stream")
    return Json(_found(state, request).response)


async def delete(state: ServerState, request: Request) -> Json:
    """Raises ApiError."""
    id = request.path_params["id"]
    if not state.history.delete(request.state.namespace, id):
        raise _unknown(id)
    return Json({"id": id, "object": "response", "deleted": True})


async def cancel(state: ServerState, request: Request) -> Json:
    """Raises ApiError: what is kept is finished, and what runs ends with its connection."""
    _found(state, request)
    raise invalid("only background responses can be cancelled, and this server has none: close the connection instead")


async def input_items(state: ServerState, request: Request) -> Json:
    """A page of what led to a response. Raises ApiError."""
    kept, query = _found(state, request), request.query_params
    order, limit = query.get("order", "desc"), query.get("limit", str(_PAGE))
    if order not in ("asc", "desc"):
        raise invalid("order: asc or desc", "order")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= _LONGEST_PAGE):
        raise invalid(f"limit: a number from 1 to {_LONGEST_PAGE}", "limit")
    items = [_whole(item, kept.response["id"], at) for at, item in enumerate(kept.items)]
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after is not None:
        places = [at for at, item in enumerate(items) if item["id"] == after]
        if not places:
            raise invalid(f"after: there is no item {after[:80]!r}", "after")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return Json({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})


def _whole(item: dict[str, Any], response: str, at: int) -> dict[str, Any]:
    """An item as it might have been sent in full."""
    kind = item.get("type") or "message"
    out = {**item, "type": kind}
    if not isinstance(out.get("id"), str):
        out["id"] = f"{_PREFIX.get(kind, 'item')}_{digest(response, str(at)).hex()}"
    if kind == "message" and isinstance(text := out.get("content"), str):
        part = "output_text" if out.get("role") == "assistant" else "input_text"
        out["content"] = [{"type": part, "text": text, **({"annotations": []} if part == "output_text" else {})}]
    return out


def _found(state: ServerState, request: Request) -> Kept:
    id = request.path_params["id"]
    kept = state.history.get(request.state.namespace, id)
    if kept is None:
        raise _unknown(id)
    return kept


def _unknown(id: str) -> ApiError:
    return ApiError("not_found", f"Response with id {id[:80]!r} not found.")
