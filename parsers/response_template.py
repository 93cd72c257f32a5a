"""A format for models that no family knows, from the ``response_template`` of Hugging Face tokenizers (version 1).

That metadata says how an answer is read: fields with openers and closers, as text or as patterns, and what lies between
them. Patterns are understood as far as they are text, optional white space and named holes. How turns are framed it
does not say, but for the assistant's header: that is read off the chat template. What cannot be said by a format is an
error that names it; whether the rest fits, the probe finds out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from parsers.encoders.message import Encoder
from parsers.format import (
    Call,
    Codec,
    Format,
    Json,
    JsonCall,
    Literals,
    Pair,
    PythonCalls,
    Result,
    Tagged,
    Think,
    Turns,
)
from parsers.template import TemplateRefusal

_KEYS = {"open", "open_pattern", "close", "close_pattern", "content", "content_args", "transform"}
_KEYS |= {"repeats", "join", "optional", "transform_each"}
_THINKING = ("thinking", "reasoning_content", "reasoning")
_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}


class ResponseTemplateError(Exception):
    """The metadata is damaged, or says what no format can; the message says what."""


class _Part(NamedTuple):
    kind: Literal["text", "space", "hole"]
    text: str


def read_response_template(directory: Path) -> Mapping[str, Any] | None:
    """The metadata in ``tokenizer_config.json``, None if it has none."""
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # loading the template has its own word on that
    found = config.get("response_template") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else None


def response_format(template: Mapping[str, Any], encoder: Encoder) -> Format:
    """Raises ResponseTemplateError."""
    if template.get("version", 1) != 1:
        raise ResponseTemplateError(f"version {template['version']!r} is not known, only 1 is")
    fields = template.get("fields")
    if not isinstance(fields, dict) or not all(isinstance(field, dict) for field in fields.values()):
        raise ResponseTemplateError("it has no fields")
    for name, field in fields.items():
        if name not in (*_THINKING, "content", "tool_calls"):
            raise ResponseTemplateError(f"the field {name!r} is not understood")
        if unknown := sorted(set(field) - _KEYS):
            raise ResponseTemplateError(f"{name}: {unknown[0]!r} is not known")
        if not isinstance(field.get("content_args", {}), dict):
            raise ResponseTemplateError(f"{name}: content_args {field['content_args']!r} is not understood")
    if "tool_calls" not in fields:
        raise ResponseTemplateError("it says nothing of tool calls")
    thinking = next((fields[name] for name in _THINKING if name in fields), None)
    call = _call(fields["tool_calls"])
    frames = _Frames(encoder, _text(_edge(template, "start_anchor")))
    return Format(
        name="response_template",
        models=(),
        turns=frames.turns(tuple(_literal(fields.get("content", {}), "close"))),
        call=call,
        result=frames.result,
        think=_think(thinking) if thinking else None,
    )


def _think(field: Mapping[str, Any]) -> Think:
    opener, closer = (_text(_edge(field, which)).strip() for which in ("open", "close"))
    if field.get("content", "text") != "text" or not opener or not closer:
        raise ResponseTemplateError("thinking: only text between an opener and a closer is understood")
    return Think(opener, closer)


# ── calls ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _call(field: Mapping[str, Any]) -> Call:
    opener, closer = _edge(field, "open"), _edge(field, "close")
    holes = [part.text for part in opener if part.kind == "hole"]
    if not opener or holes not in ([], ["name"]):
        raise ResponseTemplateError("tool_calls: they need an opener, which may name the tool but nothing else")
    if holes:
        return _named_call(opener, closer, _arguments(field.get("content", "text"), field.get("content_args", {})))
    begin, end, content = _text(opener).strip(), _text(closer).strip(), field.get("content", "text")
    if content == "python-call-list":
        return Call("", "", PythonCalls(), section=Pair(begin, end), between=", ")
    if content != "json":
        raise ResponseTemplateError(f"tool_calls: content {content!r} is not understood where the opener has no name")
    names, arguments = _members(field.get("transform"))
    if field.get("transform_each"):
        codec = JsonCall(names, arguments, many=True)
        return Call("", "", codec, section=Pair(begin, end), between=", ")
    return Call(begin, end, JsonCall(names, arguments), inner="\n", first="\n")


def _named_call(opener: Sequence[_Part], closer: Sequence[_Part], codec: Codec) -> Call:
    """White space in the opener divides the wrapper from the call's own head, and so it is with the closer."""
    at = opener.index(_Part("hole", "name"))
    outer, spaced, head = _divided(opener[:at])
    header = f"{head}{{name}}{_text(opener[at + 1 :])}"
    if not spaced:
        return Call(outer, _text(closer), codec, header=header, between="")
    tail, _, close = _divided(closer)
    return Call(outer, close or tail, codec, header=header, tail=tail if close else "", inner="\n", first="\n")


