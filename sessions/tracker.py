"""All sessions: which one a request belongs to, and what is remembered of it. Memory is bounded by ``Limits``."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from parsers.conversation import Conversation
from parsers.load import Family
from sessions import archive
from sessions.anchors import AnchorPoint
from sessions.archive import ArchiveError
from sessions.causes import Asked, Cause, Reuse
from sessions.digest import Digests, TurnDigest, digest, head_turns, system_digest
from sessions.exact import Verdict, next_link
from sessions.harness import (
    HARNESSES,
    Harness,
    Identity,
    RequestMeta,
    identify,
    recognise,
    without_volatile,
)
from sessions.idle import Followup, IdleCounts, Prediction, predict
from sessions.keeper import Keeper
from sessions.lineage import Lineage, chain, linked
from sessions.partings import foretold, learnt
from sessions.persist import Persist
from sessions.prior import counted, priorities
from sessions.session import Branch, Limits, RequestRecord, Session, SessionDetail, SessionSummary
from sessions.visit import Finished, Place, ReuseReport, Visit
from sessions.walks import Steps, Walk, Walks

__all__ = [
    "AnchorPoint",
    "Cause",
    "Limits",
    "RequestMeta",
    "RequestRecord",
    "Reuse",
    "ReuseReport",
    "SessionDetail",
    "SessionSummary",
    "Sessions",
    "Visit",
]

CLIENT_ID_LENGTH = 256
MOST_DIGESTED = 4_000_000
"""Tokens of turns whose digests are remembered."""


class Sessions:
    """Single-threaded: all calls come from the server's event loop. ``clock`` gives seconds and is only shown.
    ``persist`` keeps sessions over a restart, for the same tokenizer and template; they are read when they are asked
    for."""

    def __init__(
        self,
        family: Family,
        *,
        max_sessions: int | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        clock: Callable[[], float] = time.time,
        persist: Persist | None = None,
    ) -> None:
        self._family = family
        self._limits = limits if max_sessions is None else replace(limits, max_sessions=max_sessions)
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._weights: dict[str, int] = {}
        self._tokens = 0
        self._digests = Digests(min(self._limits.max_tokens, MOST_DIGESTED))
        self._walks = Walks()
        self._lineage = Lineage(self._limits.turns)
        self._causes: Counter[Cause] = Counter()
        self._verdicts: Counter[Verdict] = Counter()
        self._unexplained = 0
        self._dropped = 0
        self._idle = IdleCounts()
        self._keeper = Keeper(persist, family.identity, self._limits)
        self._habits = self._keeper.habits()
        self._leads = self._keeper.leads()
        self._foretold = {
            one.name: tuple(foretold(family.tokenizer.encode(text)) for text in one.before_changes) for one in HARNESSES
        }
        self._elsewhere = self._keeper.elsewhere()
        for session in self._keeper.sleeping():
            self._adopt(session)
        self._drop_surplus()

    def begin(self, meta: RequestMeta, conversation: Conversation, incarnation: str, fingerprint: str = "") -> Visit:
        """``incarnation`` and ``fingerprint`` are the engine worker's: a new one knows only what its store kept, and
        of that only what has its fingerprint; empty where that is not known."""
        place = self._place(meta, conversation, keep=True)
        return Visit(place, self._family, meta.protocol, incarnation, fingerprint, self._accept, self._remember)

    def normalise(self, meta: RequestMeta, conversation: Conversation) -> Conversation:
        """The conversation as ``begin`` would have it rendered, without a trace: for counting tokens."""
        return self._place(meta, conversation, keep=False).conversation

    def list(self, namespace: str = "") -> list[SessionSummary]:
        """The sessions of one namespace, the most recently used first."""
        return [session.summary() for session in reversed(self._sessions.values()) if session.namespace == namespace]

    def get(self, id: str, namespace: str = "") -> SessionDetail | None:
        """None also for a session of another namespace."""
        session = self._sessions.get(id)
        if session is None or session.namespace != namespace:
            return None
        self._wake(session)
        return session.detail()

    def forget(self, id: str, namespace: str = "") -> bool:
        """True if the namespace had such a session; it is gone from disk too. What the engine holds of it is not
        touched."""
        session = self._sessions.get(id)
        if session is None or session.namespace != namespace:
            return False
        self._drop(session, erase=True)
        if self._leads.pop(session.harness, None):  # they may be words of this session
            self._keeper.forget_leads(session.harness)
        return True

    def forget_all(self) -> int:
        """All sessions, of every namespace and model, and what is known about clients; how many are gone."""
        sessions = list(self._sessions.values())
        for session in sessions:
            self._drop(session, erase=True)
        self._habits.clear()
        self._leads.clear()
        self._elsewhere.clear()
        return max(len(sessions), self._keeper.forget_all())

    def pin(self, id: str, pinned: bool = True) -> bool:
        """True if there is such a session. A pinned one is never dropped for another or for its age."""
        session = self._sessions.get(id)
        if session is None:
            return False
        session.pinned = pinned
        self._keeper.save(session)
        return True

    def export(self, id: str) -> str | None:
        """The session as a text file of JSON lines (see ``archive``)."""
        session = self._sessions.get(id)
        if session is None:
            return None
        self._wake(session)
        return archive.dump(session, self._keeper.identity)

    def import_archive(self, text: str, namespace: str = "") -> str:
        """Takes the session of an archive in, in place of one with the same id, which is returned. Raises
        ArchiveError, also for tokens of another tokenizer, and for a session of another namespace."""
        session = archive.load(text, self._keeper.identity, self._limits)
        known = self._sessions.get(session.id, session)
        if not session.namespace == known.namespace == namespace:
            raise ArchiveError("the session belongs to another API key")
        self.forget(session.id, namespace)
        session.last_used = self._clock()
        self._adopt(session)
        self._weigh(session)
        self._keeper.save_all(session)
        return session.id

    def flush(self, timeout: float) -> bool:
        """Waits until what was remembered is on disk, and what was forgotten is off it, for so many seconds at most. In
        any thread."""
        return self._keeper.flush(timeout)

    def close(self) -> None:
        """Writes what was not written yet."""
        self._keeper.close()

    # ── idle time ─────────────────────────────────────────────────────────────────────────────────────────────────

    def predict(self, followup: Followup) -> Callable[[], Prediction | None]:
        """What computes the prompt that the next message of the user is expected to begin with; it may run in another
        thread. Raises RenderError there."""
        session = self._sessions.get(followup.session)
        worth = priorities(self._habits.get(session.harness, {}) if session else {})
        family = self._family
        return lambda: predict(family, followup, worth)

    def predicted(self, prediction: Prediction, computed: int) -> None:
        """A prediction lies computed, ``computed`` tokens of it newly: its branch goes on from there."""
        session = self._sessions.get(prediction.session)
        branch = session.branches.get(prediction.branch) if session else None
        self._idle.done(prediction, computed)
        if session is None or branch is None:
            self._idle.wasted(prediction.session, prediction.branch)
            return
        self._wake(session)
        branch.remember(prediction.asked)
        self._weigh(session)
        self._keeper.save(session, branch)

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
            **self._idle.stats(),
            **self._keeper.stats(),
            **named,
        }

    def _place(self, meta: RequestMeta, conversation: Conversation, *, keep: bool) -> Place:
        harness = recognise(meta, conversation)
        identity = identify(harness, meta, conversation)
        conversation = without_volatile(harness, conversation)
        walk, common = self._walks.find(conversation)
        turns = [*walk.digests[:common], *map(self._digests.of, conversation.turns[common:])]
        scope = digest(meta.namespace, identity.session) if not identity.threads else b""
        head = system_digest(conversation) + self._digests.of_tools(conversation.tools) if scope else b""
        first = head_turns(conversation)
        known = walk.links[: max(common - first, 0)] if (scope, first) == (walk.scope, walk.head) else ()
        links = linked(scope, turns[first:], known) if scope else []
        keys = chain(links, head, turns[first:]) if scope else []
        session, branch = self._find(meta, harness, identity, keys, head)
        if harness.reattach_tools and identity.kind == "compaction" and not conversation.tools:
            conversation = replace(conversation, tools=branch.tools)
        count = keep and identity.kind != "side"
        steps = self._restore(session, branch.name, conversation, turns, (walk, common))
        if count:
            self._verdicts.update(steps.verdicts)
        journal, tools = session.journal, conversation.tools
        made = Walk(conversation.turns, turns, scope, first, links, journal, branch.name, tools, steps)
        restored = Conversation(tuple(steps.turns), tools)
        worth = priorities(self._habits.get(harness.name, {}))
        elsewhere = not session.branches and not self._elsewhere.isdisjoint((bytes.fromhex(session.id), *keys))
        return Place(
            session=session,
            branch=branch,
            harness=harness,
            identity=identity,
            conversation=restored,
            turns=tuple(steps.digests),
            tools=self._digests.of_tools(conversation.tools),
            link=steps.link,
            scope=scope,
            head=head,
            keys=tuple(keys),
            priorities=worth,
            leads=self._foretold.get(harness.name, ()) + self._leads.get(harness.name, ()),
            elsewhere=elsewhere,
            keep_walk=partial(self._walks.keep, made, walk),
        )

    def _accept(self, place: Place) -> Place:
        """Writes down that a request belongs where it was placed. The session may have been forgotten since, or made
        by a request that came at the same time."""
        place.keep_walk()
        known = place.session
        session = self._sessions.get(known.id)
        if session is None:
            session = Session(known.id, known.client_id, known.namespace, known.harness, self._limits, self._clock())
            self._sessions[session.id] = session
        self._wake(session)
        self._sessions.move_to_end(session.id)
        alive = session.branches.get(place.branch.name) is place.branch
        branch = place.branch if alive else self._branch(session, place.identity, place.head)
        branch = session.branch(branch.name, self._lineage.forget)
        branch.tools, branch.head = place.conversation.tools, place.head
        self._lineage.add(session, branch, place.keys)
        session.last_used = self._clock()
        self._drop_surplus(session)
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
        self._wake(session)
        return session, branch

    def _adopt(self, session: Session) -> None:
        self._sessions[session.id] = session
        for branch in session.branches.values():
            keys = list(branch.keys)
            branch.keys.clear()
            self._lineage.add(session, branch, keys)

    def _wake(self, session: Session) -> None:
        if session.asleep:
            self._keeper.wake(session)
            self._weigh(session)

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
        turns: Sequence[TurnDigest],
        before: tuple[Walk, int],
    ) -> Steps:
        """The turns with exact tokens in those of the assistant's that are known; ``turns`` are their digests.
        ``before``: who walked here, and how many of these turns."""
        schemas = {tool.name: tool.parameters for tool in conversation.tools}
        walk, common = before
        steps = walk.restored(session.journal, branch, conversation.tools, common)
        link = steps.link
        for index, turn in enumerate(conversation.turns[len(steps.turns) :], len(steps.turns)):
            described = turns[index]
            if turn.role == "assistant":
                found = session.journal.restore(turn, link, branch, schemas, described)
                link = found.link
                steps.add_found(found)
            else:
                link = link if turn.role == "system" else next_link(link, described.key)
                steps.add(turn, described, link)
        return steps

    def _remember(self, done: Finished) -> None:
        place, report = done.place, done.report
        session, branch = place.session, place.branch
        self._causes[report.cause] += 1
        self._unexplained += not report.explained
        session.requests += 1
        session.prompt = report.prompt
        session.history.append(
            RequestRecord(
                number=session.requests,
                time=self._clock(),
                branch=branch.name,
                kind=place.kind,
                prompt=report.prompt,
                resumed=report.resumed,
                replayed=report.replayed,
                new=report.new,
                cause=report.cause,
                sampled=len(done.sampled.ids),
                complete=done.complete,
                device=report.device,
                host=report.host,
                disk=report.disk,
                remote=report.remote,
            )
        )
        alive = self._sessions.get(session.id) is session and session.branches.get(branch.name) is branch
        if not alive or place.kind == "side":
            return
        self._wake(session)
        self._idle.asked(session.id, branch.name, done.asked, report.resumed)
        self._learn(session.harness, report)
        if done.answered is not None:
            self._keep_answer(session, branch, done, done.answered)
        self._keeper.save(session, branch)

    def _keep_answer(self, session: Session, branch: Branch, done: Finished, answered: Asked) -> None:
        place = done.place
        if done.sampled.ids and place.kind != "raw":
            session.journal.record(done.blocks, done.sampled, place.link, branch.name)
        branch.remember(answered)
        if place.scope:
            turns = answered.turns[answered.head :]
            keys = chain(linked(place.scope, turns), branch.head, turns)
            self._lineage.add(session, branch, keys)
        self._weigh(session)

    def _learn(self, harness: str, report: ReuseReport) -> None:
        counts = self._habits[harness] = counted(self._habits.get(harness, {}), report.divergence)
        self._keeper.save_habit(harness, counts, self._clock())
        if report.lead:
            known = self._leads[harness] = learnt(self._leads.get(harness, ()), report.lead)
            self._keeper.save_leads(harness, known, self._clock())

    def _weigh(self, session: Session) -> None:
        self._tokens += session.tokens - self._weights.get(session.id, 0)
        self._weights[session.id] = session.tokens
        self._drop_surplus(session)

    def _drop_surplus(self, spared: Session | None = None) -> None:
        """Drops the least recently used session of the namespace that holds the most, so that a namespace that floods
        the server loses its own. Where only memory is short and sessions can be read again, they go to sleep instead.
        The last used of all and ``spared`` stay: the journal of each is bounded."""
        limits = self._limits
        while len(self._sessions) > 1:
            many = len(self._sessions) > limits.max_sessions
            if not many and self._tokens <= limits.max_tokens:
                return
            sleep = self._keeper.on and not many
            share: Counter[str] = Counter()
            for session in self._sessions.values():
                share[session.namespace] += 1 if many else self._weights.get(session.id, 0)
            *others, _ = (session for session in self._sessions.values() if session is not spared)
            going = [one for one in others if (one.id in self._weights if sleep else not one.pinned)]
            if not going:
                return
            least = max(going, key=lambda session: share[session.namespace])
            if sleep:
                self._sleep(least)
            else:
                self._dropped += 1
                self._drop(least)

    def _drop(self, session: Session, *, erase: bool = False) -> None:
        if erase:
            self._walks, self._digests = Walks(), self._digests.empty()
        del self._sessions[session.id]
        self._tokens -= self._weights.pop(session.id, 0)
        for branch in session.branches.values():
            self._lineage.forget(branch)
            self._idle.wasted(session.id, branch.name)
        self._keeper.forget(session, erase=erase)

    def _sleep(self, session: Session) -> None:
        self._tokens -= self._weights.pop(session.id, 0)
        if not session.asleep:
            session.stored_tokens = session.tokens
            session.asleep = True
            session.empty()


def _last(keys: Sequence[bytes], head: bytes) -> bytes:
    return keys[-1] if keys else head


def _free_name(session: Session) -> str:
    number = len(session.branches)
    while (name := f"branch-{number}" if number else "main") in session.branches:
        number += 1
    return name
