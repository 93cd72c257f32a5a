"""What an answer must look like, as a grammar for the engine: from the same format that the parser reads.

The grammar covers the whole answer. Thinking is part of it, as free tokens up to its closer, so that where it ends is
told in one place; behind it come the calls or the text that is asked for. Ends of turn are no part of the grammar: the
engine allows them where it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from parsers.codecs.writers import spelled
from parsers.conversation import Tool
from parsers.format import Format, Frames, JsonCall, PythonCalls, Tagged
from parsers.lark import ANY, GrammarError, Rules, escaped, one_of, plain, regex, regex_of_lark, sequence
from parsers.schema import FREEFORM_SCHEMA
from parsers.values import Values

__all__ = ["Demand", "GrammarError", "Tokens", "constraint"]

_HOLE = re.compile(r"\{(name|n|n1|id)\}")
_HOLES = {"n": r"[0-9]{1,4}", "n1": r"[0-9]{1,4}", "id": r"[a-zA-Z0-9]{9}"}
_NAME_MARK = "\0"
MAX_TEXT = 2 << 20
"""Characters of a grammar."""


Calls = Literal["auto", "required", "none"]
"""Whether there may be, must be or must not be tool calls."""


@dataclass(frozen=True)
class Demand:
    """What a client demands of an answer.

    ``only`` limits the calls to some tools, ``parallel`` allows several. ``answer``: a JSON schema for the text, where
    text is the answer; ``answer_exact`` False: what cannot be enforced of it is passed over.
    """

    calls: Calls = "auto"
    only: tuple[str, ...] = ()
    parallel: bool = True
    answer: Mapping[str, Any] | None = None
    answer_exact: bool = True

    def binds(self, tools: Sequence[Tool]) -> bool:
        """Whether anything is to be enforced."""
        if self.answer is not None or self.calls == "required" or self.only:
            return True
        return self.calls == "auto" and any(tool.strict or tool.grammar for tool in tools)


@dataclass(frozen=True)
class Tokens:
    """The control tokens of a vocabulary, by their text, and those of them that never stand for visible text."""

    control: Mapping[str, int]
    special: Collection[int]


def constraint(
    wire_format: Format, tokens: Tokens, opener: str, thinking: bool, tools: Sequence[Tool], demand: Demand
) -> str | None:
    """The grammar of an answer, or None where anything goes. ``opener``: what the prompt holds of the answer already.
    Raises GrammarError."""
    if not demand.binds(tools):
        return None
    chosen = [] if demand.calls == "none" else [tool for tool in tools if tool.name in demand.only or not demand.only]
    missing = [name for name in demand.only if name not in {tool.name for tool in chosen}]
    if missing and demand.calls != "none":
        raise GrammarError(f"tool_choice names {missing[0]!r:.80}, which is not among the tools")
    if demand.calls == "required" and not chosen:
        raise GrammarError("tool_choice demands a call, but there are no tools")
    kind = _Channels if wire_format.frames else _Tags
    try:
        text = kind(wire_format, tokens, chosen, demand).text(opener, thinking)
    except RecursionError as error:
        raise GrammarError("a schema is nested too deeply") from error
    if len(text) > MAX_TEXT:
        raise GrammarError(f"the tools' schemas take up {len(text)} characters as a grammar; at most {MAX_TEXT}")
    return text


class _Turn:
    """An answer's grammar. Free text may hold no control token that means something or is never visible."""

    def __init__(self, wire_format: Format, tokens: Tokens, tools: Sequence[Tool], demand: Demand) -> None:
        self.rules = Rules(tokens.control)
        self.format, self.call, self.demand = wire_format, wire_format.call, demand
        self.tools = tools
        self.own = self.rules.ids(wire_format.generated()) | set(tokens.special)

    def literal(self, text: str) -> str:
        return self.rules.literal(text)

    def free_until(self, delimiter: str, *never: str) -> str:
        """Anything, then the delimiter; ``never`` are texts that would end it before."""
        texts = [escaped(text) for text in never if text and len(self.rules.pieces(text)) == 1]
        if texts or self.rules.pieces(delimiter)[0]:
            return self.rules.upto(delimiter, never=[f"{ANY}(?:{'|'.join(texts)}){ANY}"] if texts else ())
        return sequence((self.free(), self.literal(delimiter)))

    def free(self) -> str:
        return (
            self.rules.rule(f"<[^{','.join(map(str, sorted(self.own)))}]>*")
            if self.own
            else self.rules.terminal(regex(ANY))
        )

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def one_call(self, tool: Tool, opener: str) -> str:
        """A call with its wrapper."""
        self.rules.note(f"the tool {tool.name[:200]!r}")
        if not self.format.can_call(tool.name):
            raise GrammarError(f"the tool {tool.name!r:.80}: a call of this name cannot be told from other text")
        try:
            return self._call(tool, opener, self._values(tool))
        except GrammarError as error:
            raise GrammarError(f"the tool {tool.name!r:.80}: {error}") from error

    def _call(self, tool: Tool, opener: str, values: Values) -> str:
        call = self.call
        match call.codec:
            case JsonCall() as codec:
                body = self._json_call(codec, tool, values)
            case PythonCalls():
                body = sequence((plain(tool.name), '"("', values.arguments(call.codec), '")"'))
            case codec:
                arguments = values.arguments(codec, apart=call.header[-1:].isspace())
                body = sequence((self._header(tool.name), arguments, self.tail()))
        inner = self.rules.layout(call.inner)
        closer = self.literal(call.close)
        return self.rules.rule(sequence((opener, inner if call.open else "", body, inner if closer else "", closer)))

    def tail(self) -> str:
        text = self.call.tail
        space = text[: len(text) - len(text.lstrip())]
        return sequence((self.rules.layout(space), self.literal(text.lstrip())))

    def _values(self, tool: Tool) -> Values:
        schema: Mapping[str, Any] = tool.parameters or {"type": "object"}
        if tool.freeform:
            schema = {**FREEFORM_SCHEMA, "additionalProperties": False}
        if tool.grammar:
            syntax, definition = tool.grammar
            ends = definition.endswith("$") and not definition.endswith(r"\$")
            pattern = definition.removeprefix("^").removesuffix("$" if ends else "")
            pattern = regex_of_lark(definition) if syntax == "lark" else pattern
            schema = {**schema, "properties": {"input": {"type": "string", "pattern": f"^(?:{pattern})$"}}}
        return Values(self.rules, schema, exact=tool.strict or tool.grammar is not None, never=self._enders())

    def _enders(self) -> list[str]:
        """Text that would end a raw value before its closer: delimiters in ordinary characters, where a line begins or
        where another follows."""
        if not isinstance(self.call.codec, Tagged):
            return []
        codec, section = self.call.codec, self.call.section
        found = [codec.open.removesuffix('"'), self.call.tail.strip(), self.call.open, self.call.close]
        found += [section.open, section.close] if section else []
        texts = "|".join(escaped(text) for text in found if text and len(self.rules.pieces(text)) == 1)
        if not texts:
            return []
        begun = f"(?:{ANY}\n)?" if codec.between else ANY
        return [f"(?:{begun}(?:{texts})|{ANY}(?:{texts})[ \\t\\r\\n]*(?:{texts})){ANY}"]

    def _json_call(self, codec: JsonCall, tool: Tool, values: Values) -> str:
        name = json.dumps(tool.name, ensure_ascii=False)
        lead = f'{{"{codec.names[0]}": {name}, "{codec.arguments[0]}": '
        call_id = ""
        if codec.id_key:
            spelled = self.rules.terminal(regex(f', "{codec.id_key}": "{_HOLES["id"]}"'))
            call_id = f"({spelled})?"
        return sequence((plain(lead), values.arguments(codec), call_id, '"}"'))

    def _header(self, name: str) -> str:
        parts = _HOLE.split(self.call.header)
        found = []
        for number, part in enumerate(parts):
            if number % 2:
                found.append(
                    plain(spelled(self.call.codec, name))
                    if part == "name"
                    else self.rules.terminal(regex(_HOLES[part]))
                )
                continue
            bare = part.rstrip() if number == len(parts) - 1 else part
            found += [self.literal(bare), self.rules.layout(part[len(bare) :])]
        return sequence(found)

    def calls(self, free: bool = False) -> str:
        """All calls of an answer, with the section around them. ``free``: behind any text, up to the first opener;
        where there are no sections, this is one call."""
        call, section = self.call, self.call.section

        def opened(text: str, here: bool) -> str:
            return self.free_until(text) if free and here else self.literal(text)

        one = self.rules.rule(one_of(self.one_call(tool, opened(call.open, section is None)) for tool in self.tools))
        if isinstance(call.codec, JsonCall | PythonCalls) and not call.open:
            found = self._several(one, plain(call.between))
            if call.codec.many:
                found = sequence(('"["', found, '"]"'))
        else:
            found = one if free and section is None else self._several(one, self.rules.layout(call.between))
        if section is None:
            return self.rules.rule(found)
        around = self.rules.layout(call.around)
        opener, closer = opened(section.open, True), self.literal(section.close)
        whole = sequence((opener, around, found, around if closer else "", closer))
        return self.rules.rule(f"{found} | {whole}" if call.bare else whole)

    def _several(self, one: str, separator: str) -> str:
        return sequence((one, f"({sequence((separator, one))})*")) if self.demand.parallel else one

    def answer(self) -> str:
        """The text that the client's schema describes."""
        self.rules.note("the answer's schema")
        values = Values(self.rules, self.demand.answer or {}, exact=self.demand.answer_exact)
        return values.json(values.root)


