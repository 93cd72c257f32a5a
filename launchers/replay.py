"""Replays a trace against a server, and compares what it computed with what was new.

What is new is found out here, not believed: each prompt is rendered as a server would that forgets nothing, and
compared with everything that was computed before.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
from numpy.typing import NDArray

from launchers.replay_chat import Chat, Item, Wire, partial_answer, read_answer
from launchers.trace import Ask, Restart, Say, Shape, Trace, words
from parsers.conversation import Sampled, Text, Thinking, ToolCall
from parsers.events import Boundary
from parsers.load import Family, Prompt
from server.protocols import chat, responses
from server.protocols.anthropic import ANTHROPIC
from server.script import SayItem, Script

IDLE_SECONDS = 0.25
"""Waits are cut to this: long enough for work that a server does while nobody asks."""
QUIET_SECONDS = 6.0
"""The pause before a kill: what was computed just before may be unwritten by design."""
TIMEOUT = 120.0
_PROTOCOLS = {"claude": ANTHROPIC, "codex": responses.PLAIN, "chat": chat.reader(lambda _: [])}

Ids = NDArray[np.int64]


class ReplayError(RuntimeError):
    """The server answered what it should not have."""


@dataclass(frozen=True)
class Row:
    """One request. ``fresh``: tokens of its prompt that nobody had computed before. ``append``: everything that this
    conversation computed before is still a part of it. ``expected``: the prompt's length as rendered here.
    ``stopped``: the client hung up, and what was computed is unknown."""

    step: int
    ask: Ask
    restarted: bool
    prompt: int
    resumed: int
    host: int
    disk: int
    cause: str
    fresh: int
    append: bool
    expected: int
    seconds: float
    stopped: bool

    @property
    def computed(self) -> int:
        return self.prompt - self.resumed

    @property
    def excess(self) -> int:
        return max(0, self.computed - self.fresh)

    @property
    def edited(self) -> bool:
        return bool(self.ask.edits) or self.ask.trigger == "retry"


class Server(Protocol):
    @property
    def url(self) -> str: ...

    def restart(self, how: str) -> bool:
        """False if this server cannot be restarted."""


class Known:
    """Token sequences that were computed."""

    def __init__(self) -> None:
        self._all: list[Ids] = []
        self._latest: dict[tuple[str, str], Ids] = {}

    def common(self, ids: Ids) -> int:
        """How many of the leading tokens were computed before; at least the last one must be computed anew."""
        return min(max((_common(ids, other) for other in self._all), default=0), len(ids) - 1)

    def continues(self, name: tuple[str, str], ids: Ids) -> bool:
        latest = self._latest.get(name)
        return latest is None or _common(ids, latest) == len(latest)

    def add(self, name: tuple[str, str], ids: Ids) -> None:
        self._all.append(ids)
        self._latest[name] = ids


def _common(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


class Replay:
    """``family``: of the model that is served."""

    def __init__(self, trace: Trace, family: Family) -> None:
        self.trace = trace
        self.rows: list[Row] = []
        self.skipped_restarts = 0
        self._family = family
        self._known = Known()
        self._sampled: dict[int, Sampled] = {}

    def run(self, server: Server, show: Callable[[int, int], None]) -> None:
        """Raises ReplayError, httpx.HTTPError."""
        chats: dict[tuple[str, str], Chat] = {}
        restarted: set[str] | None = None
        with httpx.Client(timeout=TIMEOUT, trust_env=False) as http:
            for number, step in enumerate(self.trace.steps):
                show(number, len(self.trace.steps))
                if isinstance(step, Restart):
                    if step.restart == "kill":
                        time.sleep(QUIET_SECONDS)
                    if server.restart(step.restart):
                        restarted = set()
                    else:
                        self.skipped_restarts += 1
                    continue
                time.sleep(min(step.idle, IDLE_SECONDS))
                conversation = advance(self.trace, chats, number, step)
                first = restarted is not None and step.session not in restarted
                if restarted is not None:
                    restarted.add(step.session)
                self._ask(http, server.url, number, step, conversation, restarted=first)

    def _ask(self, http: httpx.Client, url: str, number: int, ask: Ask, chat: Chat, *, restarted: bool) -> None:
        prompt, say = self._render(chat, ask), say_items(self.trace, number, ask.say)
        ids = np.array(prompt.ids, np.int64)
        name = (ask.session, ask.thread) if ask.kind != "compaction" else (ask.session, f"compaction {number}")
        wire = chat.request(ask)
        started = time.monotonic()
        if ask.stop:
            reuse, answer = _stopped(http, url, wire, ask)
        else:
            reuse, answer = _whole(http, url, wire, ask)
        fresh = len(ids) - self._known.common(ids)
        self.rows.append(
            Row(
                step=number,
                ask=ask,
                restarted=restarted,
                prompt=sum(int(reuse[part]) for part in ("resumed", "replayed", "new")),
                resumed=int(reuse["resumed"]),
                host=int(reuse.get("host", 0)),
                disk=int(reuse.get("disk", 0)),
                cause=reuse["cause"],
                fresh=fresh,
                append=not ask.edits and self._known.continues(name, ids),
                expected=len(ids),
                seconds=time.monotonic() - started,
                stopped=bool(ask.stop),
            )
        )
        if ask.stop:
            chat.answer(-1, [] if _again(self.trace, number) else answer)
        else:
            chat.answer(number, answer)
            tokens = Script(()).tokens(self._family, prompt, say)
            self._known.add(name, np.concatenate((ids, np.array(tokens[:-1], np.int64))))
            self._sampled[number] = self._exact(prompt, tokens)

    def _render(self, conversation: Chat, ask: Ask) -> Prompt:
        """The prompt as a server makes it that knows every answer's exact tokens."""
        wire = conversation.request(ask, exact=True)
        inbound = _PROTOCOLS[ask.shape].read(wire.body, wire.headers, "")
        turns = list(inbound.conversation.turns)
        places = [at for at, turn in enumerate(turns) if turn.role == "assistant"]
        answers = conversation.answers()
        if len(places) == len(answers):
            for at, number in zip(places, answers, strict=True):
                turns[at] = dataclasses.replace(turns[at], sampled=self._sampled.get(number))
        whole = dataclasses.replace(inbound.conversation, turns=tuple(turns))
        return self._family.render(whole, thinking=inbound.options.thinking, effort=inbound.options.effort)

    def _exact(self, prompt: Prompt, tokens: tuple[int, ...]) -> Sampled:
        parser = self._family.parser(prompt, ())
        for token in tokens:
            ends = [
                event for event in parser.feed(token) if isinstance(event, Boundary) and event.kind == "thinking_end"
            ]
            if ends:
                return Sampled(tokens, ends[0].token, opener=prompt.opener)
        return Sampled(tokens, opener=prompt.opener)


