"""Makes traces shaped like the published statistics of coding agents (TraceLab, arXiv 2606.30560), at any scale.

Of 357,161 steps: 8.8 steps and 10.8 tool calls per turn; appends of 857 tokens in the median, while most of what is
appended comes in appends of 10k and more; answers of 252; humans wait 86 s in the median, 21 min at p90, 14 h at p99;
1 tool call in 25 takes over a minute. Edits happen as often as asked for; each client makes all of its kinds in turn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from launchers.trace import Add, Ask, Edit, EditKind, Head, Restart, Say, Shape, Step, Trace, Trigger

TOOLS = ("Bash", "Edit", "Grep", "Read", "Write")
TOKENS_PER_WORD = 2.0
SYSTEM, TOOL, USER, REMINDER, SUMMARY = 6_000, 2_500, 60, 400, 1_500
APPEND_MEDIAN, APPEND_SIGMA, APPEND_MAX = 857.0, 1.85, 60_000.0
ANSWER_MEDIAN, ANSWER_SIGMA = 252.0, 0.9
CALLS_PER_STEP = 10.8 / 8.8
WAIT_MEDIAN, WAIT_SIGMA = 86.0, 2.18
SLOW_TOOL, SLOW_TOOL_SECONDS = 0.04, 120.0
SHAPES: tuple[Shape, ...] = ("claude", "codex", "chat")

EDITS: dict[Shape, tuple[EditKind, ...]] = {
    "claude": (
        *("outputs_cleared", "rewound", "summary_first", "answer_kept", "system_folded", "new_process"),
        *("thinking_dropped", "forked", "exchanges_cut", "tools_inserted", "system_changed"),
    ),
    "codex": ("answer_dropped", "summary_last", "rewound", "new_process", "forked"),
    "chat": ("outputs_cleared", "rewound", "reminders_dropped", "summary_only", "system_changed"),
}
LATE: tuple[EditKind, ...] = ("thinking_dropped", "tools_inserted", "outputs_cleared")
"""What happens between the steps of a turn, if it has more than one."""
SUMMARIES: tuple[EditKind, ...] = ("summary_first", "summary_last", "summary_only", "exchanges_cut")


@dataclass(frozen=True)
class Plan:
    """``scale`` multiplies all lengths. ``sessions`` run side by side, each of ``turns`` user turns of about ``steps``
    requests. ``edits``: share of the turns that begin with one; 0 makes a trace without edits and retries."""

    seed: int = 0
    sessions: int = 6
    turns: int = 8
    steps: float = 8.8
    scale: float = 1.0
    edits: float = 0.25
    restarts: bool = True


def generate(plan: Plan) -> Trace:
    """The same plan gives the same trace."""
    draw = random.Random(plan.seed)  # noqa: S311 (not for secrets)
    due = {shape: _endless(EDITS[shape]) for shape in SHAPES}
    sessions = []
    for number in range(plan.sessions):
        shape = SHAPES[number % len(SHAPES)]
        sessions.append(_Session(f"s{number}", shape, plan, draw, due[shape]).turns())
    steps: list[Step] = []
    while sessions:
        session = draw.choice(sessions)
        turn = next(session, None)
        if turn is None:
            sessions.remove(session)
        else:
            steps += turn
    if plan.restarts:
        third = len(steps) // 3
        steps = [
            *steps[:third],
            Restart(restart="kill"),
            *steps[third:-third],
            Restart(restart="clean"),
            *steps[-third:],
        ]
    system, tool = _words(SYSTEM * plan.scale), _words(TOOL * plan.scale)
    head = Head(seed=plan.seed, scale=plan.scale, system=system, tool=tool, tools=TOOLS)
    return Trace(head=head, steps=tuple(steps))


def _endless(kinds: tuple[EditKind, ...]) -> Iterator[EditKind]:
    while True:
        yield from kinds


def _words(tokens: float) -> int:
    return max(2, round(tokens / TOKENS_PER_WORD))


@dataclass
class _Session:
    """One user's session. ``due``: the kinds of edit that its client makes next."""

    name: str
    shape: Shape
    plan: Plan
    draw: random.Random
    due: Iterator[EditKind]
    thread: str = ""

    def turns(self) -> Iterator[list[Step]]:
        owed = 0.0
        for number in range(self.plan.turns):
            owed += self.plan.edits if number else 0.0
            edit = next(self.due) if owed >= 1 else None
            owed -= edit is not None
            yield [*self._turn(number, edit), *self._around(number)]

    def _turn(self, number: int, edit: EditKind | None) -> list[Step]:
        before, edits = self._edit(edit, number) if edit else ([], ())
        add = [self._add("user", USER)]
        if number == 0 and self.shape != "codex":
            add.append(self._add("reminder", REMINDER))
        if number == 0 and self.shape == "claude":
            add.append(self._add("system", REMINDER))
        count = 1 + round(self.draw.expovariate(1 / max(self.plan.steps - 1, 0.1)))
        idle = self.draw.lognormvariate(math.log(WAIT_MEDIAN), WAIT_SIGMA) if number else 0.0
        trigger: Trigger = "user" if number else "first"
        late: tuple[Edit, ...] = ()
        if edit in LATE and count > 1:
            edits, late = late, edits
        steps: list[Step] = []
        for left in reversed(range(count)):
            say = self._call() if left else Say(text=self._answer())
            edits += (Edit(kind="reminder_moved"),) if self.shape == "chat" and (number or steps) else ()
            steps.append(self._ask(trigger, idle=round(idle, 1), edits=edits, add=tuple(add), say=say))
            trigger, edits, late = "tool", late, ()
            idle = SLOW_TOOL_SECONDS if self.draw.random() < SLOW_TOOL else 0.0
            add = [self._output(len(say.calls)) for _ in say.calls]
        if self.draw.random() < self.plan.edits / 2:
            steps += self._retry(steps.pop())
        return [*before, *steps]

    def _around(self, number: int) -> list[Step]:
        """A title after the first turn; now and then a sub-agent with a history of its own."""
        if number == 0:
            return [self._ask("first", thread="title", kind="side", add=(self._add("user", 40),), say=Say(text=4))]
        if self.draw.random() > 0.15:
            return []
        agent = {"thread": f"agent{number}", "kind": "subagent"}
        first = self._ask("first", **agent, add=(self._add("user", 400),), say=self._call())
        outputs = tuple(self._output(len(first.say.calls)) for _ in first.say.calls)
        return [first, self._ask("tool", **agent, add=outputs, say=Say(text=self._answer()))]

    def _edit(self, kind: EditKind, number: int) -> tuple[list[Step], tuple[Edit, ...]]:
        """The requests that come before an edit, and the edits of the turn's first request."""
        if kind in SUMMARIES:
            cut = (Edit(kind=kind, count=1),) if kind == "exchanges_cut" else ()
            say = Say(text=_words(SUMMARY * self.plan.scale))
            ask = self._ask("user", kind="compaction", edits=cut, add=(self._add("user", 300),), say=say)
            return [ask], (Edit(kind="summary_first" if cut else kind),)
        if kind in ("answer_kept", "answer_dropped"):
            say = Say(thinking=8, text=60)
            return [self._ask("user", add=(self._add("user", USER),), say=say, stop="decode")], (Edit(kind=kind),)
        if kind == "forked":
            of, self.thread = self.thread, f"fork{number}"
            return [], (Edit(kind=kind, of=of, count=1),)
        return [], (Edit(kind=kind, count=2),)

    def _retry(self, ask: Step) -> list[Step]:
        """The client hangs up and sends the same again."""
        if not isinstance(ask, Ask):
            return [ask]
        stopped = ask.model_copy(update={"stop": self.draw.choice(("prefill", "decode"))})
        return [stopped, ask.model_copy(update={"trigger": "retry", "idle": 0.0, "edits": (), "add": ()})]

    def _ask(self, trigger: Trigger, **fields: object) -> Ask:
        """In this session's present conversation unless said otherwise."""
        of = {"session": self.name, "thread": self.thread, "shape": self.shape, "trigger": trigger}
        return Ask.model_validate({**of, **fields})

    def _add(self, role: str, tokens: float) -> Add:
        return Add.model_validate({"role": role, "words": _words(tokens * self.plan.scale)})

    def _output(self, shares: int) -> Add:
        size = min(self.draw.lognormvariate(math.log(APPEND_MEDIAN), APPEND_SIGMA), APPEND_MAX)
        return self._add("output", size / shares)

    def _answer(self) -> int:
        return _words(self.draw.lognormvariate(math.log(ANSWER_MEDIAN), ANSWER_SIGMA) * min(1.0, 2 * self.plan.scale))

    def _call(self) -> Say:
        calls = 1 + (self.draw.random() < CALLS_PER_STEP - 1)
        thinking = self._answer() if self.draw.random() < 0.6 else 0
        names = tuple(self.draw.choice(TOOLS) for _ in range(calls))
        return Say(thinking=thinking, text=6 if self.draw.random() < 0.4 else 0, calls=names)
