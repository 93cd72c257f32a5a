"""Loops of a template over messages go on where an earlier rendering of the same messages left off.

A chat template is a program that reads the whole conversation for each prompt. What one iteration of its outer loops
writes depends on the message, on what was carried over from the iterations before (attributes of namespaces), and on
what else the body reads. ``analyse`` finds out what that is. Where all of it is of a kind that can be compared, the
loop is rewritten so that iterations that would read the same again are left out: the text they wrote stands in their
place, and the namespaces get the values that they had behind them. A loop with anything else in it stays as it is.

Messages are compared by identity: whoever renders again hands over the very objects (``messages``).

What a body may read, and when an earlier iteration would read the same:

* the message, the one before and the one behind it (``loop.previtem``, ``loop.nextitem``, ``loop.last``): they are the
  same objects; its position (``loop.first``, ``loop.index``, ``loop.index0``): always;
* ``other[loop.index0 + 1]`` and ``other[0]``: each place that was read has the same object, and lies not beyond an end;
* a comparison of the position with a number: below both the number then and now;
* attributes of namespaces and any other variable: simple values that are equal when the loop begins, or one object.
  Macros are looked into.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.environment import Environment, Template
from jinja2.utils import Namespace

from parsers.rope import Rope

RUN = "ft_loops"
_AT = "ft_at"
"""Names of ours in rewritten templates."""
_PLACES = {"index0": 0, "index": 1}
_LOOP = frozenset(("first", "last", "index", "index0", "previtem", "nextitem"))
_ORDER = frozenset(("gt", "gteq", "lt", "lteq"))
_UNSTEADY = frozenset(("random", "lipsum", "self", "caller", "varargs", "kwargs", RUN, _AT))
_PLAIN: tuple[type[nodes.Node], ...] = (
    *(nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Assign, nodes.AssignBlock, nodes.FilterBlock),
    *(nodes.With, nodes.Name, nodes.NSRef, nodes.Const, nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword),
    *(nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call, nodes.Getitem, nodes.Getattr, nodes.Slice, nodes.Concat),
    *(nodes.Compare, nodes.Operand, nodes.BinExpr, nodes.UnaryExpr),
)
_SCALARS = (type(None), bool, int, float, str)
_NEVER = 1 << 60
_KEPT = 8
"""Renderings remembered of each loop."""
_ITEMS = 1 << 15
"""Messages of them, all together."""
_NOTHING = object()
_Field = tuple[str, str]
"""A variable and its attribute; without one ("") the variable itself."""


@dataclass(frozen=True)
class Reads:
    """What the body of a loop reads beside its message, and the attributes that it writes."""

    values: tuple[_Field, ...]
    limits: tuple[_Field, ...]
    windows: tuple[str, ...]
    writes: tuple[_Field, ...]

    @property
    def names(self) -> list[str]:
        fields = (*self.values, *self.limits, *self.writes)
        return list(dict.fromkeys((*(name for name, _ in fields), *self.windows)))


@dataclass
class Record:
    """One rendering of a loop. ``begins`` and ``states``: for each iteration, and for the end, where its text begins in
    the loop's, and the written attributes before it. ``reach``: for each iteration, the last place of a window that was
    read up to its end. The loop's text begins at ``start`` in the whole ``text``."""

    items: list[Any]
    values: tuple[object, ...]
    limits: tuple[object, ...]
    windows: tuple[object, ...]
    begins: array[int]
    states: list[tuple[object, ...]]
    reach: array[int]
    text: Rope = Rope()  # noqa: RUF009 (nobody changes one)
    start: int = 0


class At:
    """``loop``, as a rewritten body sees it. Templates may not look at what begins with an underscore."""

    def __init__(self, items: list[Any], environment: Environment, reached: int) -> None:
        self.index0 = -1
        self._items = items
        self._environment = environment
        self._reached = reached

    @property
    def index(self) -> int:
        return self.index0 + 1

    @property
    def first(self) -> bool:
        return self.index0 == 0

    @property
    def last(self) -> bool:
        return self.index0 >= len(self._items) - 1

    @property
    def previtem(self) -> Any:
        return self._items[self.index0 - 1] if self.index0 else self._environment.undefined("there is no previous item")

    @property
    def nextitem(self) -> Any:
        return self._environment.undefined("there is no next item") if self.last else self._items[self.index0 + 1]

    def item(self, window: Any, place: int) -> Any:
        """``window[place]``; that it was read is remembered."""
        inside = type(window) is list and 0 <= place < len(window)
        self._reached = max(self._reached, place if inside else _NEVER)
        return self._environment.getitem(window, place)


