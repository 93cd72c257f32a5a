"""Grammars as text: the rules of ours as they grow, and what a client writes as a grammar for its tool.

Ours is the dialect of Lark that the engine compiles. A control token is ``<[id]>``, and no other text ever matches one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping

ANY = "(?s:.*)"
"""Any text, as a regular expression."""
_SPECIAL = re.compile(r"[\\.^$|?*+()\[\]{}]")
_MAX_REGEX = 1 << 16
_MAX_DEPTH = 64
_MAX_RULES = 2000
_NAMES = re.compile(r"\b[rT]\d+\b")


class GrammarError(Exception):
    """What is asked for cannot be enforced; the message says which part of it."""


class Rules:
    """Rules and terminals. ``control``: the vocabulary's control tokens by their text."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        names = sorted(control, key=len, reverse=True)
        self._tokens = re.compile("(" + "|".join(map(re.escape, names)) + ")" if names else "((?!))")
        self._names: dict[str, str] = {}
        self._depths: dict[str, int] = {}
        self._lines: list[str] = []

    def text(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._lines, ""))

    def note(self, what: str) -> None:
        """Names what the following rules are for, to whoever reads why they cannot be compiled."""
        self._lines.append("# " + " ".join(what.split()))

    def rule(self, body: str, options: str = "") -> str:
        """The name of a rule; one rule per body."""
        return self._named(f"r{len(self._names)}", body, options)

    def terminal(self, body: str) -> str:
        return self._named(f"T{len(self._names)}", body, "")

    def reserve(self) -> tuple[str, Callable[[str], None]]:
        """A rule's name, and how to define it later: for rules that mention themselves."""
        name = f"r{len(self._names)}"
        self._names[f"reserved {name}"] = name
        return name, lambda body: self._define(name, body, "")

    def _named(self, name: str, body: str, options: str) -> str:
        key = f"{name[0]}{options}: {body}"
        if key not in self._names:
            self._names[key] = name
            self._define(name, body, options)
        return self._names[key]

    def _define(self, name: str, body: str, options: str) -> None:
        """Limits the depth of rules: the engine's compiler recurses from rule to rule."""
        self._lines.append(f"{name}{options}: {body}")
        inner = () if body.startswith("%") else _NAMES.findall(body)
        depth = self._depths[name] = 1 + max((self._depths.get(one, 0) for one in inner), default=0)
        if depth > _MAX_RULES:
            raise GrammarError("the schema has too many members, one inside the other")

    def pieces(self, text: str) -> list[str]:
        """``text`` cut at its control tokens: ordinary text, token, ordinary text, ..."""
        return self._tokens.split(text)

    def ids(self, texts: Iterable[str]) -> set[int]:
        """The control tokens in some strings."""
        return {self._control[token] for text in texts for token in self.pieces(text)[1::2]}

    def literal(self, text: str) -> str:
        """The format's own text."""
        parts = enumerate(self.pieces(text))
        return sequence(f"<[{self._control[part]}]>" if number % 2 else plain(part) for number, part in parts)

    def layout(self, text: str) -> str:
        """White space that may be left out."""
        return f"({plain(text)})?" if text else ""

    def upto(self, delimiter: str, pattern: str = "", never: Iterable[str] = ()) -> str:
        """Text that matches ``pattern`` (any, without one), then the delimiter. ``never``: regular expressions that the
        text does not match."""
        first, *_ = self.pieces(delimiter)
        rest = self.literal(delimiter[len(first) :])
        without = "".join(f" & ~{regex(one)}" for one in never)
        if first and not rest and not pattern:
            body = self.terminal(regex(ANY) + without)
            return self.rule(body, f"[suffix={plain(first)}]")
        end = escaped(first)
        if first and not rest:
            without += f" & ~{regex(f'{ANY}{end}(?s:.+)')}"
        return sequence((self.terminal(regex(f"(?:{pattern or ANY}){end}") + without), rest))


def sequence(parts: Iterable[str]) -> str:
    return " ".join(part for part in parts if part)


def one_of(options: Iterable[str]) -> str:
    """At least one option; none of them is empty."""
    return "(" + " | ".join(dict.fromkeys(options)) + ")"


