"""Arguments as nested elements whose names are the keys (MiniMax-M3). Every tag begins with one marker.

Whether an element becomes an object, a list or a scalar is only known at its end, and whether its name comes again only
behind it: arguments are written one by one, except that certain strings stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from parsers.codecs.call import NAME_LIMIT, Call, Fence, Malformed, Single
from parsers.codecs.parameters import Parameters
from parsers.format import Elements
from parsers.schema import NESTING, Shape, json_of, quoted
from parsers.source import Cut, Interrupted, Source, Step, Stops, certain


@dataclass
class _Node:
    name: str
    texts: list[str] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class ElementsReader(Single):
    """Reads ``Elements`` arguments. ``spelled``: delimiters in ordinary characters that also exist as tokens."""

    def __init__(self, codec: Elements, fence: Fence, spelled: frozenset[str]) -> None:
        self._item, self._prefix = codec.item, codec.prefix
        self._outer = tuple(text for text in fence.outer if text not in spelled)
        self._ends = fence.ends
        self._stops = Stops(codec.prefix, *self._outer)
        self._name = Stops(">", *self._outer)

    def read(self, source: Source, call: Call) -> Step[str]:
        """Ends behind the delimiter that ended the arguments, and returns it."""
        parameters = Parameters(call)
        held: list[_Node] = []
        noise: list[str] = []
        while True:
            stop = yield from source.until(self._stops, noise.append, hold_at_end=True)
            name = ""
            if stop == self._prefix:
                name, stop = yield from self._tag(source)
            if stop != self._prefix:
                break
            if held and held[0].name != name:
                self._write(call, parameters, held)
                held = []
            if not name or name.startswith("/"):
                call.tolerate("stray_close")
            elif call.types(name) == frozenset({"string"}):
                stop = yield from self._string(source, call, parameters, name)
            else:
                node = _Node(name)
                stop = yield from self._element(source, call, node)
                held.append(node)
            if stop != self._prefix:
                break
        if stop is None and not source.natural:
            raise Cut
        if "".join(noise).strip():
            parameters.unreadable("text_in_call")
        self._write(call, parameters, held)
        parameters.close(stop or "")
        return stop or ""

    def _tag(self, source: Source) -> Step[tuple[str, str | None]]:
        """(name, the marker) of a tag behind its marker; closers begin with a slash. Else a delimiter that came."""
        if not (yield from source.literal("<")):
            return "", self._prefix
        name, stop = yield from source.take(self._name, NAME_LIMIT)
        if stop is None:
            raise Malformed
        if stop in self._ends:
            raise Interrupted(stop)
        return "" if certain(name) else name.strip(), self._prefix if stop == ">" else stop

    def _string(self, source: Source, call: Call, parameters: Parameters, name: str) -> Step[str | None]:
        """The text of an element that can only be text, markers in it included. Returns the marker at its end."""
        value = parameters.value(name, "", "", trims=False)
        closer = f"{self._prefix}</{name}>"
        stops = Stops(closer, *self._outer)
        stop = yield from source.inside(stops, value.put, self._ends)
        value.close(drop_newline=stop != closer)
        if stop == closer:
            return self._prefix
        call.tolerate("missing_parameter_close")
        return stop

    def _element(self, source: Source, call: Call, root: _Node) -> Step[str | None]:
        """An element behind its opener. Returns the marker, or a delimiter that came before its closer."""
        open_nodes = [root]
        while open_nodes:
            stop: str | None = yield from source.inside(self._stops, open_nodes[-1].texts.append, self._ends)
            name = ""
            if stop == self._prefix:
                name, stop = yield from self._tag(source)
            if stop != self._prefix:
                call.tolerate("missing_parameter_close")
                return stop
            self._place(call, open_nodes, name)
        return self._prefix

    def _place(self, call: Call, open_nodes: list[_Node], name: str) -> None:
        if not name.startswith("/"):
            if not name:
                call.tolerate("malformed_parameter")
                return
            if len(open_nodes) >= NESTING:
                raise Malformed
            node = _Node(name)
            open_nodes[-1].children.append(node)
            open_nodes.append(node)
            return
        for at in range(len(open_nodes) - 1, -1, -1):
            if open_nodes[at].name == name[1:]:
                if at < len(open_nodes) - 1:
                    call.tolerate("missing_parameter_close")
                del open_nodes[at:]
                return
        call.tolerate("stray_close")

    # ── JSON ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _write(self, call: Call, parameters: Parameters, nodes: list[_Node]) -> None:
        """One argument; elements with one name that follow each other are a list."""
        if not nodes:
            return
        key = nodes[0].name
        lead = parameters.begin(key)
        shape = Shape(call.parameters, call.parameters).member(key)
        if lead:
            parameters.finished(key, lead, "".join(self._one_or_more(call, nodes, shape)), call.types(key))

    def _one_or_more(self, call: Call, nodes: list[_Node], shape: Shape | None) -> Iterator[str]:
        return self._several(call, nodes, shape) if len(nodes) > 1 else self._json(call, nodes[0], shape)

    def _several(self, call: Call, nodes: list[_Node], shape: Shape | None) -> Iterator[str]:
        yield "["
        for number, node in enumerate(nodes):
            yield ", " if number else ""
            yield from self._json(call, node, shape.item() if shape else None)
        yield "]"

    def _json(self, call: Call, node: _Node, shape: Shape | None) -> Iterator[str]:
        types = shape.types if shape else None
        if not node.children:
            yield self._scalar(call, node, types)
            return
        if node.text.strip():
            call.tolerate("text_in_call")
        named: dict[str, list[_Node]] = {}
        for child in node.children:
            named.setdefault(child.name, []).append(child)
        if list(named) == [self._item] and not (types and "object" in types and "array" not in types):
            yield from self._several(call, node.children, shape)
            return
        yield "{"
        for number, (name, same) in enumerate(named.items()):
            yield (", " if number else "") + quoted(name) + ": "
            yield from self._one_or_more(call, same, shape.member(name) if shape else None)
        yield "}"

    @staticmethod
    def _scalar(call: Call, node: _Node, types: frozenset[str] | None) -> str:
        text = call.text_of(node.text)
        if types and "string" not in types and not text.strip():
            for kind, empty in (("array", "[]"), ("object", "{}"), ("null", "null")):
                if kind in types:
                    return empty
        value, python = json_of(text, types)
        if python:
            call.tolerate("python_literal")
        return value