class _Tags(_Turn):
    """Thinking, text and calls between tags."""

    def text(self, opener: str, thinking: bool) -> str:
        lead = self._lead(opener, thinking)
        open_answer = self._open_answer(opener)
        end = self.format.turns.assistant.close
        last = (
            f"({self.literal(end)})?"
            if len(self.rules.pieces(end)) > 1 and "".join(self.rules.pieces(end)[::2])
            else ""
        )
        if self.demand.calls == "required":
            body = sequence((self._no_answer(open_answer), self.calls()))
        elif self.demand.answer is not None:
            body = self._answer(open_answer)
            if self.tools:
                body = one_of((body, sequence((self._no_answer(open_answer), self.calls()))))
        else:
            body = self._mixed(open_answer)
        return self.rules.text(sequence((lead, body, last)))

    def _lead(self, opener: str, thinking: bool) -> str:
        """What is left of the thinking."""
        think = self.format.think
        if think is None:
            return ""
        answer = self.format.answer
        others = (answer.open, answer.close) if answer else ()
        rest = sequence((self.free_until(think.close, *others), self.rules.layout(think.after)))
        if think.open in opener and think.close not in opener:
            return self.rules.rule(rest)
        if think.close in opener or not thinking or (self.format.answer and self._open_answer(opener)):
            return ""
        return f"({self.rules.rule(sequence((self.literal(think.open), rest)))})?"

    def _open_answer(self, opener: str) -> bool:
        answer = self.format.answer
        return answer is not None and answer.open in opener and answer.close not in opener

    def _close_answer(self) -> str:
        answer = self.format.answer
        return sequence((self.rules.layout(answer.inner), self.literal(answer.close))) if answer else ""

    def _no_answer(self, opened: bool) -> str:
        """What stands before calls alone."""
        answer = self.format.answer
        if opened or answer is None or not answer.always:
            return self._close_answer() if opened else ""
        return f"({sequence((self.literal(answer.open), self._close_answer()))})?"

    def _answer(self, opened: bool) -> str:
        answer, body = self.format.answer, self.answer()
        if answer is None:
            return body
        wrapped = sequence((self.rules.layout(answer.inner), body, self._close_answer()))
        return wrapped if opened else sequence((self.literal(answer.open), wrapped))

    def _mixed(self, opened: bool) -> str:
        """Text and calls as the model likes."""
        answer, section = self.format.answer, self.call.section
        opener = section.open if section else self.call.open
        if self.call.bare:
            return one_of((self.calls(), self.rules.terminal(regex(r"(?:[^\[{\s](?s:.*))?"))))
        if answer is not None and self.rules.ids((answer.open, answer.close)) & self.rules.ids((opener,)):
            text = self.free_until(answer.close)
            return f"{text if opened else f'({self.literal(answer.open)} {text})?'} ({self.calls()})?"
        if answer is not None:
            self.own -= self.rules.ids((answer.open, answer.close))
        rest = self.free()
        if first := self.rules.pieces(opener)[0]:
            never = f" & ~{regex(f'{ANY}{escaped(first)}{ANY}')}" if first == opener else ""
            rest = self.rules.terminal(regex(ANY) + never)
        return f"({self.calls(free=True)}){'*' if self.demand.parallel else '?'} {rest}"


