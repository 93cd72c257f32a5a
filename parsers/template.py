"""A checkpoint's own chat template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from parsers.loops import OWN, Loops
from parsers.rope import Rope

_OF_DICTS = frozenset(dir(dict))
_HARMLESS = frozenset((bool, int, float, str))


class TemplateRefusal(Exception):
    """The template does not render this conversation."""


class TemplateMissing(Exception):
    """The checkpoint has no usable chat template."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Templates of one family queue call ids in a list, so lists may grow and shrink. Nothing outlives a rendering by
    that: what a template is handed is made anew for each one, or ``Fixed`` (``guard``)."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _OF_DICTS:  # the same without its detours over exceptions
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in OWN.get(kind, ()):
            return getattr(obj, attribute)
        if kind is Namespace and attribute[:1] != "_" and type(value := getattr(obj, attribute, None)) in _HARMLESS:
            return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if type(__obj) is MethodType and type(__obj.__self__) in OWN:
            return __obj(*args)  # what jinja2 names besides is for macros
        return super().call(__context, __obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        queue = type(obj) is list and attr in ("append", "pop")
        return queue or super().is_safe_attribute(obj, attr, value)


class TemplateAbsent(TemplateMissing):
    """The checkpoint comes without any chat template."""


class ChatTemplate:
    """Compiled once. ``strftime_now`` gives the time of loading, so that a prompt does not change over midnight."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: datetime | None = None) -> None:
        """Raises TemplateMissing when the source is no template."""
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        frozen = now or datetime.now().astimezone()
        environment.filters["tojson"] = _tojson
        environment.filters["from_json"] = json.loads
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = frozen.strftime
        environment.globals.update(special_tokens)
        self.source = source
        try:
            parsed = environment.parse(source)
            self._loops = Loops(environment, parsed)
            code = environment.compile(parsed)
            self._template = Template.from_code(environment, code, environment.make_globals(None))
        except TemplateError as error:
            raise TemplateMissing(f"the chat template does not compile: {error}") from error

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate:
        """From ``chat_template.jinja`` or ``tokenizer_config.json``. Raises TemplateMissing."""
        try:
            config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            config = {}
        except (OSError, ValueError) as error:
            raise TemplateMissing(f"tokenizer_config.json cannot be read: {error}") from error
        path = directory / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several named templates
            named = {entry.get("name"): entry.get("template") for entry in source}
            source = named.get("tool_use") or named.get("default")
        if not isinstance(source, str):
            raise TemplateAbsent(
                f"{directory} has no chat template; put the model's chat_template.jinja into that directory"
            )
        tokens: dict[str, str] = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                tokens[name] = token
        return cls(source, tokens)

    def forget(self) -> None:
        self._loops.forget()

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        variables: Mapping[str, object],
    ) -> str:
        """The text with the generation prompt. ``variables`` are what the family's switches say. Raises
        TemplateRefusal."""
        return str(self.rope(messages, tools, variables))

    def rope(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        variables: Mapping[str, object],
    ) -> Rope:
        """The same, sharing what it can with earlier ones. Raises TemplateRefusal."""
        told = {**variables, "messages": messages, "tools": tools or None, "add_generation_prompt": True}
        try:
            return self._loops.text(self._template, told)
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise TemplateRefusal(str(error) or type(error).__name__) from error


class _Generation(Extension):
    """``{% generation %}`` marks what training sees; here it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
