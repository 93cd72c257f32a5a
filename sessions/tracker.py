"""All sessions: which one a request belongs to, and what is remembered of it. Memory is bounded by ``Limits``."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import replace

from parsers.conversation import Conversation, Turn
from parsers.load import Family
from sessions.anchors import AnchorPoint, WatchPoint
from sessions.causes import Cause
from sessions.digest import TurnDigest, answer_key, digest, head_turns, system_digest, tools_digest, turn_digest
from sessions.exact import Verdict, next_link
from sessions.harness import (
    Harness,
    Identity,
    RequestMeta,
    identify,
    recognise,
    without_volatile,
)
from sessions.lineage import Lineage, chain
from sessions.session import Branch, Limits, RequestRecord, Session, SessionDetail, SessionSummary
from sessions.visit import Finished, Place, ReuseReport, Visit

__all__ = [
    "AnchorPoint",
    "Cause",
    "Limits",
    "RequestMeta",
    "RequestRecord",
    "ReuseReport",
    "SessionDetail",
    "SessionSummary",
    "Sessions",
    "Visit",
    "WatchPoint",
]

CLIENT_ID_LENGTH = 256


class Sessions:
    """Single-threaded: all calls come from the server's event loop. ``clock`` gives seconds and is only shown."""

    def __init__(
        self,
        family: Family,
        *,
        max_sessions: int | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._family = family
        self._limits = limits if max_sessions is None else replace(limits, max_sessions=max_sessions)
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._weights: dict[str, int] = {}
        self._tokens = 0
        self._lineage = Lineage(self._limits.turns)
        self._causes: Counter[Cause] = Counter()
        self._verdicts: Counter[Verdict] = Counter()
        self._unexplained = 0
        self._dropped = 0

    def begin(self, meta: RequestMeta, conversation: Conversation, incarnation: str) -> Visit:
        """``incarnation`` is the engine worker's: a new one has forgotten everything."""
        place = self._place(meta, conversation, keep=True)
        return Visit(place, self._family, meta.protocol, incarnation, self._accept, self._remember)

    def normalise(self, meta: RequestMeta, conversation: Conversation) -> Conversation:
        """The conversation as ``begin`` would have it rendered, without a trace: for counting tokens."""
        return self._place(meta, conversation, keep=False).conversation

    def list(self, namespace: str = "") -> list[SessionSummary]:
        """Those of one namespace, the most recently used first."""
        return [session.summary() for session in reversed(self._sessions.values()) if session.namespace == namespace]

    def get(self, id: str, namespace: str = "") -> SessionDetail | None:
        """None also for a session of another namespace."""
        session = self._sessions.get(id)
        return session.detail() if session and session.namespace == namespace else None

    def forget(self, id: str, namespace: str = "") -> bool:
        """True if the namespace had such a session. What the engine holds of it is not touched."""
        session = self._sessions.get(id)
        if session is None or session.namespace != namespace:
            return False
        self._drop(session)
        return True

    def stats(self) -> dict[str, float]:
        """Counters since the start, and what is held now."""
        named = {f"cause_{cause}": float(count) for cause, count in sorted(self._causes.items())}
        return {
            "sessions": len(self._sessions),
            "session_tokens": self._tokens,
            "session_prefix_keys": len(self._lineage),
            "sessions_dropped": self._dropped,
            "requests": self._causes.total(),
            "misses_without_cause": self._unexplained,
            "echo_exact": self._verdicts["exact"],
            "echo_edited": self._verdicts["edited"],
            "echo_unknown": self._verdicts["unknown"],
            **named,
        }

    def _place(self, meta: RequestMeta, conversation: Conversation, *, keep: bool) -> Place:
        harness = recognise(meta, conversation)
        identity = identify(harness, meta, conversation)
        conversation = without_volatile(harness, conversation)
        turns = [_found_by(turn) for turn in conversation.turns]
        scope = digest(meta.namespace, identity.session) if not identity.threads else b""
        head = _head(conversation) if scope else b""
        keys = chain(scope, head, turns[head_turns(conversation) :]) if scope else []
        session, branch = self._find(meta, harness, identity, keys, head)
        if harness.reattach_tools and identity.kind == "compaction" and not conversation.tools:
            conversation = replace(conversation, tools=branch.tools)
        count = keep and identity.kind != "side"
        restored, link = self._restore(session, branch.name, conversation, turns, count)
        return Place(session, branch, harness, identity, restored, tuple(turns), link, scope, head, tuple(keys))

    def _accept(self, place: Place) -> Place:
        """Writes down that a request belongs where it was placed. The session may have been forgotten since, or made
        by a request that came at the same time."""
        known = place.session
        session = self._sessions.get(known.id)
        if session is None:
            session = Session(known.id, known.client_id, known.namespace, known.harness, self._limits, self._clock())
            self._sessions[session.id] = session
        self._sessions.move_to_end(session.id)
        alive = session.branches.get(place.branch.name) is place.branch
        branch = place.branch if alive else self._branch(session, place.identity, place.head)
        branch = session.branch(branch.name, self._lineage.forget)
        branch.tools, branch.head = place.conversation.tools, place.head
        self._lineage.add(session, branch, place.keys)
        session.last_used = self._clock()
        self._drop_surplus()
        return replace(place, session=session, branch=branch)

    def _find(
        self, meta: RequestMeta, harness: Harness, identity: Identity, keys: Sequence[bytes], head: bytes
    ) -> tuple[Session, Branch]:
        """Explicit ids first, else the longest common prefix. What is new are objects that nobody else sees yet."""
        found = self._lineage.find(keys)
        if found and not identity.session:
            session, branch = found
        else:
            name = digest(meta.namespace, identity.session or "lineage", b"" if identity.session else _last(keys, head))
            session = self._sessions.get(name.hex()) or Session(
                name.hex(),
                identity.session[:CLIENT_ID_LENGTH],
                meta.namespace,
                harness.name,
                self._limits,
                self._clock(),
            )
            branch = found[1] if found else self._branch(session, identity, head)
        return session, branch

    @staticmethod
    def _branch(session: Session, identity: Identity, head: bytes) -> Branch:
        """By thread where the client names them; else a branch with the same system and tools, whose messages were
        rewritten from the first on (a compaction); else a new one."""
        if identity.threads:
            name = identity.thread or "main"
        else:
            same = [branch.name for branch in session.branches.values() if branch.head == head]
            name = same[-1] if same else _free_name(session)
        return session.branches.get(name, Branch(name))

    def _restore(
        self,
        session: Session,
        branch: str,
        conversation: Conversation,
        turns: MutableSequence[TurnDigest],
        keep: bool,
    ) -> tuple[Conversation, bytes]:
        """Puts exact tokens into the assistant turns that are known, and their digests into ``turns``. With it comes
        the link of all turns."""
        schemas = {tool.name: tool.parameters for tool in conversation.tools}
        restored: list[Turn] = []
        link = b""
        for index, turn in enumerate(conversation.turns):
            if turn.role == "assistant":
                found = session.journal.restore(turn, link, branch, schemas)
                turn, turns[index], link = found.turn, found.digest, found.link
                self._verdicts[found.verdict] += keep
            elif turn.role != "system":
                link = next_link(link, turns[index].key)
            restored.append(turn)
        return replace(conversation, turns=tuple(restored)), link

    def _remember(self, done: Finished) -> None:
        place, report = done.place, done.report
        session, branch = place.session, place.branch
        self._causes[report.cause] += 1
        self._unexplained += not report.explained
        session.requests += 1
        session.history.append(
            RequestRecord(
                session.requests,
                self._clock(),
                branch.name,
                place.kind,
                report.prompt,
                report.resumed,
                report.replayed,
                report.new,
                report.cause,
                len(done.sampled.ids),
                done.complete,
            )
        )
        alive = self._sessions.get(session.id) is session and session.branches.get(branch.name) is branch
        if not alive or place.kind == "side" or done.answered is None:
            return
        if done.sampled.ids:
            session.journal.record(done.blocks, done.sampled, place.link, branch.name)
        branch.remember(done.answered)
        if place.scope:
            keys = chain(place.scope, branch.head, done.answered.turns[done.answered.head :])
            self._lineage.add(session, branch, keys)
        self._weigh(session)

    def _weigh(self, session: Session) -> None:
        self._tokens += session.tokens - self._weights.get(session.id, 0)
        self._weights[session.id] = session.tokens
        self._drop_surplus()

    def _drop_surplus(self) -> None:
        """The namespace that holds the most loses its least recently used: whoever floods loses its own. The last used
        of all stays, its journal is bounded by itself."""
        limits = self._limits
        while len(self._sessions) > 1:
            many = len(self._sessions) > limits.max_sessions
            if not many and self._tokens <= limits.max_tokens:
                return
            share: Counter[str] = Counter()
            for session in self._sessions.values():
                share[session.namespace] += 1 if many else self._weights.get(session.id, 0)
            *others, _ = self._sessions.values()
            self._dropped += 1
            self._drop(max(others, key=lambda session: share[session.namespace]))

    def _drop(self, session: Session) -> None:
        del self._sessions[session.id]
        self._tokens -= self._weights.pop(session.id, 0)
        for branch in session.branches.values():
            self._lineage.forget(branch)


def _found_by(turn: Turn) -> TurnDigest:
    """The digest of a turn; that of an assistant turn has only its key, until its exact tokens were looked for."""
    return TurnDigest(turn.role, answer_key(turn), ()) if turn.role == "assistant" else turn_digest(turn)


def _head(conversation: Conversation) -> bytes:
    return system_digest(conversation) + tools_digest(conversation.tools)


def _last(keys: Sequence[bytes], head: bytes) -> bytes:
    return keys[-1] if keys else head


def _free_name(session: Session) -> str:
    number = len(session.branches)
    while (name := f"branch-{number}" if number else "main") in session.branches:
        number += 1
    return name
