"""A checkpoint's family: its format, tokenizer and template behind one face."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from parsers.conversation import Block, Conversation, Text, Tool, ToolCall, ToolOutput
from parsers.encoders.message import Encoder
from parsers.encoders.registry import ENCODERS
from parsers.events import BoundaryKind
from parsers.families.registry import FORMATS, find
from parsers.format import Effort, Format, Tolerances
from parsers.grammar import Demand, Tokens, constraint
from parsers.messages import native_id
from parsers.probe import Fit, Mismatch, Probe, examine
from parsers.render import Prompt, RenderError, Span, SpanKind
from parsers.response_template import ResponseTemplateError, read_response_template, response_format
from parsers.stream import StreamParser, Wire
from parsers.template import ChatTemplate, TemplateAbsent, TemplateMissing
from parsers.tokens import Tokenizer, TokenizerError
from parsers.write import ThinkingState, assistant_text

__all__ = ["Family", "FamilyError", "Probe", "Prompt", "RenderError", "Span", "SpanKind", "StreamParser", "load_family"]


ADVICE = "use another template or checkpoint, or give its tokenizer a response_template"
_NO_TOLERANCES = Tolerances(spelled_opener=False, bare_head=False, call_in_thinking=False)


class FamilyError(Exception):
    """No format fits the checkpoint; the message names what does not match and what to do."""


class Family:
    """Renders conversations for one checkpoint and parses what it samples. Safe to share between threads."""

    def __init__(self, fit: Fit, tokenizer: Tokenizer) -> None:
        renderer = fit.renderer
        self.format: Format = renderer.format
        self.name = self.format.name
        self.tokenizer = tokenizer
        self.probe = fit.probe
        self.identity = renderer.identity
        """Tokens sampled under one identity mean nothing under another. 16 bytes."""
        self._renderer = renderer
        self._wire = Wire.resolve(self.format, tokenizer)
        ends = [tokenizer.token_id(end) for end in self.format.ends]
        self.stop_tokens: tuple[int, ...] = tuple(token for token in ends if token is not None)
        """Ids that end a turn; the regular one first."""
        self.watches = self._watches()
        """Token sequences that decoding may reach, with what they bound."""

    @property
    def efforts(self) -> tuple[Effort, ...]:
        """The levels of effort that make a difference, from less to more."""
        return self.format.switches.levels

    def render(
        self,
        conversation: Conversation,
        *,
        thinking: bool = True,
        effort: Effort | None = None,
        prefix_ok: bool = True,
    ) -> Prompt:
        """The prompt for the next assistant turn. ``prefix_ok``: pieces of earlier prompts keep their tokens without
        being encoded anew (the result is the same). Raises RenderError."""
        return self._renderer.render(conversation, thinking=thinking, effort=effort, remember=prefix_ok)

    def render_on(
        self, conversation: Conversation, *, thinking: bool = True, effort: Effort | None = None
    ) -> Prompt | None:
        """The same prompt, where it goes on from an earlier one and little is new, which takes a millisecond or two;
        else None. Raises RenderError."""
        return self._renderer.render_on(conversation, thinking, effort)

    def forget(self) -> None:
        """Nothing stays of what was rendered: the next prompts take longer."""
        self._renderer.forget()

    def least_tokens(self, conversation: Conversation) -> int:
        """A number of tokens that no prompt of this conversation can have fewer than, told by its length alone. Only
        those of turns that were not rendered before count."""
        turns = conversation.turns[self._renderer.rendered_turns(conversation) :]
        blocks = (block for turn in turns for block in turn.blocks)
        return self.tokenizer.least_tokens(
            block.text.strip() for block in blocks if isinstance(block, Text | ToolOutput)
        )

    def parser(self, prompt: Prompt, tools: Sequence[Tool], *, exact: bool = False) -> StreamParser:
        """A parser for the turn that answers ``prompt``. Without tools, calls are text and never executed. ``exact``: a
        grammar was followed, so that only what it knows as a call is one."""
        wire_format = replace(self.format, tolerances=_NO_TOLERANCES) if exact else self.format
        return StreamParser(wire_format, self._wire, self.tokenizer, tools, prompt.thinking_open)

    def constraint(self, prompt: Prompt, tools: Sequence[Tool], demand: Demand) -> str | None:
        """The grammar that the answer to ``prompt`` must follow; None where none is needed. Raises GrammarError."""
        start = prompt.spans[-1].start if prompt.spans and prompt.spans[-1].kind == "generation_prompt" else 0
        opener = self.tokenizer.decode(prompt.ids[start:]).removeprefix(self.format.turns.assistant.open)
        tokens = Tokens(self.tokenizer.control, self.tokenizer.special)
        return constraint(self.format, tokens, opener, prompt.thinking and not prompt.continues, tools, demand)

    def encode_output(self, prompt: Prompt, blocks: Sequence[Block]) -> tuple[int, ...]:
        """The ids a perfect model would sample for this turn, end of turn included. Thinking is left out where the
        prompt (or the family) rules it out."""
        thinks = prompt.thinking and not prompt.continues
        state: ThinkingState = "open" if prompt.thinking_open else "unopened" if thinks else "closed"
        made = sum(span.kind == "tool_call" for span in prompt.spans)
        calls = count(made)

        def named(block: ToolCall) -> ToolCall:
            number = next(calls)
            known = block.id or f"{len(prompt)}.{number}"
            return replace(block, id=native_id(self.format.call_ids, known, block.name, number))

        blocks = [named(block) if isinstance(block, ToolCall) else block for block in blocks]
        text = assistant_text(self.format, self._renderer.guard, blocks, state, made)
        if prompt.continues and (answer := self.format.answer):
            text = text.removeprefix(answer.open + answer.inner)
        return tuple(self.tokenizer.encode_trusted(text + self._end(blocks)))

    def encode_raw(self, text: str) -> tuple[int, ...]:
        """The family's own text, control tokens recognised."""
        return tuple(self.tokenizer.encode_trusted(text))

    def _end(self, blocks: Sequence[Block]) -> str:
        """What a model samples behind these blocks."""
        turns, frames = self.format.turns, self.format.frames
        calls = bool(blocks) and isinstance(blocks[-1], ToolCall)
        if calls and frames and frames.call_end in self.format.ends:
            return ""  # the call's own end
        following = turns.tools.open if calls else turns.user.open
        headers = [stop for stop in turns.stops if following.startswith(stop)]
        if headers and (calls or not turns.assistant.close):
            return headers[0]
        return turns.assistant.close or turns.stops[0]

    def _watches(self) -> tuple[tuple[tuple[int, ...], BoundaryKind], ...]:
        think, call, frames, section = self.format.think, self.format.call, self.format.frames, self.format.call.section
        wanted: list[tuple[str, BoundaryKind]] = [(think.close, "thinking_end")] if think else []
        wanted.append((call.open or (section.open if section else ""), "tool_call_start"))
        wanted.append((call.close or (section.close if section else ""), "tool_call_end"))
        wanted += [(frames.ends[0], "thinking_end")] if frames else []
        before = self.tokenizer.encode("x")[-1]  # words stand before them, not the start of a text
        found: list[tuple[tuple[int, ...], BoundaryKind]] = [
            (tuple(self.tokenizer.encode_trusted(text, after=before)), kind) for text, kind in wanted if text
        ]
        found += [((token,), "turn_end") for token in self.stop_tokens]
        return tuple(found)


