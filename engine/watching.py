"""Checkpoints at what a sequence samples: the state before a watched token sequence, before its first token is fed."""

from __future__ import annotations

from collections.abc import Callable

from engine.memory.memory import Memory
from engine.memory.states import Want
from engine.sequence import Sequence


class Watching:
    """``copy_state``: copies a recurrent state from one slot to another."""

    def __init__(self, memory: Memory, copy_state: Callable[[int, int], None]) -> None:
        self._memory = memory
        self._copy_state = copy_state

    def sampled(self, sequence: Sequence) -> None:
        """Keep the state before a watched token sequence. While one of several tokens may be going on, the state
        before its first token waits in a slot."""
        if not sequence.request.watches:
            return
        longest = max(len(watch.tokens) for watch in sequence.request.watches)
        sampled = sequence.tokens[max(sequence.prompt, len(sequence.tokens) - longest) :]
        going: set[int] = set()
        for watch in sequence.request.watches:
            want = Want(watch.kind, watch.priority)
            for length in range(1, min(len(watch.tokens), len(sampled)) + 1):
                if tuple(sampled[-length:]) != watch.tokens[:length]:
                    continue
                position = len(sequence.tokens) - length
                if length == 1:
                    self._hold(sequence, position, want)
                if length < len(watch.tokens):
                    going.add(position)
                elif position in sequence.begun or not self._memory.recurrent:
                    self._keep(sequence, position, want)
        for position in set(sequence.begun) - going:
            self._memory.give_back(sequence.begun.pop(position))

    def _hold(self, sequence: Sequence, position: int, want: Want) -> None:
        """Copy the live state, which is that at ``position``, aside."""
        if position in sequence.begun:
            return
        lease = sequence.leased
        slot = self._memory.reserve_slot(lease, want)
        if slot is not None:
            self._copy_state(lease.slot, slot)
            sequence.begun[position] = slot

    def _keep(self, sequence: Sequence, position: int, want: Want) -> None:
        """Make the state held for ``position`` a checkpoint."""
        if not self._memory.recurrent:
            sequence.kept.add(position)
            return
        slot = sequence.begun.pop(position)
        if self._memory.capture(sequence.leased, sequence.tokens, position, slot, want):
            sequence.kept.add(position)
