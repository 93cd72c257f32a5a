"""A program for test_grouped.py: compiles a product of quantised experts as for an H200, without a GPU and outside
Triton's interpreter. Prints how many products it has, and how many of them may be going on after each wait."""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.grouped import _KINDS, MANY, TILES, _product


def main(name: str, half: str) -> None:
    tile = TILES[name][MANY]
    constants = {
        "DOWN": False, "KIND": _KINDS[name], "WORDS": 136, "EXPERTS": 256, "PAIRS": tile.pairs, "SMALL": tile.small,
        "REST": tile.rest, "COLUMNS": tile.columns, "K": tile.k,
    }  # fmt: skip
    kinds = {"x": half, "out": half} | dict.fromkeys(("slots", "order", "start", "slot_of"), "*i32")
    names = _product.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    even = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name not in constants}
    source = ASTSource(_product, signature, {(names.index(name),): value for name, value in constants.items()}, even)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    products = len(re.findall(r"warp_group_dot ", code))
    print(json.dumps([products, [int(count) for count in re.findall(r"pendings = (\d+)", code)]]))


main(*sys.argv[1:])