def load_family(directory: Path, family: str | None = None) -> Family:
    """The family of a checkpoint; ``family`` names it or its model, where it cannot be told. Raises FamilyError."""
    named = find(family) if family else None
    if family and named is None:
        raise FamilyError(f"there is no family {family!r}; known are {', '.join(known.name for known in FORMATS)}")
    try:
        tokenizer = Tokenizer.load(directory)
        templates = _templates(directory, (named,) if named else FORMATS)
    except (TokenizerError, TemplateMissing) as error:
        raise FamilyError(str(error)) from error
    try:
        return Family(_compare(directory, tokenizer, templates).best, tokenizer)
    except Mismatch as mismatch:
        raise FamilyError(
            f"the chat template of {directory} fits {f'not {family}' if family else 'no known family'}: {ADVICE}\n  "
            f"{mismatch}"
        ) from mismatch


@dataclass(frozen=True)
class Comparison:
    """Which formats fit a checkpoint, and why the others do not (families by reason)."""

    fits: Sequence[Fit]
    reasons: Mapping[str, Sequence[str]]

    @property
    def best(self) -> Fit:
        """The first of those that are equal. Raises Mismatch."""
        if not self.fits:
            raise Mismatch("\n  ".join(self.lines()))
        best = max(fit.score for fit in self.fits)
        return max((fit for fit in self.fits if fit.score == best), key=_mentioned)

    def lines(self) -> list[str]:
        return [f"{', '.join(names)}: {reason}" for reason, names in self.reasons.items()]