def advance(trace: Trace, chats: dict[tuple[str, str], Chat], number: int, ask: Ask) -> Chat:
    """The conversation as its client holds it when it sends the trace's step ``number``."""
    name = (ask.session, ask.thread)
    for edit in ask.edits:
        if edit.kind == "forked":
            chats[name] = chats[ask.session, edit.of].fork(ask.thread, edit.count)
        else:
            chats[name].edit(edit)
    conversation = chats.setdefault(name, Chat(trace.head, ask.shape, ask.session, ask.thread))
    conversation.add(number, ask.add)
    return conversation


def say_items(trace: Trace, number: int, say: Say) -> list[SayItem]:
    """What the model says at the trace's step ``number``."""
    name = f"{trace.head.seed}.{number}"
    items: list[SayItem] = [Thinking(words(f"{name}.thinking", say.thinking))] if say.thinking else []
    if say.text or not say.calls:
        items.append(Text(words(f"{name}.text", max(say.text, 1))))
    for at, call in enumerate(say.calls):
        arguments = {"path": f"src/{number}.py", "limit": number, "note": words(f"{name}.{at}", 4)}
        items.append(ToolCall("", call, json.dumps(arguments)))
    return items


def script_lines(trace: Trace) -> Iterator[str]:
    """The rules by which ``ft serve --script`` answers what the trace's clients ask."""
    chats: dict[tuple[str, str], Chat] = {}
    rules: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for number, ask in enumerate(trace.steps):
        if isinstance(ask, Restart):
            continue
        conversation = advance(trace, chats, number, ask)
        say = say_items(trace, number, ask.say)
        rules.setdefault(conversation.position(), [_rule_item(item) for item in say])
        if not ask.stop:
            conversation.answer(number, [_planned(item, number, at) for at, item in enumerate(say)])
        elif ask.stop == "decode" and not _again(trace, number):
            conversation.answer(-1, partial_answer(ask.shape, "", "partial"))
    for (tag, step), said in rules.items():
        yield json.dumps({"when": {"after_user": rf"\({tag}\) ", "step": step}, "say": said}, ensure_ascii=False)