def _divided(parts: Sequence[_Part]) -> tuple[str, bool, str]:
    """(text before the first white space between texts, is there any, text behind it)"""
    inside = [n for n, part in enumerate(parts) if part.kind == "space" and 0 < n < len(parts) - 1]
    return (_text(parts[: inside[0]]), True, _text(parts[inside[0] :])) if inside else (_text(parts), False, "")


def _arguments(content: object, options: Mapping[str, Any]) -> Codec:
    if content == "json":
        quotes = options.get("string_delims")
        if not quotes:
            return Json()
        match quotes:
            case [[str(quote), str(closing)]] if quote and quote == closing and options.get("unquoted_keys"):
                return Literals(quote)
        raise ResponseTemplateError(f"tool_calls: strings between {quotes!r} are not understood")
    if content != "xml-inline" or options.get("merge_duplicates"):
        what = "repeated tags that make a list" if content == "xml-inline" else f"content {content!r}"
        raise ResponseTemplateError(f"tool_calls: {what} for arguments are not understood")
    parts = _literals(str(options.get("tag_pattern", "")))
    if [part.text for part in parts if part.kind == "hole"] != ["key", "value"]:
        raise ResponseTemplateError(f"tool_calls: tag_pattern {options.get('tag_pattern')!r} is not understood")
    key, value = (parts.index(_Part("hole", name)) for name in ("key", "value"))
    edges = (parts[value - 1], *parts[value + 1 : value + 2])
    trimmed = any(part.kind == "space" or part.text == "\n" for part in edges)
    opener, middle, closer = (_text(group) for group in (parts[:key], parts[key + 1 : value], parts[value + 1 :]))
    if trimmed:
        middle, closer = middle.removesuffix("\n"), closer.removeprefix("\n")
    return Tagged(opener, middle, closer, trim="newline" if trimmed else "none")


