"""What a person may ask of the store of a running worker."""

from __future__ import annotations

from collections.abc import Callable

from engine.api import Admin, AdminReply
from engine.memory.memory import Memory

GC_SECONDS = 600.0


def admin(memory: Memory, command: Admin) -> Callable[[], AdminReply]:
    """Does at once what concerns the device; the rest is what is returned, may take long and runs in any thread."""
    store, session = memory.behind.store, command.arguments.get("session")

    def refused(message: str) -> Callable[[], AdminReply]:
        return lambda: AdminReply(command.id, False, {}, message)

    def done(values: dict[str, str | float], message: str = "") -> AdminReply:
        return AdminReply(command.id, True, values, message)

    if unknown := command.arguments.keys() - {"session"}:
        return refused(f"unknown arguments: {', '.join(sorted(unknown))}")
    if store is None:
        return refused("this server runs without a store")
    match command.action:
        case "store_stat":
            return lambda: done({**store.stats()})
        case "store_verify":
            return lambda: done({**store.verify()})
        case "store_gc":
            return lambda: AdminReply(command.id, store.collect(GC_SECONDS), {**store.stats()})
        case "store_forget":
            memory.forget(session)
            return lambda: done({"forgotten": float(store.forget(session))})
        case "store_pin" | "store_unpin" if session is None:
            return refused("which session?")
        case "store_pin" | "store_unpin":
            count = store.pin(session, command.action == "store_pin")
            return lambda: done({"checkpoints": float(count)}, "" if count else f"nothing is stored of {session}")
