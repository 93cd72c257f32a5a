"""A program for test_products.py: compiles, as for an H200, the kernels that read what a product gives as float16.
Outside Triton's interpreter, which takes any mixture of types."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import prefill_conv, products

HALF, WHOLE = "*fp16", "*fp32"
KERNELS = {
    "conv": (
        prefill_conv._conv, {"x": HALF, "weight": WHOLE, "states": WHOLE, "out": HALF, "segments": "*i32"},
        {"WIDTH": 4, "ROWS": 16, "CHANNELS": 128, "SEGMENTS": 1},
    ),
    "norm": (
        products._prepare,
        {"x": HALF, "gate": HALF, "out": HALF} | dict.fromkeys(("norm", "share"), WHOLE)
        | dict.fromkeys(("eps", "offset", "scale"), "fp32"),
        {"NORM": True, "GATE": True, "SILU": True, "SHARE": True, "SOME": 32, "DIM": 128},
    ),
}  # fmt: skip


for name in sys.argv[1:]:
    kernel, types, constants = KERNELS[name]
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
