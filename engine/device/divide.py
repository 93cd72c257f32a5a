"""Divides what a device has beside the dense weights: an arena where it has virtual memory, else once and for all."""

from __future__ import annotations

import logging
from dataclasses import replace

from engine.device.arena import Arena, FixedArena, Shapes, extents, needed
from engine.device.driver import DriverError
from engine.device.machine import MARGIN, Machine
from engine.device.memory import Sizes, allocate
from engine.device.partition import Policy
from engine.device.plan import Plan

_log = logging.getLogger(__name__)
MOST_STATES = 4096
LINK_BYTES = 20e9
"""A second, until it was measured."""


def divide(plan: Plan, machine: Machine) -> Arena | FixedArena:
    """As the plan says, but for slots that the rounding of tensors to whole granules takes. Raises DoesNotFit, and
    RuntimeError where the device has not so much."""
    what = plan.outline
    shapes = Shapes(what.manifest, what.dtype, plan.stride)
    try:
        virtual = None if machine.virtual is None else machine.virtual()
    except DriverError as error:
        _log.warning("how much of the device experts, pages and states have cannot change: %s", error)
        virtual = None
    if virtual is None:
        memory = allocate(what.manifest, what.dtype, plan.stride, plan.sizes, machine.device)
        return FixedArena(memory, shapes, plan.sizes)
    budget, most = plan.room, most_sizes(plan)
    of = extents(shapes, most, virtual.granule)
    over = needed(of, plan.sizes) * virtual.granule - budget
    slots = max(least_slots(plan), plan.sizes.slots - max(0, -(-over // plan.stride)))
    sizes = replace(plan.sizes, slots=slots)
    budget = max(budget, needed(of, sizes) * virtual.granule)
    return Arena(virtual, shapes, sizes=sizes, most=most, budget=budget, device=machine.device)


def most_sizes(plan: Plan) -> Sizes:
    """What each could have if the others had the least: addresses for it cost nothing."""
    what, sizes = plan.outline, plan.sizes
    count = what.layers * what.experts
    room = plan.room - (least_slots(plan) + 1) * plan.stride
    pages = (room - sizes.states * what.manifest.slot_bytes) // what.manifest.page_bytes(what.dtype)
    states = min(MOST_STATES, room // 4 // max(1, what.manifest.slot_bytes))
    slots = sizes.slots if plan.mode == "cpu" else count
    return Sizes(slots, max(sizes.pages, pages), max(sizes.states, states))


def least_slots(plan: Plan) -> int:
    """Where all experts are computed on the device they must be there; else as many as a token needs, if there are."""
    if plan.mode == "device":
        return plan.sizes.slots
    return min(plan.sizes.slots, plan.outline.layers * plan.outline.top_k)


def policy(plan: Plan, machine: Machine) -> Policy:
    part = plan.layout.nbytes / plan.layout.parts
    return Policy(
        least_slots=least_slots(plan),
        experts=plan.outline.layers * plan.outline.experts,
        part_seconds=part / (plan.rates.both if plan.rates else LINK_BYTES),
        floor=max(0, min(MARGIN // 4, machine.free - plan.budget)),
        grows=True,
    )