def _again(trace: Trace, number: int) -> bool:
    """Whether the same request is sent again next."""
    after = trace.steps[number + 1] if number + 1 < len(trace.steps) else None
    return isinstance(after, Ask) and after.trigger == "retry"


def _planned(item: SayItem, number: int, at: int) -> Item:
    match item:
        case Thinking(text=text):
            return Item("thinking", text)
        case Text(text=text):
            return Item("text", text)
    return Item("call", "", call=f"{number}.{at}")


def _rule_item(item: SayItem) -> dict[str, Any]:
    match item:
        case Thinking(text=text):
            return {"thinking": text}
        case Text(text=text):
            return {"text": text}
        case ToolCall(name=name, arguments=arguments):
            return {"tool_call": {"name": name, "args": json.loads(arguments)}}
    raise ValueError("a trace says nothing else")


# ── HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _whole(http: httpx.Client, url: str, wire: Wire, ask: Ask) -> tuple[dict[str, str], list[Item]]:
    response = http.post(url + wire.path, headers=wire.headers, json=wire.body)
    if response.status_code != 200:
        raise ReplayError(f"{ask.session} {wire.path}: {response.status_code} {response.text[:500]}")
    return _reuse(response), read_answer(ask.shape, response.json())


def _stopped(http: httpx.Client, url: str, wire: Wire, ask: Ask) -> tuple[dict[str, str], list[Item]]:
    """Hang up once the headers are there, or once something of the answer is visible."""
    text: list[str] = []
    with http.stream("POST", url + wire.path, headers=wire.headers, json={**wire.body, "stream": True}) as response:
        if response.status_code != 200:
            response.read()
            raise ReplayError(f"{ask.session} {wire.path}: {response.status_code} {response.text[:500]}")
        if ask.stop == "decode":
            for line in response.iter_lines():
                if line.startswith("data: {") and (said := _visible(ask.shape, json.loads(line[6:]))):
                    text.append(said)
                    if len(text) == 4:
                        break
    return _reuse(response), partial_answer(ask.shape, "", "".join(text))


def _visible(shape: Shape, event: dict[str, Any]) -> str:
    match shape:
        case "claude":
            return str(event.get("delta", {}).get("text", "")) if event["type"] == "content_block_delta" else ""
        case "codex":
            return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""
        case "chat":
            return str(event["choices"][0]["delta"].get("content") or "") if event["choices"] else ""


def _reuse(response: httpx.Response) -> dict[str, str]:
    header = response.headers["x-ft-reuse"]
    if header == "pending":
        return {"resumed": "0", "replayed": "0", "new": "0", "cause": "pending"}
    return dict(part.strip().split("=", 1) for part in header.split(","))


def write_script(trace: Trace, path: Path) -> None:
    path.write_text("".join(line + "\n" for line in script_lines(trace)), encoding="utf-8")