class Loops:
    """The loops of one template, and what is remembered of them."""

    def __init__(self, environment: Environment, template: nodes.Template) -> None:
        """Rewrites the template."""
        self.environment = environment
        self._reads: list[Reads] = []
        self._known: list[deque[Record]] = []
        self._lock = Lock()
        macros = {macro.name: macro for macro in template.body if isinstance(macro, nodes.Macro)}
        stored = [name.name for name in template.find_all(nodes.Name) if name.ctx == "store"]
        names = [macro.name for macro in template.find_all(nodes.Macro)]
        self._macros = {name: macro for name, macro in macros.items() if names.count(name) == 1 and name not in stored}
        if not {RUN, _AT} & {name.name for name in template.find_all(nodes.Name)}:
            template.body = self._rewritten(template.body)
            template.set_environment(environment)

    def text(self, template: Template, variables: Mapping[str, object]) -> Rope:
        """The rendering. Raises what the template raises."""
        run = Run(self)
        told = {**variables, RUN: run} if self._reads else {**variables}
        return run._text(template.root_render_func(template.new_context(told)))

    def _rewritten(self, body: list[nodes.Node]) -> list[nodes.Node]:
        """Those that the template itself or a condition in it contains."""
        out: list[nodes.Node] = []
        for node in body:
            if isinstance(node, nodes.If):
                node.body, node.else_ = self._rewritten(node.body), self._rewritten(node.else_)
                for one in node.elif_:
                    one.body = self._rewritten(one.body)
            elif isinstance(node, nodes.For) and (reads := analyse(node, self._macros)) is not None:
                out.append(self._entered(node, reads))
            out.append(node)
        return out

    def _entered(self, loop: nodes.For, reads: Reads) -> nodes.Node:
        """What stands before the loop, which begins later."""
        number = nodes.Const(len(self._reads))
        self._reads.append(reads)
        self._known.append(deque(maxlen=_KEPT))
        loop.body = [_replaced(node) for node in loop.body]
        loop.target = nodes.Tuple([loop.target, nodes.Name(_AT, "store")], "store")
        values: list[nodes.Expr] = [nodes.Name(name, "load") for name in reads.names]
        enter = _call("enter", number, loop.iter, nodes.Tuple(values, "load"))
        loop.iter = _call("rest", number)
        return nodes.Output([enter]).set_lineno(loop.lineno)

    def reads(self, number: int) -> Reads:
        return self._reads[number]

    def known(self, number: int) -> list[Record]:
        """The latest first."""
        with self._lock:
            return [*reversed(self._known[number])]

    def remember(self, number: int, record: Record) -> None:
        with self._lock:
            known = self._known[number]
            known.append(record)
            while sum(len(one.items) for one in known) > _ITEMS:
                known.popleft()

    def forget(self) -> None:
        with self._lock:
            for records in self._known:
                records.clear()


@dataclass
class _Open:
    """A loop in the rendering that goes on: ``start`` is where its text begins in all that was written."""

    record: Record
    items: list[Any]
    skipped: int
    start: int
    written: list[tuple[Namespace, str]]


class Run:
    """One rendering, in which rewritten templates ask for what follows."""

    def __init__(self, loops: Loops) -> None:
        self._loops = loops
        self._length = 0
        """Of the text so far."""
        self._open: dict[int, _Open] = {}
        self._left_out: tuple[Record, int] | None = None

    def _text(self, pieces: Iterable[str]) -> Rope:
        """All pieces, which the template yields as it goes on. Where it comes to its end, its loops are remembered."""
        text, out = Rope(), list[str]()
        for piece in pieces:
            if self._left_out is not None:
                past, size = self._left_out
                text, out, self._left_out = _gone_on(text + "".join(out), past, size), [], None
                self._length += size
            out.append(piece)
            self._length += len(piece)
        text += "".join(out)
        for number, one in self._open.items():
            if len(one.record.reach) == len(one.record.items):
                one.record.text, one.record.start = text, one.start
                self._loops.remember(number, one.record)
        return text

    def enter(self, number: int, items: Any, values: Sequence[object]) -> str:
        """What the template yields before the loop, when the iterations that are left out are taken for done."""
        reads = self._loops.reads(number)
        found = dict(zip(reads.names, values, strict=True))
        listed = items if type(items) is list else list(items)
        now = Record(
            [*listed],  # a template may change its own list, in the loop or later
            (*(_value(found, one) for one in reads.values), *_aliases(values)),
            tuple(_value(found, one) for one in reads.limits),
            tuple(_copied(found[name]) for name in reads.windows),
            *(array("q"), [], array("q")),
        )
        written = [(space, name) for one, name in reads.writes if type(space := found[one]) is Namespace]
        skipped, past = 0, now
        for one in self._loops.known(number):
            more = skipped < min(len(one.items), len(now.items)) and one.items[skipped] is now.items[skipped]
            if more and (count := _equal(one, now)) > skipped:
                skipped, past = count, one
        if skipped:
            now.begins, now.states, now.reach = past.begins[:skipped], past.states[:skipped], past.reach[:skipped]
            self._left_out = past, past.begins[skipped]
            for (space, name), value in zip(written, past.states[skipped], strict=True):
                space[name] = value
        self._open[number] = _Open(now, listed, skipped, self._length, written)
        return ""

    def rest(self, number: int) -> Iterator[tuple[Any, At]]:
        """The iterations that are not left out."""
        one = self._open[number]
        record, items = one.record, one.items
        at = At(items, self._loops.environment, record.reach[-1] if record.reach else -1)
        at.index0 = one.skipped - 1
        while at.index < len(items):
            at.index0 += 1
            self._begins(one, at)
            yield items[at.index0], at
            record.reach.append(at._reached)
        self._begins(one, at)

    def _begins(self, one: _Open, at: At) -> None:
        """An iteration, or what follows the last one."""
        record, state = one.record, tuple([_attribute(space, name) for space, name in one.written])
        record.begins.append(self._length - one.start)
        same = bool(record.states) and all(map(operator.is_, state, record.states[-1]))
        record.states.append(record.states[-1] if same else state)
        if not all(type(value) in _SCALARS for value in state):
            at._reached = _NEVER
            if record.reach:
                record.reach[-1] = _NEVER


