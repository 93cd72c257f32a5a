"""Constrained decoding: which tokens may come next.

The one file that knows the grammar library (llguidance, imported when the first grammar comes). Grammars are compiled,
and masks computed, in threads of their own: a request waits for its grammar before it is admitted, and the mask of its
next token is made while the model computes that token's scores.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.api import Sampling

Mask = NDArray[np.uint32]
"""Which tokens may come next: bit ``i % 32`` of word ``i // 32`` for token ``i``, and none beyond the last token."""

_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""No token is chosen for the model, not even where the grammar leaves only one text."""
_KEPT = 64
"""Compiled grammars that are remembered."""
_KEPT_SIZE = 32 << 20
"""Characters of their text in all."""
_STACK = 256 << 20
"""The compiler goes down into what a schema refers to, and the process would end where its stack does. The stack is
enough for any grammar that ``parsers.grammar`` writes; memory is only taken for what is used of it."""
_MOMENT = 0.02
_PLACE = re.compile(r"(?:at )?(\d+)\(\d+\): ?")
_COMPILER = re.compile(r"^failed to compile JSON schema: |^lexer error: ")
_PLAIN = {
    "NoExtensionBias": "it allows nothing",
    **dict.fromkeys(
        ("fuel exhausted", "too many expressions", "lexer precomputation failed"),
        "its patterns, or the lengths in it, take too much to be followed",
    ),
}
"""What some complaints mean."""
_UNKNOWN = {
    re.compile(r"Unimplemented keys: \[(.*)\]"): "no answer can be held to the keyword {}: leave it out of the schema",
    re.compile(r"Unknown format: (.*)"): 'no answer can be held to the format "{}": leave it out of the schema',
}


class GrammarError(Exception):
    """A grammar that cannot be compiled, or cannot be followed any further."""


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token, by id. No text in a grammar matches a ``control`` token, only its id does."""

    tokens: Sequence[bytes]
    control: frozenset[int]


class Grammars:
    """Compiled grammars by their text. ``load`` reads the vocabulary, at once and in a thread of its own; ``size``: how
    many scores the model gives."""

    def __init__(self, load: Callable[[], Vocabulary], size: int) -> None:
        self._load, self._size = load, size
        self._masking = ThreadPoolExecutor(2, "masks")
        self._tokenizer: Any = None
        self._known: OrderedDict[str, Any] = OrderedDict()
        self._kept = 0
        before = threading.stack_size(_STACK)
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._compiling.submit(self._ready)
        threading.stack_size(before)

    def guide(self, sampling: Sampling) -> Guide | None:
        """What leads a request through its grammar, if it has one; nothing leads what is scripted."""
        grammar, forced = sampling.constraint, sampling.forced
        if grammar is None or forced is not None:
            return None
        matcher = self._compiling.submit(lambda: self._compiled(grammar).deep_copy())
        stop_tokens = [token for token in sampling.stop_tokens if token < self._size]
        return Guide(matcher, stop_tokens, self._masking, self._size)

    def _compiled(self, grammar: str) -> Any:
        if grammar in self._known:
            self._known.move_to_end(grammar)
            return self._known[grammar]
        tokenizer = self._ready()
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(tokenizer, _OPTIONS + grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
        leads = not matcher.is_error() and (any(matcher.compute_bitmask()) or matcher.is_accepting())
        if matcher.is_error() or not leads:
            raise GrammarError(_reason(matcher.get_error() or "it allows nothing", grammar))
        self._known[grammar] = matcher
        self._kept += len(grammar)
        while len(self._known) > _KEPT or (self._kept > _KEPT_SIZE and len(self._known) > 1):
            self._kept -= len(self._known.popitem(last=False)[0])
        return matcher

    def _ready(self) -> Any:
        if self._tokenizer is None:
            try:
                from llguidance import LLTokenizer, TokenizerWrapper
            except ImportError as error:
                raise GrammarError(
                    "constrained decoding needs the package llguidance, which is not installed"
                ) from error
            words = _Words(self._load(), self._size)
            self._tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=len(words.tokens))
        return self._tokenizer


