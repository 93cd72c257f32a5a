"""Recorded agent traffic: who sent what and when, as JSONL. Texts are stored as lengths and made anew from their names,
so a trace is small, holds nobody's code, and is the same everywhere.

One header, then one step a line in the order of time: a request, or something that happens to the server. A request
holds what its client changed since its last one: ``edits`` of the history, then ``add`` at its end, and what the model
then says.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sessions.store.words import why

Shape = Literal["claude", "codex", "chat"]
"""What the wire looks like: Claude Code over Messages, Codex over Responses, others over Chat Completions."""

Kind = Literal["main", "side", "compaction", "subagent"]

Trigger = Literal["first", "user", "tool", "retry"]
"""Why the client sends: its first request, a user wrote, tools have run, or the last request did not end well."""

EditKind = Literal[
    "tools_inserted",  # E1: a search found a tool: it is listed, and referred to by the search's output
    "summary_first",  # E2: a summary in place of the history, then the last exchange as it was
    "thinking_dropped",  # E3: the last answer's thinking is left out, and a reminder follows
    "exchanges_cut",  # E4: the prompt was too long: the last exchanges are taken off
    "system_folded",  # E5: a system message in mid-conversation moves into the user's
    "system_changed",  # E6, E14: the end of the system text is a new snapshot
    "summary_last",  # E9: all user messages stay, a summary follows them, the rest is gone
    "answer_dropped",  # E10: what was said until the interruption is gone, its reasoning stays
    "answer_kept",  # E11: what was said until the interruption stays
    "outputs_cleared",  # E12: older tool outputs become a constant
    "summary_only",  # E13: only a summary and the last exchange are left
    "reminders_dropped",  # E14: reminders are deleted from older user messages
    "reminder_moved",  # E16: the trailing reminder is removed from its old place and appended anew
    "rewound",  # back to before an older user message
    "forked",  # another conversation goes on from this one's beginning
    "new_process",  # the client was started again and has other ids
]
# E7 (a head line that changes with every request) and re-serialised arguments are what the claude shape always does;
# E8 and E15 are requests of kind compaction; E17 are conversations of their own (thread).


class TraceError(ValueError):
    """A trace that cannot be used; the message names the line."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Head(_Strict):
    """``system`` and ``tool`` in words: the system text, and each of the ``tools``' descriptions."""

    trace: Literal[1] = 1
    seed: int
    scale: float
    system: int
    tool: int
    tools: tuple[str, ...]


class Edit(_Strict):
    """``count``: outputs kept, exchanges cut, user messages rewound. ``of``: the thread that is forked."""

    kind: EditKind
    count: int = 0
    of: str = ""


class Add(_Strict):
    """One message at the end of the history; its length in words."""

    role: Literal["user", "output", "reminder", "system"]
    words: int


class Say(_Strict):
    """What the model answers: words of thinking and text, and the tools it calls."""

    thinking: int = 0
    text: int = 0
    calls: tuple[str, ...] = ()


class Ask(_Strict):
    """One request. ``thread`` names a conversation of the session, empty: its main one. ``idle``: the client waited so
    long before it, in seconds. ``stop``: the client hangs up while the prompt is computed, or while the answer
    comes."""

    session: str
    thread: str = ""
    shape: Shape
    kind: Kind = "main"
    trigger: Trigger
    idle: float = 0.0
    edits: tuple[Edit, ...] = ()
    add: tuple[Add, ...] = ()
    say: Say
    stop: Literal["", "prefill", "decode"] = ""


class Restart(_Strict):
    """The server ends, killed or asked to, and is started again."""

    restart: Literal["kill", "clean"]


Step = Ask | Restart
_STEP: TypeAdapter[Step] = TypeAdapter(Annotated[Ask | Restart, Field(union_mode="left_to_right")])


class Trace(_Strict):
    head: Head
    steps: tuple[Step, ...]

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Raises TraceError."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TraceError(f"cannot read the trace {path}: {why(error)}") from error
        if not lines:
            raise TraceError(f"{path} is empty")
        steps: list[Step] = []
        number = 1
        try:
            head = Head.model_validate_json(lines[0])
            for line in lines[1:]:
                number += 1
                steps.append(_STEP.validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise TraceError(f"{path}, line {number}: {where}: {first['msg']}") from error
        return cls(head=head, steps=tuple(steps))

    def save(self, path: Path) -> None:
        rows: list[BaseModel] = [self.head, *self.steps]
        path.write_text(
            "".join(row.model_dump_json(exclude_defaults=row is not self.head) + "\n" for row in rows), encoding="utf-8"
        )


# ── texts ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_VOCABULARY = """
value index return cache token error state layer buffer result config check update parse request
module session prefix block write read file line test import class self None True False list dict
path name count total start end before after while until where which should would because there
other first last next old new fix bug fails passes found missing wrong expected output input data
the a of to in is that for it with as on
"""
_WORDS = _VOCABULARY.split()


def words(name: str, count: int) -> str:
    """``count`` words that look a little like code and prose, the same for the same name."""
    draw = random.Random(name)  # noqa: S311 (not for secrets)
    picked: list[str] = []
    for _ in range(count):
        word = draw.choice(_WORDS)
        match draw.randrange(12):
            case 0:
                word = f"{word}_{draw.choice(_WORDS)}({draw.randrange(1000)})"
            case 1:
                word = f"\n{word}:"
            case 2:
                word = f"{word}={draw.randrange(10**6)}"
        picked.append(word)
    return " ".join(picked)