OWN: Mapping[type, frozenset[str]] = {At: _LOOP | {"item"}, Run: frozenset(("enter", "rest"))}
"""What rewritten templates ask for."""


def _gone_on(text: Rope, past: Record, size: int) -> Rope:
    """The text, and ``size`` characters of the loop that was written in the ``past``."""
    end = past.start + size
    if len(text) == past.start and past.text.begins_with(text):
        return past.text.upto(end)
    return text + past.text.text(past.start, end)


def _value(found: Mapping[str, object], one: _Field) -> object:
    name, attribute = one
    value = found[name]
    return _attribute(value, attribute) if attribute and type(value) is Namespace else value


def _copied(value: object) -> object:
    return [*value] if isinstance(value, list) else None


def _aliases(values: Sequence[object]) -> Iterator[int]:
    """Which of them are one namespace: what is written to it under one name is read under the other."""
    spaces = [id(value) for value in values if type(value) is Namespace]
    return map(spaces.index, spaces)


def _attribute(space: object, name: str) -> object:
    return getattr(space, name, _NOTHING)


def _equal(past: Record, now: Record) -> int:
    """How many iterations would do the same again."""
    if not all(map(_same, past.values, now.values)):
        return 0
    common = _common(past.items, now.items)
    windows = [_common(one, other) for one, other in zip(past.windows, now.windows, strict=True)]
    last = common - (not len(past.items) == len(now.items) == common)  # it may look at what is behind it
    count = min(last, bisect_left(past.reach, min(windows, default=_NEVER)))
    for one, other in zip(past.limits, now.limits, strict=True):
        if not _same(one, other):
            count = min(count, one - 1, other - 1) if type(one) is int and type(other) is int else 0
    return max(count, 0)


def _same(one: object, other: object) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return repr(one) == repr(other)  # 0.0 is equal to -0.0, and written differently
    return isinstance(one, Undefined) or (type(one) in _SCALARS and one == other)


def _common(one: object, other: object) -> int:
    """How many objects both lists begin with."""
    if type(one) is not list or type(other) is not list:
        return 0
    same = [*map(operator.is_, one, other)]
    return len(same) if all(same) else same.index(False)


# ── what a body reads ───────────────────────────────────────────────────────────────────────────────────────────────


def analyse(loop: nodes.For, macros: Mapping[str, nodes.Macro]) -> Reads | None:
    """None where something is read, or done, that cannot be compared."""
    if loop.test is not None or loop.else_ or loop.recursive or not isinstance(loop.target, nodes.Name):
        return None
    analysis = _Analysis(macros, loop.target.name)
    if not all([analysis.allows(node, inner=False) for node in loop.body]):
        return None
    values = analysis.values - {(loop.target.name, "")}
    if any(name == loop.target.name for name, _ in analysis.limits | analysis.writes) or analysis.rebound:
        return None
    limits = analysis.limits - values - analysis.writes
    values |= (analysis.limits | analysis.writes) - limits
    return Reads(
        tuple(sorted(values)), tuple(sorted(limits)), tuple(sorted(analysis.windows)), tuple(sorted(analysis.writes))
    )