def _members(transform: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which members of a call's JSON are its name and its arguments."""
    function = transform.get("function", transform) if isinstance(transform, dict) else transform
    if function in (None, "{content}"):
        return ("name",), ("arguments", "parameters")
    if isinstance(function, dict):
        found = [re.fullmatch(r"\{content\.(\w+)\}", str(function.get(key))) for key in ("name", "arguments")]
        names = [match[1] for match in found if match]
        if len(names) == len(found):
            return (names[0],), (names[1],)
    raise ResponseTemplateError(f"tool_calls: the transform {transform!r} is not understood")


# ── openers and closers ─────────────────────────────────────────────────────────────────────────────────────────────

_PIECE = re.compile(
    r"(?P<space>(?:\\[sn]|\n| )[*+?]\??)|\\(?P<escaped>[^a-zA-Z0-9])|\\(?P<control>[nt])"
    r"|(?P<plain>[^\\.^$*+?{}\[\]|()])"
)
_GROUP = re.compile(r"\\.|\[(?:\\.|[^\]])*\]|[()]", re.DOTALL)
_HOLE = re.compile(r"\(\?P<(\w+)>")


def _text(parts: Sequence[_Part]) -> str:
    return "".join(part.text for part in parts if part.kind == "text")


def _literal(field: Mapping[str, Any], which: str) -> list[str]:
    found = field.get(which, [])
    return [str(text) for text in found] if isinstance(found, list) else [str(found)]


def _edge(field: Mapping[str, Any], which: str) -> list[_Part]:
    """What stands there; of several texts the first. Nothing if it is not said."""
    if texts := _literal(field, which):
        return [_Part("text", texts[0])]
    return _literals(str(field.get(f"{which}_pattern", "")))


def _literals(pattern: str) -> list[_Part]:
    """A pattern as text, optional white space and named holes."""
    return list(_pieces(pattern))


def _pieces(pattern: str) -> Iterator[_Part]:
    at = 0
    while at < len(pattern):
        if hole := _HOLE.match(pattern, at):
            yield _Part("hole", hole[1])
            at = _behind_group(pattern, at)
            continue
        piece = _PIECE.match(pattern, at)
        if piece is None or (not piece["space"] and pattern[piece.end() : piece.end() + 1] in ("*", "+", "?", "{")):
            raise ResponseTemplateError(f"the pattern {pattern!r} is not understood from {pattern[at:]!r} on")
        text = piece["plain"] or piece["escaped"] or {"n": "\n", "t": "\t", None: ""}[piece["control"]]
        yield _Part("text", text) if text else _Part("space", "")
        at = piece.end()


def _behind_group(pattern: str, at: int) -> int:
    depth = 0
    for match in _GROUP.finditer(pattern, at):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    raise ResponseTemplateError(f"the pattern {pattern!r} has a group that does not end")


# ── turns ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_SYSTEM, _QUERY, _ANSWER, _OUTPUT = "Probesystem", "Probequery", "Probeanswer", "Probeoutput"


class _Frames:
    """How the chat template frames turns, all of which must end alike."""

    def __init__(self, encoder: Encoder, header: str) -> None:
        """``header`` begins the assistant's turns."""
        self._encoder, self._header = encoder, header
        query = {"role": "user", "content": _QUERY}
        answer = {"role": "assistant", "content": _ANSWER}
        text = self._render({"role": "system", "content": _SYSTEM}, query, answer, query)
        parts = re.split("|".join((_SYSTEM, _QUERY, _ANSWER)), text)
        if not header or len(parts) != 5 or header not in parts[2]:
            raise ResponseTemplateError(f"the chat template does not put {header!r} before what the assistant says")
        self._end = parts[2][: parts[2].rindex(header)]
        self._user = parts[3].removeprefix(self._end)
        if not self._end or not self._user or parts[1] != self._end + self._user:
            raise ResponseTemplateError("the chat template frames turns in a way that is not understood")
        starts = (parts[0].rfind(self._user[:size]) for size in range(len(self._user), 0, -1))
        self._system = parts[0][max(0, next((start for start in starts if start >= 0), 0)) :]
        self._tools, self.result = self._outputs(query)

    def turns(self, ends: tuple[str, ...]) -> Turns:
        close = self._end.rstrip()
        headers = (self._system, self._user, self._header, self._tools)
        system, user, assistant, tools = (Pair(header, close) for header in headers)
        stops = tuple(end for end in ends if end != close)
        return Turns(system, user, assistant, tools, tail=self._end[len(close) :], stops=stops)

    def _outputs(self, query: Mapping[str, Any]) -> tuple[str, Result]:
        """The header of a turn of tool outputs, and what an output looks like."""
        output = {"role": "tool", "content": _OUTPUT, "name": "probe", "tool_call_id": "probe0001"}
        try:
            text = self._render(query, self._calling({}), output)
        except ResponseTemplateError:
            text = self._render(query, self._calling("{}"), output)
        before, found, behind = text.partition(_OUTPUT)
        behind = behind[: max(0, behind.rfind(self._header))]
        if not found or not behind.endswith(self._end) or self._end not in before:
            raise ResponseTemplateError("the chat template frames tool outputs in a way that is not understood")
        head, close = before[before.rindex(self._end) + len(self._end) :], behind.removesuffix(self._end)
        if not close.strip():
            return head, Result("", "", "")
        common = self._user if head.startswith(self._user) else self._user.rstrip()
        header = common if head.startswith(common) else head[: head.find("\n") + 1]
        opener = head[len(header) :]
        return header, Result("", opener.strip(), close.strip(), inner="\n" if opener.endswith("\n") else "")

    def _calling(self, arguments: object) -> Mapping[str, Any]:
        function = {"name": "probe", "arguments": arguments}
        call = {"type": "function", "id": "probe0001", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    def _render(self, *messages: Mapping[str, Any]) -> str:
        try:
            return self._encoder.render(messages, [_TOOL] if len(messages) == 3 else [], {})
        except TemplateRefusal as refusal:
            raise ResponseTemplateError(f"the chat template refuses a simple conversation: {refusal}") from refusal