def plain(text: str) -> str:
    """Text in ordinary tokens, whatever it looks like."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def escaped(text: str) -> str:
    """Text as a regular expression that matches it."""
    return _SPECIAL.sub(r"\\\g<0>", text).replace("\n", r"\n").replace("\r", r"\r")


def regex(pattern: str) -> str:
    """A regular expression as a terminal."""
    spelled = re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], pattern, flags=re.DOTALL)
    return "/" + spelled.replace("\n", r"\n").replace("\r", r"\r") + "/"


# ── a client's grammar ────────────────────────────────────────────────────────────────────────────────────────────────

_TOKEN = re.compile(
    r"""(?P<skip>(?:\s|//[^\n]*|\#[^\n]*|->[ \t]*\w+)+)|(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)|(?P<directive>%\w+)|(?P<name>[?!]?[A-Za-z_]\w*)
    |~[ ]*(?P<count>\d+(?:[ ]*\.\.[ ]*\d+)?)|(?P<open>[(\[])|(?P<close>[)\]])|(?P<mark>[|?*+]|\{\d*,?\d*\})""",
    re.VERBOSE,
)
_DEFINITION = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\.-?\d+)?[ \t]*:", re.MULTILINE)
_IMPORT = re.compile(
    r"^[ \t]*%import[ \t]+(?:common\.(\w+)(?:[ \t]*->[ \t]*(\w+))?|common[ \t]*\(([\w\s,]+)\))[ \t]*(?=//|\#|$)",
    re.MULTILINE,
)
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[a-fA-F0-9]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[a-zA-Z]",
    "WORD": r"[a-zA-Z]+",
    "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}


def regex_of_lark(grammar: str) -> str:
    """One regular expression for a client's Lark grammar, so that it can be enforced in whatever way a family spells
    arguments. Raises GrammarError, also for a grammar that no regular expression can stand for: a recursive one."""
    return _Definitions(grammar).expanded("start", ())


class _Definitions:
    """The rules and terminals of a Lark grammar. What they consist of is nearly a regular expression already."""

    def __init__(self, grammar: str) -> None:
        self._done: dict[str, str] = {}
        before, *parts = _DEFINITION.split(_IMPORT.sub(self._import, grammar))
        self._bodies = dict(zip(parts[::2], parts[1::2], strict=True))
        if text := "".join(match[0] for match in _tokens(before) if match.lastgroup != "skip"):
            raise GrammarError(f"a definition was expected at {text[:40]!r}")

    def _import(self, match: re.Match[str]) -> str:
        for name in (match[1] or match[3]).replace(",", " ").split():
            if name not in _COMMON:
                raise GrammarError(f"%import of {name!r:.80} is not known")
            self._done[match[2] or name] = _COMMON[name]
        return ""

    def expanded(self, name: str, within: tuple[str, ...]) -> str:
        """The regular expression for a rule or a terminal."""
        if name in within:
            raise GrammarError(f"{name!r} is recursive; only grammars without recursion can be enforced")
        if name not in self._done and name not in self._bodies:
            raise GrammarError(f"{name!r} is not defined")
        if len(within) > _MAX_DEPTH:
            raise GrammarError("the rules are nested too deeply")
        if name not in self._done:
            self._done[name] = self._translated(self._bodies[name], (*within, name))
        return self._done[name]

    def _translated(self, body: str, within: tuple[str, ...]) -> str:
        parts: list[str] = []
        opened: list[str] = []
        size = 0
        for match in _tokens(body):
            text = match[0]
            match match.lastgroup:
                case "string":
                    parts.append(_string(text))
                case "regex":
                    parts.append(_pattern(text))
                case "name":
                    parts.append(f"(?:{self.expanded(text.lstrip('?!'), within)})")
                case "count":
                    parts.append("{" + re.sub(r"[~ ]", "", text).replace("..", ",") + "}")
                case "open":
                    parts.append("(?:")
                    opened.append({"(": ")", "[": "]"}[text])
                case "close":
                    if not opened or opened.pop() != text:
                        raise GrammarError(f"{text!r} was not expected")
                    parts.append(")?" if text == "]" else ")")
                case "mark":
                    parts.append(text)
            size += len(parts[-1]) if parts else 0
            if size > _MAX_REGEX or len(opened) > _MAX_DEPTH:
                raise GrammarError("the grammar is too large once its rules are expanded, or nested too deeply")
        if opened:
            raise GrammarError(f"{opened[-1]!r} is missing")
        return "".join(parts)


def _tokens(grammar: str) -> Iterable[re.Match[str]]:
    at = 0
    while at < len(grammar):
        match = _TOKEN.match(grammar, at)
        if match is None:
            raise GrammarError(f"the grammar is not understood at {grammar[at : at + 40]!r}")
        if match.lastgroup == "directive":
            raise GrammarError(f"{match[0]} cannot be enforced")
        yield match
        at = match.end()


def _string(text: str) -> str:
    body, ignore_case = (text[:-1], True) if text.endswith("i") else (text, False)
    try:
        value = str(json.loads(re.sub(r"\\(?![\"\\/bfnrtu])", r"\\\\", body)))
    except ValueError as error:
        raise GrammarError(f"{text[:40]!r} is not a string") from error
    return f"(?{'i' if ignore_case else ''}:{escaped(value)})"


def _pattern(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    chosen = "".join(flag for flag in "imsx" if flag in flags)
    return f"(?{chosen}:{body})".replace(r"\/", "/")