class _Channels(_Turn):
    """Messages, each with a header that says what it is."""

    def text(self, opener: str, thinking: bool) -> str:
        frames = self.format.frames
        if frames is None:
            raise GrammarError("this family has no channels")
        begin, ends = self.literal(frames.start), [end for end in frames.ends if end not in self.format.ends]
        between = sequence((self.literal(ends[0]), begin))
        thought = self._message(frames, frames.thinking, self.free(), between)
        lead = f"({thought})*"
        if opener.endswith(frames.message):
            lead = sequence((self.free(), between, lead))
        calls = self._calls(frames, begin) if self.tools else ""
        if self.demand.calls == "required":
            return self.rules.text(sequence((lead, calls)))
        if self.demand.answer is not None:
            said = self._message(frames, frames.text, self.answer(), "")
            return self.rules.text(sequence((lead, one_of((said, calls)) if calls else said)))
        said = self._message(frames, frames.text, self.free(), "")
        also = self._message(frames, frames.text, self.free(), between)
        return self.rules.text(f"({thought} | {also})* ({calls} | {said})")

    def _message(self, frames: Frames, header: str, body: str, end: str) -> str:
        return self.rules.rule(sequence((self.literal(header + frames.message), body, end)))

    def _calls(self, frames: Frames, begin: str) -> str:
        """Calls as messages; one, where its end is that of the turn."""
        messages = []
        for tool in self.tools:
            section, around = self.call.section, self.rules.layout(self.call.around)
            body = self.one_call(tool, self.literal(self.call.open))
            if section is not None:
                body = sequence((self.literal(section.open), around, body, around, self.literal(section.close)))
            header = frames.call.replace("{name}", _NAME_MARK) + frames.message
            before, after = header.split(_NAME_MARK)
            messages.append(sequence((self.literal(before), plain(tool.name), self.literal(after), body)))
        one, end = self.rules.rule(one_of(messages)), self.literal(frames.call_end)
        if frames.call_end in self.format.ends:
            return self.rules.rule(sequence((one, end)))
        return self.rules.rule(sequence((self._several(one, sequence((end, begin))), f"({end})?")))