class _Analysis:
    def __init__(self, macros: Mapping[str, nodes.Macro], target: str) -> None:
        self.values: set[_Field] = set()
        self.limits: set[_Field] = set()
        self.windows: set[str] = set()
        self.writes: set[_Field] = set()
        self.rebound = False
        """The message's name gets another value."""
        self._macros, self._target = macros, target
        self._seen: set[str] = set()

    def allows(self, node: nodes.Node, inner: bool) -> bool:
        """``inner``: inside another loop, whose ``loop`` is another one."""
        if not isinstance(node, _PLAIN):
            return inner and type(node).__name__ in ("Break", "Continue")
        match node:
            case nodes.Name():
                return self._name(node, inner)
            case nodes.NSRef():
                self.writes.add((node.name, node.attr))
                return True
            case nodes.Filter(name="random"):
                return False
            case nodes.Getattr(node=nodes.Name(name="loop")) if not inner:
                return node.attr in _LOOP
            case nodes.Getattr(node=nodes.Name() as name) if name.name != self._target:
                return self._field(name, node.attr, inner)
            case nodes.Getitem(node=nodes.Name() as name) if not inner and _place(node.arg):
                self.windows.add(name.name)
                return name.name not in (*_UNSTEADY, "loop", self._target)
            case nodes.Compare() if not inner and (limit := _limit(node)) is not None:
                self.limits.add(limit)
                return limit[0] not in _UNSTEADY
            case nodes.For():
                outside = [node.iter, *node.else_]
                inside = [node.target, *node.body, *([node.test] if node.test is not None else [])]
                told = any(name.name == "loop" for name in _names(node.test))
                return not told and all(
                    [*(self.allows(one, inner) for one in outside), *(self.allows(one, True) for one in inside)]
                )
        return all([self.allows(child, inner) for child in node.iter_child_nodes()])

    def _name(self, node: nodes.Name, inner: bool) -> bool:
        if node.name in _UNSTEADY or (node.name == "loop" and not inner):
            return False
        if node.ctx != "load":
            self.rebound |= node.name == self._target
            return True
        if node.name == "loop":
            return True
        macro = self._macros.get(node.name)
        if macro is None:
            self.values.add((node.name, ""))
            return True
        if node.name in self._seen:
            return True
        self._seen.add(node.name)
        own = {argument.name for argument in macro.args}
        foreign = any(name.name == self._target for name in macro.find_all(nodes.Name)) and self._target not in own
        return not foreign and all([self.allows(one, True) for one in (*macro.defaults, *macro.body)])

    def _field(self, name: nodes.Name, attribute: str, inner: bool) -> bool:
        if name.name in self._macros or name.name == "loop":
            return self._name(name, inner)
        self.values.add((name.name, attribute))
        return name.name not in _UNSTEADY


def _names(node: nodes.Node | None) -> list[nodes.Name]:
    if node is None:
        return []
    return [node] if isinstance(node, nodes.Name) else list(node.find_all(nodes.Name))


def _position(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Getattr)
        and node.attr in _PLACES
        and isinstance(node.node, nodes.Name)
        and node.node.name == "loop"
    )


def _place(node: nodes.Node) -> bool:
    """A position, one at a fixed distance from it, or a fixed one."""
    if isinstance(node, nodes.Add | nodes.Sub):
        return _position(node.left) and isinstance(node.right, nodes.Const) and type(node.right.value) is int
    return _position(node) or (isinstance(node, nodes.Const) and type(node.value) is int)


def _limit(node: nodes.Compare) -> _Field | None:
    """What a position is compared with."""
    if len(node.ops) != 1 or node.ops[0].op not in _ORDER:
        return None
    sides = (node.expr, node.ops[0].expr)
    for one, other in (sides, sides[::-1]):
        if _position(one) and isinstance(other, nodes.Name) and other.name != "loop":
            return other.name, ""
        if _position(one) and isinstance(other, nodes.Getattr) and isinstance(other.node, nodes.Name):
            return None if other.node.name == "loop" else (other.node.name, other.attr)
    return None


# ── what becomes of it ──────────────────────────────────────────────────────────────────────────────────────────────


def _call(method: str, *arguments: Any) -> nodes.Call:
    return nodes.Call(nodes.Getattr(nodes.Name(RUN, "load"), method, "load"), [*arguments], [], None, None)


def _replaced(node: nodes.Node) -> Any:
    """The node with ``At`` in place of this loop's ``loop``."""
    if isinstance(node, nodes.Name) and node.name == "loop":
        return nodes.Name(_AT, "load", lineno=node.lineno)
    if isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name) and _place(node.arg):
        item = nodes.Getattr(nodes.Name(_AT, "load"), "item", "load")
        call: nodes.Node = nodes.Call(item, [node.node, _replaced(node.arg)], [], None, None)
        return call.set_lineno(node.lineno)
    for name, value in node.iter_fields():
        if isinstance(node, nodes.For) and name not in ("iter", "else_"):
            continue
        if isinstance(value, nodes.Node):
            setattr(node, name, _replaced(value))
        elif isinstance(value, list):
            setattr(node, name, [_replaced(one) if isinstance(one, nodes.Node) else one for one in value])
    return node
