"""The parts of what the server does with a request before the engine sees it, timed one by one in this process."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.api import Request, Sampling
from engine.messages import encode_parts
from parsers.conversation import Text
from parsers.load import Family
from parsers.template import ChatTemplate
from parsers.tokens import Tokenizer
from server.bodies import Bodies
from server.generate import engine_anchors
from server.protocols import chat, responses
from server.protocols.anthropic import ANTHROPIC
from server.protocols.base import WireProtocol
from sessions.tracker import Reuse, Sessions

_T = TypeVar("_T")


@dataclass(frozen=True)
class Times:
    """Milliseconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Times:
        return cls(
            1000 * statistics.median(seconds), 1000 * statistics.quantiles(seconds, n=100, method="inclusive")[-1]
        )


@dataclass(frozen=True)
class Part:
    """Milliseconds of processor time. A name that begins with a space belongs to the part before it."""

    name: str
    p50: float
    p99: float


NAMES = ("parse", "types", "session", "length check", "render", " template", " tokenize", "anchors", "engine message")


PROTOCOLS: dict[str, WireProtocol] = {
    "/v1/messages": ANTHROPIC,
    "/v1/responses": responses.PLAIN,
    "/v1/chat/completions": chat.reader(lambda _: []),
}


class _Clock:
    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def time(self, name: str, work: Callable[[], _T]) -> _T:
        begin = time.thread_time()
        done = work()
        self.seconds[name].append(time.thread_time() - begin)
        return done

    @contextmanager
    def inside(self, owner: type, method: str, name: str) -> Iterator[None]:
        """Times a method that is called on the way; the calls of one request are added up."""
        plain: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return plain(*arguments, **options)
            finally:
                self.seconds[name][-1] += time.thread_time() - begin

        setattr(owner, method, timed)
        try:
            yield
        finally:
            setattr(owner, method, plain)


def parts(family: Family, path: str, bodies: Iterable[bytes], warm: int) -> list[Part]:
    """One request after the other, each answered; the first ``warm`` do not count."""
    protocol, known, sessions, clock = PROTOCOLS[path], Bodies(), Sessions(family), _Clock()
    said = family.encode_raw("Done.<|im_end|>")
    for number, data in enumerate(bodies):
        body, entry = clock.time("parse", lambda: known.read(data, ("", path), protocol.field))  # noqa: B023
        inbound = clock.time("types", lambda: protocol.read(body, {}, ""))  # noqa: B023
        if entry is not None:
            known.keep(entry, getattr(inbound.request, protocol.field), getattr(inbound.request, "tools", None))
        visit = clock.time("session", lambda: sessions.begin(inbound.meta, inbound.conversation, "bench"))  # noqa: B023
        asked, options = visit.conversation, inbound.options
        clock.time("length check", lambda: family.least_tokens(asked))  # noqa: B023
        for name in (" template", " tokenize"):
            clock.seconds[name].append(0.0)
        with (
            clock.inside(ChatTemplate, "rope", " template"),
            clock.inside(Tokenizer, "encode_trusted", " tokenize"),
        ):
            prompt = clock.time(
                "render",
                lambda: family.render(asked, thinking=options.thinking, effort=options.effort),  # noqa: B023
            )
        anchors = clock.time("anchors", lambda: engine_anchors(visit.anchors(prompt)))  # noqa: B023
        request = Request(str(number), memoryview(prompt.packed).cast("I"), Sampling(100), anchors)
        clock.time("engine message", lambda: encode_parts(request))  # noqa: B023
        report = visit.report(prompt, Reuse(0, 0, len(prompt)), "none")
        visit.finish(prompt, said, (Text("Done."),), (), report, complete=True)
    return [Part(name, **vars(Times.of(clock.seconds[name][warm:]))) for name in NAMES]
