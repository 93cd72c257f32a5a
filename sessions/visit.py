"""One request of one session, from its conversation to the tokens that were sampled for it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from parsers.conversation import Block, Conversation, Sampled, Turn
from parsers.events import Boundary
from parsers.load import Family
from parsers.render import Prompt
from sessions.anchors import AnchorPoint, anchor_points
from sessions.causes import Asked, Cause, Reuse, counted, explain, facts
from sessions.digest import TurnDigest, head_turns, pack, system_digest, turn_digest
from sessions.exact import sampled_turn
from sessions.harness import Harness, Identity, Kind, Protocol
from sessions.idle import Followup
from sessions.partings import Leads, lead, opening, places
from sessions.prior import Divergence, divergence
from sessions.session import Branch, Session

_CALL_PREFIX: dict[Protocol, str] = {
    "anthropic": "toolu_",
    "responses": "call_",
    "chat": "call_",
    "completions": "call_",
}


@dataclass(frozen=True, kw_only=True)
class ReuseReport(Reuse):
    """Where a prompt's tokens came from, and why. ``replayed`` counts what this branch had computed before and had to
    compute again, be it by a worker that is gone. ``explained`` is False where no rule named the cause, which is an
    error of ours. ``divergence``: where the prompt left what its branch had before. ``lead``: what leads to the place
    where its opening left all that was known, if that is worth remembering (see ``partings``)."""

    cause: Cause
    explained: bool = True
    divergence: Divergence = "append"
    lead: bytes = b""

    def header(self) -> str:
        remote = f"remote={self.remote}, " if self.remote else ""
        return (
            f"resumed={self.resumed}, device={self.device}, host={self.host}, disk={self.disk}, {remote}"
            f"replayed={self.replayed}, new={self.new}, cause={self.cause}"
        )


@dataclass(frozen=True)
class Place:
    """Where a request belongs. ``turns`` and ``tools`` are the digests of ``conversation``'s, ``link`` names all turns
    (see ``exact``), ``head`` is the digest of its system text and tools, ``scope`` its prefix index and ``keys`` its
    own entries there (empty where the client names its threads), ``priorities`` what anchors are worth to its harness,
    ``leads`` what leads to where its openings part.
    ``elsewhere``: tokens of another tokenizer or template are remembered of it. ``keep_walk``: remembers what was found
    out about the turns, where nothing was forgotten since.
    Session and branch, where they are new, are known to nobody else until the request was accepted."""

    session: Session
    branch: Branch
    harness: Harness
    identity: Identity
    conversation: Conversation
    turns: tuple[TurnDigest, ...]
    tools: bytes
    link: bytes
    scope: bytes
    head: bytes
    keys: tuple[bytes, ...]
    priorities: Mapping[str, float]
    leads: Leads
    elsewhere: bool
    keep_walk: Callable[[], None]

    @property
    def kind(self) -> Kind:
        return self.identity.kind


@dataclass(frozen=True)
class Finished:
    """What ``Visit.finish`` hands over to be remembered; ``answered`` is None if there is no answer, for then nobody
    knows how much of the prompt was computed."""

    place: Place
    asked: Asked
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
        fingerprint: str,
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
        self._fingerprint = fingerprint
        self._accept = None if self.side else accept
        self._remember: Callable[[Finished], None] | None = remember
        self._asked: Asked | None = None
        self.followup: Followup | None = None
        """After ``finish``: what the next message of the user will continue."""

    def anchors(self, prompt: Prompt) -> tuple[AnchorPoint, ...]:
        leads = self._place.leads
        partings = places(leads, self._asked_with(prompt).tokens, opening(prompt.spans)) if leads else ()
        return anchor_points(len(prompt), prompt.spans, self._family.probe, self._place.priorities, partings)

    def new_call_id(self) -> str:
        """Unguessable, because it names exact tokens; alphanumeric, because some clients strip the rest."""
        return _CALL_PREFIX[self._protocol] + secrets.token_hex(16)

    def new_ticket(self) -> str:
        """For a thinking's signature or encrypted_content: the client sends it back as it is."""
        return "ft" + secrets.token_hex(16)

    def report(self, prompt: Prompt, reuse: Reuse, worker_cause: str) -> ReuseReport:
        """``reuse`` as the worker tells it, at admission its plan. The first report says that the request was
        accepted."""
        accept, self._accept = self._accept, None
        if accept is not None:
            self._place = accept(self._place)
        now = self._asked_with(prompt)
        seen = facts(now, prompt.spans, self._pasts, reuse, worker_cause, elsewhere=self._place.elsewhere)
        cause = explain(seen)
        return ReuseReport(
            *astuple(counted(seen)),
            cause=cause or "history_edited",
            explained=cause is not None,
            divergence=divergence(seen),
            lead=lead(now.tokens, opening(prompt.spans), reuse.resumed, reuse.replayed),
        )

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
        asked = self._asked_with(prompt)
        answered = _answered(asked, sampled, blocks) if sampled or blocks else None
        exact = sampled_turn(sampled, blocks, boundaries, prompt.opener)
        remember(Finished(self._place, asked, answered, tuple(blocks), exact, report, complete))
        if answered is not None and complete and self.kind == "main" and sampled:
            turn = Turn("assistant", tuple(blocks), exact)
            conversation = replace(self.conversation, turns=(*self.conversation.turns, turn))
            self.followup = Followup(
                session=self.session_id,
                branch=self._place.branch.name,
                namespace=self._place.session.namespace,
                conversation=conversation,
                thinking=prompt.thinking,
                effort=prompt.effort,
                answered=answered,
            )

    def _asked_with(self, prompt: Prompt) -> Asked:
        if self._asked is not None:  # a visit has one prompt
            return self._asked
        conversation = self.conversation
        self._asked = Asked(
            tokens=prompt.packed,
            tools=self._place.tools,
            system=system_digest(conversation),
            head=head_turns(conversation),
            turns=self._place.turns,
            exact=tuple(turn.sampled is not None for turn in conversation.turns),
            kind=self.kind,
            incarnation=self._incarnation,
            fingerprint=self._fingerprint,
            effort=(prompt.effort or "usual") if prompt.thinking else "none",
        )
        return self._asked


def _answered(asked: Asked, sampled: Sequence[int], blocks: Sequence[Block]) -> Asked:
    if not sampled:
        return asked
    return replace(
        asked,
        tokens=asked.tokens + pack(sampled),
        turns=(*asked.turns, turn_digest(Turn("assistant", tuple(blocks)))),
        exact=(*asked.exact, True),
    )
