"""One request of one session, from its conversation to the tokens that were sampled for it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from parsers.conversation import Block, Conversation, Sampled, Turn
from parsers.events import Boundary
from parsers.load import Family
from parsers.render import Prompt
from sessions.anchors import AnchorPoint, WatchPoint, anchor_points, watch_points
from sessions.causes import Asked, Cause, Reuse, counted, explain, facts
from sessions.digest import TurnDigest, head_turns, pack, system_digest, tools_digest, turn_digest
from sessions.exact import sampled_turn
from sessions.harness import Harness, Identity, Kind, Protocol
from sessions.session import Branch, Session

_CALL_PREFIX: dict[Protocol, str] = {"anthropic": "toolu_", "responses": "call_", "chat": "call_"}


@dataclass(frozen=True)
class ReuseReport:
    """Where a prompt's tokens came from: ``resumed`` + ``replayed`` + ``new`` == ``prompt``. ``replayed`` counts what
    this branch had computed before and had to compute again, be it by a worker that is gone. ``explained`` is False
    where no rule named the cause, which is an error of ours."""

    prompt: int
    resumed: int
    replayed: int
    new: int
    cause: Cause
    explained: bool = True

    def header(self) -> str:
        return f"resumed={self.resumed}, replayed={self.replayed}, new={self.new}, cause={self.cause}"


@dataclass(frozen=True)
class Place:
    """Where a request belongs. ``turns`` are the digests of ``conversation``'s turns, ``link`` names all of them (see
    ``exact``), ``head`` is the digest of its system text and tools, ``scope`` its prefix index and ``keys`` its own
    entries there (empty where the client names its threads).
    Session and branch, where they are new, are known to nobody else until the request was accepted."""

    session: Session
    branch: Branch
    harness: Harness
    identity: Identity
    conversation: Conversation
    turns: tuple[TurnDigest, ...]
    link: bytes
    scope: bytes
    head: bytes
    keys: tuple[bytes, ...]

    @property
    def kind(self) -> Kind:
        return self.identity.kind


@dataclass(frozen=True)
class Finished:
    """What ``Visit.finish`` hands over to be remembered; ``answered`` is None if there is no answer, for then nobody
    knows how much of the prompt was computed."""

    place: Place
    answered: Asked | None
    blocks: tuple[Block, ...]
    sampled: Sampled
    report: ReuseReport
    complete: bool


class Visit:
    """``conversation`` is the client's with volatile lines left out, the session's tools put back and the exact tokens
    of earlier answers attached: render that one. Nothing is written down before the first ``report``. ``side`` requests
    leave no trace but their line in the timeline."""

    def __init__(
        self,
        place: Place,
        family: Family,
        protocol: Protocol,
        incarnation: str,
        accept: Callable[[Place], Place],
        remember: Callable[[Finished], None],
    ) -> None:
        self.session_id = place.session.id
        self.harness = place.harness.name
        self.kind: Kind = place.kind
        self.side = place.kind == "side"
        self.conversation = place.conversation
        self._place = place
        self._pasts = () if self.side else place.branch.pasts
        self._family = family
        self._protocol = protocol
        self._incarnation = incarnation
        self._accept = None if self.side else accept
        self._remember: Callable[[Finished], None] | None = remember

    def anchors(self, prompt: Prompt) -> tuple[AnchorPoint, ...]:
        return anchor_points(len(prompt.ids), prompt.spans, self._family.probe)

    def watches(self) -> tuple[WatchPoint, ...]:
        return watch_points(self._family.watches)

    def new_call_id(self) -> str:
        """Unguessable, because it names exact tokens; alphanumeric, because some clients strip the rest."""
        return _CALL_PREFIX[self._protocol] + secrets.token_hex(16)

    def new_ticket(self) -> str:
        """For a thinking's signature or encrypted_content: the client sends it back as it is."""
        return "ft" + secrets.token_hex(16)

    def report(self, prompt: Prompt, *, resumed: int, replayed: int, new: int, worker_cause: str) -> ReuseReport:
        """``resumed`` etc. are the worker's numbers, at admission its plan. The first report says that the request was
        accepted."""
        accept, self._accept = self._accept, None
        if accept is not None:
            self._place = accept(self._place)
        now = self._asked(prompt)
        seen = facts(now, prompt.spans, self._pasts, Reuse(resumed, replayed, new), worker_cause)
        reuse, cause = counted(seen), explain(seen)
        explained = cause is not None
        return ReuseReport(reuse.prompt, reuse.resumed, reuse.replayed, reuse.new, cause or "history_edited", explained)

    def finish(
        self,
        prompt: Prompt,
        sampled: Sequence[int],
        blocks: Sequence[Block],
        boundaries: Sequence[Boundary],
        report: ReuseReport,
        complete: bool,
    ) -> None:
        """``sampled`` may be cut short (``complete`` False): what the client got of it, it may send back. It is empty
        where no tokens stand for what the client got. ``blocks`` carry the call ids and tickets that the client was
        given. The second call of a visit does nothing."""
        remember, self._remember = self._remember, None
        if remember is None:
            return
        answered = self._answered(prompt, sampled, blocks) if sampled or blocks else None
        exact = sampled_turn(sampled, blocks, boundaries)
        remember(Finished(self._place, answered, tuple(blocks), exact, report, complete))

    def _asked(self, prompt: Prompt) -> Asked:
        conversation = self.conversation
        return Asked(
            pack(prompt.ids),
            tools_digest(conversation.tools),
            system_digest(conversation),
            head_turns(conversation),
            self._place.turns,
            tuple(turn.sampled is not None for turn in conversation.turns),
            self.kind,
            self._incarnation,
        )

    def _answered(self, prompt: Prompt, sampled: Sequence[int], blocks: Sequence[Block]) -> Asked:
        asked = self._asked(prompt)
        if not sampled:
            return asked
        return Asked(
            asked.tokens + pack(sampled),
            asked.tools,
            asked.system,
            asked.head,
            (*asked.turns, turn_digest(Turn("assistant", tuple(blocks)))),
            (*asked.exact, True),
            asked.kind,
            asked.incarnation,
        )
