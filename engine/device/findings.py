"""What a check on a GPU has found, a line each. What is wrong fails it; a goal of speed that is missed does not: on
another machine, or beside other work, it may be out of reach."""

from __future__ import annotations

wrong: list[str] = []
missed: list[str] = []


def report(name: str, value: str, right: bool = True) -> None:
    _tell(name, value, "" if right else "WRONG")
    if not right:
        wrong.append(name)


def aim(name: str, value: str, reached: bool) -> None:
    """As ``report``, of what is to be fast."""
    _tell(name, value, "" if reached else "goal missed")
    if not reached:
        missed.append(name)


def verdict(seconds: float) -> int:
    """The last line, and the exit code."""
    goals = f", goals missed: {len(missed)}" if missed else ""
    _tell("some of it is WRONG" if wrong else "all right", f"after {seconds:.0f} s{goals}", "")
    return 1 if wrong else 0


def _tell(name: str, value: str, mark: str) -> None:
    print(f"{name:58} {value:>28}   {mark}".rstrip(), flush=True)
