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
        """A compiler goes down from rule to rule, and must not go too far."""
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
    r"""(?P<space>(?:[ \t\r]|//[^\n]*|\#[^\n]*)+)|(?P<line>\n)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[imslux]*)
    |(?P<import>%import[^\n]*)|(?P<directive>%\w+)|(?P<arrow>->[ \t]*\w+)|(?P<range>\.\.)
    |(?P<name>[?!]?[A-Za-z_]\w*)|(?P<count>~[ ]*\d+(?:[ ]*\.\.[ ]*\d+)?|\{\d*,?\d*\})|(?P<priority>\.-?\d+)
    |(?P<mark>[:|()\[\]?*+])""",
    re.VERBOSE,
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
    """The rules and terminals of a Lark grammar, each as its tokens."""

    def __init__(self, grammar: str) -> None:
        self._bodies: dict[str, list[tuple[str, str]]] = {}
        self._done: dict[str, str] = {}
        statements: list[list[tuple[str, str]]] = [[]]
        for kind, text in _tokens(grammar):
            if kind == "line":
                statements.append([])
            elif text == "|" and not statements[-1] and len(statements) > 1:
                statements.pop()
                while not statements[-1] and len(statements) > 1:
                    statements.pop()
                statements[-1].append((kind, text))
            else:
                statements[-1].append((kind, text))
        for statement in statements:
            if statement:
                self._define(statement)

    def _define(self, statement: list[tuple[str, str]]) -> None:
        kind, text = statement[0]
        if kind == "import":
            self._import(text)
            return
        if kind == "directive":
            raise GrammarError(f"{text} cannot be enforced")
        rest = statement[1:]
        if rest and rest[0][0] == "priority":
            rest = rest[1:]
        if kind != "name" or not rest or rest[0] != ("mark", ":"):
            raise GrammarError(f"a definition was expected at {text[:40]!r}")
        self._bodies[text.lstrip("?!")] = rest[1:]

    def _import(self, text: str) -> None:
        match = re.fullmatch(r"%import\s+common\.(\w+)(?:\s*->\s*(\w+))?\s*", text) or re.fullmatch(
            r"%import\s+common\s*\(([\w\s,]+)\)()\s*", text
        )
        names = [name.strip() for name in match[1].split(",")] if match else []
        if match is None or not all(name in _COMMON for name in names):
            raise GrammarError(f"{text.strip()[:80]!r} is not known")
        for name in names:
            self._done[match[2] or name] = _COMMON[name]

    def expanded(self, name: str, within: tuple[str, ...]) -> str:
        if name in within:
            raise GrammarError(f"{name!r} is recursive; only grammars without recursion can be enforced")
        if name not in self._done:
            if name not in self._bodies:
                raise GrammarError(f"{name!r} is not defined")
            if len(within) > _MAX_DEPTH:
                raise GrammarError("the rules are nested too deeply")
            parser = _Expression(self._bodies[name], lambda other: self.expanded(other, (*within, name)))
            self._done[name] = parser.whole()
        return self._done[name]


class _Expression:
    """Reads the right side of a definition."""

    def __init__(self, tokens: list[tuple[str, str]], expand: Callable[[str], str]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0
        self._expand = expand

    def whole(self) -> str:
        found = self._choice()
        if self._at < len(self._tokens):
            raise GrammarError(f"{self._tokens[self._at][1][:40]!r} was not expected")
        return found

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _choice(self) -> str:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise GrammarError("parentheses are nested too deeply")
        options = [self._sequence()]
        while self._peek()[1] == "|":
            self._at += 1
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else "(?:" + "|".join(options) + ")"

    def _sequence(self) -> str:
        parts: list[str] = []
        size = 0
        while self._peek()[0] in ("string", "regex", "name") or self._peek()[1] in ("(", "["):
            parts.append(self._repeated())
            size += len(parts[-1])
            if size > _MAX_REGEX:
                raise GrammarError("the grammar is too large once its rules are expanded")
        if self._peek()[0] == "arrow":
            self._at += 1
        return "".join(parts)

    def _repeated(self) -> str:
        atom = self._atom()
        kind, text = self._peek()
        if text in ("?", "*", "+") and kind == "mark":
            self._at += 1
            return f"(?:{atom}){text}"
        if kind == "count":
            self._at += 1
            counts = re.sub(r"[~ ]", "", text).replace("..", ",")
            return f"(?:{atom})" + (counts if text.startswith("{") else "{" + counts + "}")
        return atom

    def _atom(self) -> str:
        (kind, text), self._at = self._peek(), self._at + 1
        match kind:
            case "string":
                return _string(text)
            case "regex":
                return _pattern(text)
            case "name":
                return f"(?:{self._expand(text.lstrip('?!'))})"
        inner = self._choice()
        close = {"(": ")", "[": "]"}[text]
        if self._peek()[1] != close:
            raise GrammarError(f"{close!r} is missing")
        self._at += 1
        return f"(?:{inner})" + ("?" if text == "[" else "")


def _tokens(grammar: str) -> Iterable[tuple[str, str]]:
    at = 0
    while at < len(grammar):
        match = _TOKEN.match(grammar, at)
        if match is None or match.lastgroup == "range":
            raise GrammarError(f"the grammar is not understood at {grammar[at : at + 40]!r}")
        if match.lastgroup != "space":
            yield str(match.lastgroup), match[0]
        at = match.end()


def _string(text: str) -> str:
    body, ignore_case = (text[:-1], True) if text.endswith("i") else (text, False)
    try:
        value = str(json.loads(re.sub(r"\\(?![\"\\/bfnrtu])", r"\\\\", body)))
    except ValueError as error:
        raise GrammarError(f"{text[:40]!r} is not a string") from error
    return f"(?i:{escaped(value)})" if ignore_case else escaped(value)


def _pattern(text: str) -> str:
    body, _, flags = text[1:].rpartition("/")
    body = body.replace(r"\/", "/")
    flags = "".join(flag for flag in "imsx" if flag in flags)
    return f"(?{flags}:{body})" if flags else f"(?:{body})"
