"""A checkpoint's family: its format, tokenizer and template behind one face."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from parsers.conversation import Block, Conversation, Text, Tool, ToolOutput
from parsers.events import BoundaryKind
from parsers.families.registry import FORMATS
from parsers.format import Format
from parsers.probe import Mismatch, Probe, examine
from parsers.render import Prompt, Renderer, RenderError, Span, SpanKind
from parsers.stream import StreamParser, Wire
from parsers.template import ChatTemplate, TemplateMissing
from parsers.tokens import Tokenizer, TokenizerError
from parsers.write import ThinkingState, assistant_text

__all__ = ["Family", "FamilyError", "Probe", "Prompt", "RenderError", "Span", "SpanKind", "StreamParser", "load_family"]


class FamilyError(Exception):
    """No format fits the checkpoint; the message names what does not match and what to do."""


class Family:
    """Renders conversations for one checkpoint and parses what it samples. Safe to share between threads."""

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, probe: Probe) -> None:
        self.format: Format = renderer.format
        self.name = self.format.name
        self.tokenizer = tokenizer
        self.probe = probe
        self.identity = renderer.identity
        """Tokens sampled under one identity mean nothing under another. 16 bytes."""
        self._renderer = renderer
        self._wire = Wire.resolve(self.format, tokenizer)
        ends = [tokenizer.token_id(end) for end in self.format.ends]
        self.stop_tokens: tuple[int, ...] = tuple(token for token in ends if token is not None)
        """Ids that end a turn; the regular one first."""
        self.watches = self._watches()
        """Token sequences that decoding may reach, with what they bound."""

    def render(self, conversation: Conversation, *, thinking: bool = True, prefix_ok: bool = True) -> Prompt:
        """The prompt for the next assistant turn. ``prefix_ok``: pieces of earlier prompts keep their tokens without
        being encoded anew (the result is the same). Raises RenderError."""
        return self._renderer.render(conversation, thinking=thinking, remember=prefix_ok)

    def least_tokens(self, conversation: Conversation) -> int:
        """A number of tokens that no prompt of this conversation can have fewer than, told by its length alone."""
        blocks = (block for turn in conversation.turns for block in turn.blocks)
        texts = (block.text.strip() for block in blocks if isinstance(block, Text | ToolOutput))
        # Normalising composes at most four code points into three bytes.
        size = sum(len(text) if text.isascii() else len(text) * 3 // 4 for text in texts)
        return -(-size // self.tokenizer.longest)

    def parser(self, prompt: Prompt, tools: Sequence[Tool]) -> StreamParser:
        """A parser for the turn that answers ``prompt``. Without tools, calls are text and never executed."""
        return StreamParser(self.format, self._wire, self.tokenizer, tools, prompt.thinking_open)

    def encode_output(self, prompt: Prompt, blocks: Sequence[Block]) -> tuple[int, ...]:
        """The ids a perfect model would sample for this turn, end of turn included. Thinking is left out where the
        prompt (or the family) rules it out."""
        state: ThinkingState = "open" if prompt.thinking_open else "unopened" if prompt.thinking else "closed"
        text = assistant_text(self.format, self._renderer.guard, blocks, state)
        return tuple(self.tokenizer.encode_trusted(text + self.format.turns.assistant.close))

    def encode_raw(self, text: str) -> tuple[int, ...]:
        """The family's own text, control tokens recognised."""
        return tuple(self.tokenizer.encode_trusted(text))

    def _watches(self) -> tuple[tuple[tuple[int, ...], BoundaryKind], ...]:
        think, call = self.format.think, self.format.call
        wanted: list[tuple[str, BoundaryKind]] = [(think.close, "thinking_end")] if think else []
        wanted += [(call.open, "tool_call_start"), (call.close, "tool_call_end")]
        found: list[tuple[tuple[int, ...], BoundaryKind]] = [
            (tuple(self.tokenizer.encode_trusted(text)), kind) for text, kind in wanted
        ]
        found += [((token,), "turn_end") for token in self.stop_tokens]
        return tuple(found)


def load_family(directory: Path, family: str | None = None) -> Family:
    """The family of a checkpoint; ``family`` names it where it cannot be told. Raises FamilyError."""
    formats = [known for known in FORMATS if family in (None, known.name)]
    if not formats:
        raise FamilyError(f"there is no family {family!r}; known are {', '.join(known.name for known in FORMATS)}")
    try:
        tokenizer = Tokenizer.load(directory)
        template = ChatTemplate.load(directory)
    except (TokenizerError, TemplateMissing) as error:
        raise FamilyError(str(error)) from error
    fitting: list[tuple[Renderer, Probe]] = []
    reasons: list[str] = []
    for wire_format in formats:
        try:
            fitting.append(examine(wire_format, tokenizer, template))
        except Mismatch as mismatch:
            reasons.append(f"{wire_format.name}: {mismatch}")
    if len(fitting) == 1:
        renderer, probe = fitting[0]
        return Family(renderer, tokenizer, probe)
    if fitting:
        names = ", ".join(renderer.format.name for renderer, _ in fitting)
        raise FamilyError(f"{directory} fits several families ({names}); name one of them")
    raise FamilyError(
        f"the chat template of {directory} fits no known family; use another template or another checkpoint\n  "
        + "\n  ".join(reasons)
    )