def compare(directory: Path) -> Comparison:
    """A checkpoint against all formats. Raises FamilyError where its files cannot be read."""
    try:
        return _compare(directory, Tokenizer.load(directory), _templates(directory, FORMATS))
    except (TokenizerError, TemplateMissing) as error:
        raise FamilyError(str(error)) from error


def _compare(directory: Path, tokenizer: Tokenizer, templates: Sequence[tuple[Format, Encoder]]) -> Comparison:
    """Where no format fits, the tokenizer's own metadata may give one."""
    known = comparison(tokenizer, templates)
    metadata = read_response_template(directory) if not known.fits and len(templates) > 1 else None
    if metadata is None:
        return known
    template = templates[0][1]
    try:
        return Comparison([examine(response_format(metadata, template), tokenizer, template)], known.reasons)
    except (Mismatch, ResponseTemplateError) as error:
        return Comparison([], {**known.reasons, str(error): ["response_template"]})


def comparison(tokenizer: Tokenizer, templates: Sequence[tuple[Format, Encoder]]) -> Comparison:
    """Of these formats, each with its template."""
    fits: list[Fit] = []
    reasons: dict[str, list[str]] = {}
    for wire_format, template in templates:
        try:
            fits.append(examine(_with_suffix(wire_format, tokenizer), tokenizer, template))
        except Mismatch as mismatch:
            reasons.setdefault(str(mismatch), []).append(wire_format.name)
    return Comparison(fits, reasons)


def _templates(directory: Path, formats: Sequence[Format]) -> list[tuple[Format, Encoder]]:
    """The checkpoint's template for every format; without one, our encoder for those of this model. Raises
    TemplateMissing."""
    try:
        template = ChatTemplate.load(directory)
    except TemplateAbsent:
        encoded = [one for one in formats if one.encoder and (len(formats) == 1 or _is_model(directory, one))]
        if not encoded:
            raise
        longest = max(encoded, key=lambda one: len(one.name))
        return [(longest, ENCODERS[longest.encoder])]
    return [(one, template) for one in formats]


def _is_model(directory: Path, wire_format: Format) -> bool:
    """Does the checkpoint's configuration name this family, as ``deepseek_v4`` or ``DeepseekV4ForCausalLM``?"""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    names = [config.get("model_type"), *(config.get("architectures") or ())] if isinstance(config, dict) else []
    wanted = wire_format.name.replace("_", "")
    return any(wanted in str(name).replace("_", "").lower() for name in names)


def _with_suffix(wire_format: Format, tokenizer: Tokenizer) -> Format:
    """Raises Mismatch."""
    if not wire_format.suffix:
        return wire_format
    for name in tokenizer.control:
        if match := re.fullmatch(wire_format.suffix, name):
            return wire_format.with_suffix(match[1])
    raise Mismatch(f"no control token of the vocabulary is like {wire_format.with_suffix('…').turns.user.open}")


def _mentioned(fit: Fit) -> tuple[int, int]:
    """Among formats that fit equally, the one whose switches the template knows."""
    switches, source = fit.renderer.format.switches, fit.renderer.source
    told = (switches.always, switches.on, switches.off, *switches.efforts.values())
    names = {name for variables in told for name in variables}
    known = sum(bool(re.search(rf"\b{name}\b", source)) for name in names)
    return known, known - len(names)
