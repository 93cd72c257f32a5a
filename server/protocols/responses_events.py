"""OpenAI Responses: answers out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from server.answers import Finished, GenerationEvent, Progress, Usage
from server.blocks import BlockDelta, BlockEnd, BlockStart
from server.errors import ApiError
from server.logprobs import LogprobFormat
from server.protocols.base import Sse
from server.protocols.responses_tools import ShellAction, ToolNames

Keep = Callable[[dict[str, Any], str], None]
_FAILURE_CODES = {"context": "context_length_exceeded", "busy": "rate_limit_exceeded"}


class ResponsesWriter:
    """``echo``: what the response object repeats of its request. ``keep`` gets the finished response and its session
    before anybody is told. ``logprobs`` writes those that come with text."""

    def __init__(self, echo: Mapping[str, Any], names: ToolNames, keep: Keep, logprobs: LogprobFormat) -> None:
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **echo,
        }
        self._names = names
        self._keep = keep
        self._format = logprobs
        self._logprobs: list[dict[str, Any]] = []
        """Of the open item."""
        self._output: list[dict[str, Any]] = []
        self._item_id = ""
        """Id of the open item; the answer's items are its blocks, one each."""
        self._whole = False
        """Is the open item one that is told at its end, and not in pieces?"""
        self._sequence = 0

    def begin(self, usage: Usage) -> list[Sse]:
        return [self._lifecycle("response.created"), self._lifecycle("response.in_progress")]

    def write(self, event: GenerationEvent) -> list[Sse]:
        match event:
            case BlockStart():
                return self._start(event)
            case BlockDelta():
                return [] if self._whole else [self._delta(event)]
            case BlockEnd():
                return self._end(event)
            case Progress():
                return [self._lifecycle("response.in_progress")]
            case Finished():
                return [self._finish(event)]

    def failed(self, error: ApiError) -> list[Sse]:
        code = _FAILURE_CODES.get(error.kind, "server_error")
        self._response |= {"status": "failed", "error": {"code": code, "message": error.openai_message}}
        self._response["output"] = self._output
        return [self._lifecycle("response.failed")]

    def body(self) -> dict[str, Any]:
        return self._response

    def _lifecycle(self, name: str) -> Sse:
        return self._event(name, response=dict(self._response))

    def _event(self, name: str, /, **fields: Any) -> Sse:
        number, self._sequence = self._sequence, self._sequence + 1
        return name, {"type": name, "sequence_number": number, **fields}

    def _in_item(self, name: str, index: int, /, **fields: Any) -> Sse:
        return self._event(name, item_id=self._item_id, output_index=index, **fields)

    def _start(self, start: BlockStart) -> list[Sse]:
        self._whole = bool(start.name) and start.name == self._names.shell
        if self._whole:
            return []
        prefix = {"text": "msg", "thinking": "rs", "tool_call": "ctc" if start.freeform else "fc"}[start.kind]
        self._item_id = f"{prefix}_{uuid4().hex}"
        self._logprobs = []
        empty = BlockEnd(start.index, start.kind, "", start.id, start.name, start.freeform)
        item = {**self._item(empty, "in_progress"), **({"content": []} if start.kind != "tool_call" else {})}
        out = [self._event("response.output_item.added", output_index=start.index, item=item)]
        if start.kind != "tool_call":
            part = self._part(empty)
            out.append(self._in_item("response.content_part.added", start.index, content_index=0, part=part))
        return out

    def _delta(self, delta: BlockDelta) -> Sse:
        match delta.kind:
            case "text":
                logprobs = self._format(delta.logprobs) if delta.logprobs else []
                self._logprobs.extend(logprobs)
                whole = {"content_index": 0, "delta": delta.text, "logprobs": logprobs}
                return self._in_item("response.output_text.delta", delta.index, **whole)
            case "thinking":
                return self._in_item("response.reasoning_text.delta", delta.index, content_index=0, delta=delta.text)
            case "tool_call":
                custom = self._item_id.startswith("ctc_")
                name = "custom_tool_call_input" if custom else "function_call_arguments"
                return self._in_item(f"response.{name}.delta", delta.index, delta=delta.text)

    def _shell(self, end: BlockEnd) -> list[Sse]:
        """A call of the local shell has no deltas, and one id: the output is sent back under either name. Arguments
        that it does not take make a call of a function of that name, which the client refuses in words."""
        self._item_id = end.id
        status = "completed" if end.complete else "incomplete"
        item: dict[str, Any] = {"id": end.id, "status": status, "type": "local_shell_call", "call_id": end.id}
        try:
            action = ShellAction.model_validate_json(end.text)
        except ValueError:
            item = self._item(end, status)
        else:
            item["action"] = {"type": "exec", **action.model_dump()}
        self._output.append(item)
        return [
            self._event(f"response.output_item.{step}", output_index=end.index, item=item) for step in ("added", "done")
        ]

    def _end(self, end: BlockEnd) -> list[Sse]:
        if self._whole:
            return self._shell(end)
        item = self._item(end, "completed" if end.complete else "incomplete")
        self._output.append(item)
        index = end.index
        match end.kind:
            case "text":
                whole = {"content_index": 0, "text": end.text, "logprobs": self._logprobs}
                out = [self._in_item("response.output_text.done", index, **whole)]
            case "thinking":
                out = [self._in_item("response.reasoning_text.done", index, content_index=0, text=end.text)]
            case "tool_call" if end.freeform:
                out = [self._in_item("response.custom_tool_call_input.done", index, input=end.text)]
            case "tool_call":
                whole = {"name": item["name"], "arguments": end.text}
                out = [self._in_item("response.function_call_arguments.done", index, **whole)]
        if end.kind != "tool_call":
            out.append(self._in_item("response.content_part.done", index, content_index=0, part=self._part(end)))
        return [*out, self._event("response.output_item.done", output_index=index, item=item)]

    def _item(self, end: BlockEnd, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id, "status": status}
        match end.kind:
            case "text":
                return {**item, "type": "message", "role": "assistant", "content": [self._part(end)]}
            case "thinking":
                return {
                    **item,
                    "type": "reasoning",
                    "summary": [],
                    "content": [self._part(end)],
                    "encrypted_content": end.id,
                }
            case "tool_call":
                namespace, name = self._names.split(end.name)
                item |= {"call_id": end.id, "name": name, **({"namespace": namespace} if namespace else {})}
                if end.freeform:
                    return {**item, "type": "custom_tool_call", "input": end.text}
                return {**item, "type": "function_call", "arguments": end.text}

    def _part(self, end: BlockEnd) -> dict[str, Any]:
        if end.kind == "thinking":
            return {"type": "reasoning_text", "text": end.text}
        return {"type": "output_text", "text": end.text, "annotations": [], "logprobs": self._logprobs}

    def _finish(self, finished: Finished) -> Sse:
        cut = finished.reason == "length"
        self._response |= {
            "status": "incomplete" if cut else "completed",
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output,
            "usage": _usage(finished.usage),
        }
        self._keep(self._response, finished.session)
        return self._lifecycle("response.incomplete" if cut else "response.completed")


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": usage.written},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }
