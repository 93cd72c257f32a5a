"""One conversation of a trace as its client holds it: edits, and the requests that each kind of client makes of it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from launchers.trace import Add, Ask, Edit, Head, Shape, words

MODEL = "local-moe"
CLEARED = "[Old tool result content cleared]"
INTERRUPTED = "[Request interrupted by user]"
MAX_TOKENS = 4096
ASKS_FOR_SUMMARY = "Your task is to create a detailed summary of the conversation so far."
FOUND_TOOL = "NotebookEdit"
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "limit": {"type": "number"}, "note": {"type": "string"}},
    "required": ["path"],
}
_TAG = re.compile(r"\(t\d+\) ")

Role = Literal["user", "reminder", "system", "output", "thinking", "text", "call"]
ANSWER: tuple[Role, ...] = ("thinking", "text", "call")


@dataclass
class Item:
    """``tag`` marks what a user wrote. ``wire``: an answer's block as the server sent it; ``call``: its id, or the id
    of the call that is answered. ``tool``: one that an output refers to. ``answer``: of which answer it is a part, by
    the trace's step, -1 for what was cut off; ``parts``: how many blocks that answer had."""

    role: Role
    text: str
    tag: str = ""
    call: str = ""
    tool: str = ""
    answer: int = -1
    parts: int = 0
    wire: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Wire:
    """One HTTP request."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class Chat:
    """``session`` and ``thread`` as in the trace."""

    def __init__(self, head: Head, shape: Shape, session: str, thread: str) -> None:
        self.head = head
        self.shape: Shape = shape
        self.session = session
        self.thread = thread
        self.items: list[Item] = []
        self._snapshot = 0
        self._process = 0
        self._sent = 0
        self._found = False
        self._trailing: list[Item] = []

    def fork(self, thread: str, count: int) -> Chat:
        """Another conversation that goes on before the last ``count`` user messages."""
        other = copy.copy(self)
        other.thread = thread
        other.items = copy.deepcopy(self.items)
        other._cut(count)
        return other

    def position(self) -> tuple[str, int]:
        """Where a script's rule for the next answer matches: the last user message's tag, and the answers since."""
        steps, before = 0, False
        for item in reversed(self.items):
            if item.tag:
                return item.tag, steps
            answer = item.role in ANSWER
            steps += answer and not before
            before = answer
        return "", steps

    # ── what its client does ────────────────────────────────────────────────────────────────────────────────────

    def edit(self, edit: Edit) -> None:
        items = self.items
        match edit.kind:
            case "tools_inserted":
                self._found = True
            case "summary_first" | "summary_only":
                summary, last = self._summary(), self._last_user()
                items[:] = [summary, *items[last:]]
            case "summary_last":
                summary = self._summary()
                items[:] = [*(item for item in items if item.tag), summary]
            case "exchanges_cut" | "rewound":
                self._cut(edit.count)
            case "thinking_dropped":
                for at in reversed(range(len(items))):
                    if items[at].role == "thinking":
                        del items[at]
                        break
            case "system_folded":
                for item in items:
                    if item.role == "system":
                        item.role, item.text = "reminder", f"<system-reminder>{item.text}</system-reminder>"
            case "system_changed":
                self._snapshot += 1
            case "answer_dropped":
                while items and items[-1].role in ("text", "call"):
                    items.pop()
                items.append(Item("user", "<turn_aborted>The user interrupted the last turn.</turn_aborted>"))
            case "answer_kept":
                items.append(Item("user", INTERRUPTED))
            case "outputs_cleared":
                outputs = [item for item in items if item.role == "output"]
                for item in outputs[: -edit.count or None]:
                    item.text = CLEARED
            case "reminders_dropped":
                last = self._last_user()
                items[:] = [item for at, item in enumerate(items) if item.role != "reminder" or at > last]
            case "reminder_moved":
                self._trailing = [item for item in items if item.role == "reminder"][-1:]
                items[:] = [item for item in items if item not in self._trailing]
            case "new_process":
                self._process += 1
            case "forked":
                raise ValueError("a fork is another conversation")

    def add(self, number: int, adds: Sequence[Add]) -> None:
        """The messages of the trace's step ``number``."""
        open_calls = self._open_calls()
        for at, add in enumerate(adds):
            text = words(f"{self.head.seed}.{number}.{at}", add.words)
            match add.role:
                case "user":
                    self.items.append(Item("user", f"(t{number}) {text}", tag=f"t{number}"))
                case "output":
                    call = open_calls.pop(0) if open_calls else ""
                    tool = FOUND_TOOL if self._found and not any(item.tool for item in self.items) else ""
                    self.items.append(Item("output", text, call=call, tool=tool))
                case "reminder":
                    self.items.append(Item("reminder", f"<system-reminder>{text}</system-reminder>"))
                case "system":
                    self.items.append(Item("system", text))
        self.items += self._trailing
        self._trailing = []

    def answer(self, number: int, items: Sequence[Item]) -> None:
        """What the model said at the trace's step ``number``; -1: a part of it."""
        for item in items:
            item.answer, item.parts = number, len(items)
        self.items += items

    def answers(self) -> list[int]:
        """The step whose answer each assistant turn of a request is, as it was; -1 where something was changed."""
        groups: list[list[Item]] = []
        before: Role = "user"
        for item in self.items:
            if item.role in ANSWER and before not in ANSWER:
                groups.append([])
            if item.role in ANSWER:
                groups[-1].append(item)
            before = item.role
        return [
            group[0].answer if len(group) == group[0].parts and len({one.answer for one in group}) == 1 else -1
            for group in groups
        ]

    def _open_calls(self) -> list[str]:
        answered = {item.call for item in self.items if item.role == "output"}
        return [item.call for item in self.items if item.role == "call" and item.call not in answered]

    def _last_user(self, count: int = 1) -> int:
        users = [at for at, item in enumerate(self.items) if item.tag]
        return users[-min(count, len(users))] if users else 0

    def _cut(self, count: int) -> None:
        """The first exchange stays: nobody rewinds to nothing."""
        users = [at for at, item in enumerate(self.items) if item.tag]
        if len(users) > 1:
            del self.items[users[-min(count, len(users) - 1)] :]

    def _summary(self) -> Item:
        """Takes the request for a summary and its answer off, and makes a user's message of the answer."""
        text = "".join(item.text for item in self.items[self._last_user() :] if item.role == "text")
        del self.items[self._last_user() :]
        return Item("user", f"This session is continued from an earlier one. Its summary: {text}")

    # ── what it sends ───────────────────────────────────────────────────────────────────────────────────────────

    def request(self, ask: Ask, *, exact: bool = False) -> Wire:
        """``exact``: as if the client changed nothing of what was sampled, said nothing volatile and left no tools
        out; for knowing what a perfect server would see."""
        self._sent += not exact
        match self.shape:
            case "claude":
                return self._messages(ask, exact)
            case "codex":
                return self._responses(ask, exact)
            case "chat":
                return self._completions(ask, exact)

    def _system(self, ask: Ask) -> str:
        if ask.kind == "side":
            return "Write a title of at most five words for the conversation that begins with the given message."
        name, count = ("agent", self.head.system // 4) if ask.kind == "subagent" else (self.shape, self.head.system)
        return f"You are a coding agent. {words(name, count)}\nState of the repository: {self._snapshot} changes."

    def _tools(self) -> list[tuple[str, str]]:
        return [(name, words(name, self.head.tool)) for name in self.head.tools]

    def _name(self) -> str:
        """The session's id as its client gives it: another after a fork or, for some, after a start."""
        forked = self.thread if self.thread.startswith("fork") else ""
        return f"{self.session}-{forked}-{self._process if self.shape == 'claude' else 0}"

    def _agent(self, ask: Ask) -> str:
        return self.thread if ask.kind == "subagent" else ""

    def _messages(self, ask: Ask, exact: bool) -> Wire:
        messages: list[dict[str, Any]] = []
        for item in self.items:
            role, block = self._messages_block(item, exact)
            last = messages[-1] if messages else {}
            joins = item.role in ("reminder", "output", *ANSWER) and last.get("kind") == role
            joins = joins and not (item.role == "reminder" and last["content"][0]["type"] == "tool_result")
            if joins and (item.role != "output" or last["content"][0]["type"] == "tool_result"):
                last["content"].append(block)
            else:
                messages.append({"kind": role, "content": [block]})
        name, agent = self._name(), self._agent(ask)
        system = [] if exact else [f"x-anthropic-billing-header: cc_version=2.1.{self._sent};"]
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": MAX_TOKENS,
            "system": [{"type": "text", "text": text} for text in (*system, self._system(ask))],
            "messages": [{"role": message.pop("kind"), **message} for message in messages],
            "metadata": {"user_id": json.dumps({"session_id": name})},
            "thinking": {"type": "adaptive"},
        }
        if ask.kind == "side":
            body |= {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}
        else:
            tools: list[dict[str, Any]] = [
                {"name": n, "description": text, "input_schema": SCHEMA} for n, text in self._tools()
            ]
            if self._found:
                tools.append(
                    {"name": FOUND_TOOL, "description": "found", "input_schema": SCHEMA, "defer_loading": True}
                )
            body["tools"] = sorted(tools, key=lambda tool: str(tool["name"]))
        headers = {"user-agent": "claude-cli/2.1.332 (external, cli)", "x-claude-code-session-id": name}
        if agent:
            headers["x-claude-code-agent-id"] = agent
        return Wire("/v1/messages?beta=true", headers, body)

    def _messages_block(self, item: Item, exact: bool) -> tuple[str, dict[str, Any]]:
        match item.role:
            case "user" | "reminder":
                return "user", {"type": "text", "text": item.text}
            case "system":
                return "system", {"type": "text", "text": item.text}
            case "output":
                content = [{"type": "text", "text": item.text}]
                if item.tool:
                    content.append({"type": "tool_reference", "tool_name": item.tool})
                return "user", {"type": "tool_result", "tool_use_id": item.call, "content": content}
            case "call" if not exact:
                return "assistant", {**item.wire, "input": dict(reversed(item.wire["input"].items()))}
        return "assistant", item.wire

    def _responses(self, ask: Ask, exact: bool) -> Wire:
        items: list[dict[str, Any]] = [_message("developer", self._system(ask))]
        for item in self.items:
            match item.role:
                case "user" | "reminder":
                    items.append(_message("user", item.text))
                case "system":
                    items.append(_message("developer", item.text))
                case "output":
                    items.append({"type": "function_call_output", "call_id": item.call, "output": item.text})
                case _:
                    items.append(item.wire)
        name, agent = self._name(), self._agent(ask)
        tools = [
            {"type": "function", "name": n, "description": text, "strict": False, "parameters": SCHEMA}
            for n, text in self._tools()
        ]
        side, hidden = ask.kind == "side", ask.kind == "compaction" and not exact
        body: dict[str, Any] = {
            "model": MODEL,
            "input": items,
            "tools": [] if side or hidden else tools,
            "parallel_tool_calls": not hidden,
            "prompt_cache_key": f"{name}-title" if side else name,
            "store": False,
            "reasoning": {"summary": "auto"},
            "include": ["reasoning.encrypted_content"],
        }
        if side:
            body["text"] = {"format": {"type": "json_schema", "name": "title", "schema": {"type": "object"}}}
        about = {
            "request_kind": "compaction" if ask.kind == "compaction" else "turn",
            "thread_source": {"side": "thread_title", "subagent": "subagent"}.get(ask.kind, "user"),
        }
        headers = {
            "user-agent": "codex_exec/0.169.0",
            "session-id": name,
            "thread-id": f"{name}-{agent}" if agent else name,
            "x-codex-window-id": f"{name}:{self._process}",
            "x-codex-turn-metadata": json.dumps(about),
        }
        if agent:
            headers["x-codex-parent-thread-id"] = name
        return Wire("/v1/responses", headers, body)

    def _completions(self, ask: Ask, exact: bool) -> Wire:
        messages: list[dict[str, Any]] = [{"role": "system", "content": self._system(ask)}]
        headers = {"user-agent": "agent/1"}
        if ask.kind == "subagent":
            headers |= {"x-parent-session-id": self._name(), "x-session-id": f"{self._name()}-{self.thread}"}
        if ask.kind == "compaction":
            history = "\n".join(f"{item.role}: {_TAG.sub('', item.text)[:200]}" for item in self.items[:-1])
            messages = [
                {"role": "system", "content": "You write summaries of conversations."},
                {"role": "user", "content": f"{history}\n{self.items[-1].text} {ASKS_FOR_SUMMARY}"},
            ]
            return Wire("/v1/chat/completions", headers, {"model": MODEL, "messages": messages})
        for item in self.items:
            match item.role:
                case "user" | "reminder":
                    messages.append({"role": "user", "content": item.text})
                case "system":
                    messages.append({"role": "system", "content": item.text})
                case "output":
                    messages.append({"role": "tool", "tool_call_id": item.call, "content": item.text})
                case _:
                    _join(messages, item, exact)
        body: dict[str, Any] = {"model": MODEL, "messages": messages}
        if ask.kind == "side":
            body["max_tokens"] = 32
        else:
            body["tools"] = [
                {"type": "function", "function": {"name": name, "description": text, "parameters": SCHEMA}}
                for name, text in self._tools()
            ]
        return Wire("/v1/chat/completions", headers, body)


def _message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def _join(messages: list[dict[str, Any]], item: Item, exact: bool) -> None:
    """One assistant message holds all of an answer."""
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    match item.role:
        case "thinking":
            messages[-1]["reasoning_content"] = item.text
        case "text":
            messages[-1]["content"] += item.text
        case _:
            call = item.wire
            if not exact:
                arguments = json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":"))
                call = {**call, "function": {**call["function"], "arguments": arguments}}
            messages[-1].setdefault("tool_calls", []).append(call)


def read_answer(shape: Shape, body: dict[str, Any]) -> list[Item]:
    """The answer's blocks, from a body that is no stream."""
    match shape:
        case "claude":
            roles: dict[str, Role] = {"thinking": "thinking", "text": "text", "tool_use": "call"}
            return [
                Item(
                    roles[block["type"]],
                    str(block.get("thinking", block.get("text", ""))),
                    call=block.get("id", ""),
                    wire=block,
                )
                for block in body["content"]
            ]
        case "codex":
            return [_read_item(item) for item in body["output"]]
        case "chat":
            message = body["choices"][0]["message"]
            items = [Item("thinking", message["reasoning_content"])] if message.get("reasoning_content") else []
            items += [Item("text", message["content"])] if message.get("content") else []
            return items + [Item("call", "", call=call["id"], wire=call) for call in message.get("tool_calls") or ()]


def _read_item(item: dict[str, Any]) -> Item:
    match item["type"]:
        case "reasoning":
            return Item("thinking", "", wire=item)
        case "message":
            return Item("text", "".join(part["text"] for part in item["content"]), wire=item)
        case _:
            return Item("call", "", call=item["call_id"], wire=item)


def partial_answer(shape: Shape, thinking: str, text: str) -> list[Item]:
    """What a client keeps of an answer that it cut off."""
    items: list[Item] = []
    if thinking and shape == "claude":
        items.append(Item("thinking", thinking, wire={"type": "thinking", "thinking": thinking, "signature": ""}))
    if text and shape == "claude":
        items.append(Item("text", text, wire={"type": "text", "text": text}))
    return items
