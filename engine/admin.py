"""What a person may ask of the store of a running worker, and of its memory."""

from __future__ import annotations

from collections.abc import Callable

from engine.api import PAGE, Admin, AdminReply
from engine.device.partition import Partition
from engine.memory.memory import Memory
from engine.memory.resize import DoesNotFit

GC_SECONDS = 600.0


def admin(memory: Memory, partition: Partition, command: Admin) -> Callable[[], AdminReply]:
    """Does at once what concerns the device; the rest is what is returned, may take long and runs in any thread."""
    if command.action == "cache_stat" or command.action == "cache_set":
        reply = _cache(partition, command)
        return lambda: reply
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


def _cache(partition: Partition, command: Admin) -> AdminReply:
    """How memory is divided, after it was divided anew if that was asked for. All or nothing."""
    arguments = dict(command.arguments) if command.action == "cache_set" else None
    try:
        if arguments:
            partition.set(**_sizes(arguments))
        elif arguments is not None:
            partition.release()
    except DoesNotFit as error:
        return AdminReply(command.id, False, {}, str(error))
    return AdminReply(command.id, True, {**partition.report()})


def _sizes(arguments: dict[str, str]) -> dict[str, int]:
    """As ``Partition.set`` takes them. Raises DoesNotFit for what are no numbers of these."""
    sizes: dict[str, int] = {}
    for name, text in arguments.items():
        if name not in ("experts", "kv", "states") or not text.isascii() or not text.isdigit() or len(text) > 15:
            raise DoesNotFit(f"{name} {text}: experts, kv (tokens) and states can be set, to a number of them")
        sizes[{"experts": "slots", "kv": "pages"}.get(name, name)] = int(text)
    if "pages" in sizes:
        sizes["pages"] = -(-sizes["pages"] // PAGE)
    return sizes
