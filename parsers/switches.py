"""From what a client asks for to what a family's template is told."""

from __future__ import annotations

from parsers.format import EFFORTS, Effort, Switches


def variables(switches: Switches, thinking: bool, effort: Effort | None) -> dict[str, object]:
    """The template's variables. The effort "none" is no thinking; without an effort the template has its own."""
    if not thinking or effort == "none":
        return {**switches.always, **switches.off}
    level = _level(switches, effort)
    return {**switches.always, **switches.on, **(switches.efforts[level] if level else {})}


def levels(switches: Switches) -> tuple[Effort, ...]:
    """The efforts that make a difference, from less to more. A family that can only be switched on and off knows
    "none" and "medium"."""
    known = sorted(switches.efforts, key=EFFORTS.index)
    off, on = dict(switches.off), dict(switches.on)
    told = [{**on, **switches.efforts[level]} for level in known] or [on]
    switched = off != on and off not in told
    return (*(("none",) if switched else ()), *(known or (("medium",) if switched else ())))


def _level(switches: Switches, effort: Effort | None) -> Effort | None:
    """The family's level for an effort: the next lower one, or else its lowest."""
    if effort is None or not switches.efforts:
        return None
    known = sorted(switches.efforts, key=EFFORTS.index)
    lower = [level for level in known if EFFORTS.index(level) <= EFFORTS.index(effort)]
    return lower[-1] if lower else known[0]