class _Words:
    """A vocabulary as the library wants it: one token for each score and, behind them, an end of its own that no model
    can sample, since what ends an answer differs from request to request."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        tokens = list(vocabulary.tokens[:size])
        missing = range(len(tokens), size)
        self.tokens = [*tokens, *(b"<no token %d>" % token for token in missing), b"<end of grammar>"]
        self.eos_token_id = size
        self.special_token_ids = sorted({*(one for one in vocabulary.control if one < size), *missing, size})

    def __call__(self, text: str | bytes) -> list[int]:
        """Only asked for where tokens are forced, which they never are."""
        return []


class Guide:
    """Leads one answer through its grammar. Stop tokens are allowed where it may end."""

    def __init__(self, matcher: Future[Any], stop_tokens: list[int], masking: ThreadPoolExecutor, size: int) -> None:
        self._matcher, self._masking, self._size = matcher, masking, size
        self._stops = packed(stop_tokens, size)
        self._all = packed(range(size), size)
        self._mask: Future[Mask] | None = None

    @property
    def ready(self) -> bool:
        """Whether the grammar is compiled, or has failed."""
        return self._matcher.done()

    def wait(self) -> None:
        """For the grammar, or the mask of the next token, a moment at most."""
        wait([self._mask or self._matcher], _MOMENT)

    @property
    def failure(self) -> str:
        """Why there is no grammar; "" while it is not known to have failed."""
        error = self._matcher.exception() if self._matcher.done() else None
        return "" if error is None else str(error) or type(error).__name__

    def mask(self) -> Future[Mask]:
        """Of the next token; it is being made. Its result raises GrammarError."""
        if self._mask is None:
            self._mask = self._masking.submit(self._allowed, self._matcher.result())
        return self._mask

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next, by id. Raises GrammarError."""
        bits = self.mask().result().view(np.uint8)
        return np.unpackbits(bits, count=self._size, bitorder="little").view(np.bool_)

    def advance(self, token: int) -> None:
        """``token`` was sampled."""
        self._mask = self._masking.submit(self._behind, self._matcher.result(), token)

    def _behind(self, matcher: Any, token: int) -> Mask:
        if not matcher.consume_token(token):
            raise GrammarError(f"the grammar cannot go on behind token {token}: {_plain(matcher.get_error())}")
        return self._allowed(matcher)

    def _allowed(self, matcher: Any) -> Mask:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)[: len(self._all)] & self._all
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be followed: {_plain(matcher.get_error())}")
        return mask | self._stops if matcher.is_accepting() else mask


def packed(tokens: Sequence[int], size: int) -> Mask:
    """That allows these of ``size`` tokens."""
    allowed = np.zeros(-(-size // 32) * 32, np.bool_)
    allowed[np.asarray(tokens, np.int64)] = True
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def _plain(error: str) -> str:
    """A complaint in one line; what it means, where that is known."""
    text = _COMPILER.sub("", error.split("\n", 1)[0])
    for complaint, meaning in _UNKNOWN.items():
        if match := complaint.fullmatch(text):
            return meaning.format(match[1])[:500]
    return next((meaning for complaint, meaning in _PLAIN.items() if text.startswith(complaint)), text)[:500]


def _reason(error: str, grammar: str) -> str:
    """The library's complaint in one line, and what the rules that it is about are for."""
    message = error.split("\n", 1)[0]
    place = _PLACE.match(message)
    text = _plain(message[place.end() :] if place else message)
    if text.endswith("regex parse error:"):
        text = next((line.removeprefix("error: ") for line in error.splitlines() if line.startswith("error: ")), text)
    lines = grammar.splitlines()[: int(place[1]) - 1 if place else None]
    notes = [line[2:] for line in lines if line.startswith("# ")]
    about = notes[-1] if notes and (place or len(notes) == 1) else "the grammar"
    return f"{about} cannot be enforced: {text}"
