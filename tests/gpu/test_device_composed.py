"""Compositions in one kernel: each against its torch twin, in the interpreter; and how many kernels a layer takes."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from dataclasses import fields
from types import ModuleType

import pytest
import torch
from torch import Tensor

from engine.api import PAGE
from engine.bench_shapes import RandomSource, qwen36
from engine.experts.layout import FORMATS, Layout
from engine.kernels import attention, beside, experts, linear, linear_many, mxfp4, pointwise, recurrent
from engine.kernels.ops import DeviceOps
from engine.kernels.resident import ResidentExperts
from engine.layers.loader import Loader
from engine.layers.ops import CPU, Batch, DeltaNet, GatedHeads, Norm, Ops, Routing
from engine.layers.reference import ReferenceOps
from engine.models.qwen3_5_moe import Qwen35Moe
from engine.runner import make_cache
from tests.gpu.test_device_ops import DEVICE, Draws, compare, make_batch

MODULES = (attention, beside, experts, linear, linear_many, mxfp4, pointwise, recurrent)
LAYOUT = Layout(FORMATS["int8"], 64, 32)


@pytest.mark.parametrize("inner", [200, 300])
@pytest.mark.parametrize("rows", [0, 1, 5, 17])
def test_norm_linear(rows: int, inner: int) -> None:
    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(inner)
        x, norm, packed = draw(rows, inner, scale=9), Norm(draw(inner), 1e-6, 1.0), ops.pack(draw(38, inner))
        return (*ops.norm_linear(x, norm, packed, draw(38)), *ops.norm_linear(x, norm, packed))

    compare(run)


@pytest.mark.parametrize("snapshots", [[], [(0, 1, 4)]])
@pytest.mark.parametrize(
    "segments", [[(1, 9, 3)], [(1, 5, 0), (0, 3, 5), (1, 70, 1), (3, 3, 2)], [(9, 5, 3)], [(20, 5, 3)]]
)
def test_norm_linear_conv(segments: list[tuple[int, int, int]], snapshots: list[tuple[int, int, int]]) -> None:
    batch = make_batch(segments, snapshots)

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw, rows = Draws(3), batch.positions.shape[0]
        x, norm, packed, state = draw(rows, 300), Norm(draw(300), 1e-6), ops.pack(draw(90, 300)), draw(9, 66, 3)
        return (*ops.norm_linear_conv(x, norm, packed, draw(66, 4), state, batch), state)

    compare(run)


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_gated_inputs_added_to_a_residual(rows: int) -> None:
    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(rows)
        x, wide, base, norm = draw(rows, 3, 128), draw(rows, 500, scale=9), draw(rows, 38), Norm(draw(128), 1e-6)
        gate, packed = wide[:, 100:484].view(rows, 3, 128), ops.pack(draw(38, 384))
        return (
            ops.add_linear(base.clone(), x.view(rows, -1), packed),
            ops.add_sigmoid_linear(base.clone(), x, gate, packed),
            ops.add_gated_norm_linear(base.clone(), x, gate, norm, packed),
            ops.add_silu_linear(base, wide[:, :256], ops.pack(draw(38, 128))),
        )

    compare(run)


def test_gated_delta_net() -> None:
    batch = make_batch([(3, 5, 0), (1, 70, 1)], [(0, 2, 2)])

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(1)
        k, v, gates, state = draw(4, 2, 12), draw(4, 4, 40), draw(4, 9, scale=3), draw(3, 4, 12, 40)
        q, a, b = k.flip(0), gates[:, :4], gates[:, 5:9]
        return ops.gated_delta_net(q, k, v, a, b, draw(4), draw(4), state, batch), state

    compare(run)


SEVERAL = [[(1, 9, 3)], [(1, 0, 0), (2, 70, 2)]]


@pytest.mark.parametrize("keys", [16, 11])
@pytest.mark.parametrize("snapshots", [[], [(0, 1, 4)]])
@pytest.mark.parametrize("segments", SEVERAL)
def test_delta_net(segments: list[tuple[int, int, int]], snapshots: list[tuple[int, int, int]], keys: int) -> None:
    """Of one row, too, where a part of the product is beside the delta rule; eleven keys are no whole programs."""
    batch = make_batch(segments, snapshots)

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw, rows, channels, values = Draws(5), batch.positions.shape[0], 2 * keys + 40, 40
        x, norm, packed = draw(rows, 72), Norm(draw(72), 1e-6, 1.0), ops.pack(draw(channels + values + 4, 72))
        net = DeltaNet(norm, packed, draw(channels, 4), draw(2), draw(2), 1, keys, 2, 20)
        window, state = draw(5, channels, 3), draw(5, 2, keys, 20)
        return (*ops.delta_net(x, net, window, state, batch), window, state)

    compare(run)


@pytest.mark.parametrize("dim", [16, 20])
@pytest.mark.parametrize("segments", SEVERAL)
def test_gated_heads(segments: list[tuple[int, int, int]], dim: int) -> None:
    batch = make_batch(segments)

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw, rows = Draws(6), batch.positions.shape[0]
        x, norm, packed = draw(rows, 72), Norm(draw(72), 1e-6, 1.0), ops.pack(draw(10 * dim, 72))
        norms = Norm(draw(dim), 1e-6, 1.0), Norm(draw(dim), 1e-5)
        of = GatedHeads(norm, packed, norms, ops.rope_table(100, 6, 1e4), 3, 2, dim)
        k_pages, v_pages = draw(4, 64, 2, dim), draw(4, 64, 2, dim)
        return (*ops.gated_heads(x, of, k_pages, v_pages, batch), k_pages, v_pages)

    compare(run)


@pytest.mark.parametrize("rows", [1, 14])
def test_qk_norm_rope(rows: int) -> None:
    batch = make_batch([(3, 62, 0), (rows, 5, 1)], padding=1)

    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw, count = Draws(2), rows + 4
        wide, k_pages, v_pages, norms = draw(count, 200), draw(4, 64, 2, 20), draw(4, 64, 2, 20), (draw(20), draw(20))
        q, k, v = wide[:, :120].view(count, 3, 40)[:, :, :20], *wide[:, 120:].view(count, 2, 2, 20).unbind(1)
        both = Norm(norms[0], 1e-6, 1.0), Norm(norms[1], 1e-5)
        out = ops.qk_norm_rope(q, k, v, both, ops.rope_table(100, 6, 1e4), k_pages, v_pages, batch)
        return out, k_pages, v_pages

    compare(run)


def with_experts(ops: Ops, draw: Draws) -> tuple[Ops, object]:
    """Weights that the format holds exactly."""
    blob, held = torch.empty(LAYOUT.nbytes, dtype=torch.uint8), []
    for _ in range(5):
        LAYOUT.encode(draw(64, 64) * 0.1, draw(64, 32) * 0.1, blob)
        held.append(LAYOUT.decode(blob))
    if not isinstance(ops, ReferenceOps):
        ops = DeviceOps(ResidentExperts(LAYOUT.format, CPU), CPU)
    return ops, ops.pack_experts(*(torch.stack(each) for each in zip(*held, strict=True)))


@pytest.mark.parametrize("rows", [1, 3, 17])
def test_shared_experts(rows: int) -> None:
    def run(ops: Ops) -> tuple[Tensor, ...]:
        draw = Draws(rows)
        ops, packed = with_experts(ops, draw)
        x, wide, down = draw(rows, 64), draw(rows, 100), ops.pack(draw(64, 32))
        routing = Routing(wide[:, 67:72], 2, True)
        ids, weights = ops.route(routing.logits, routing.k, routing.renormalize)
        gate_up, gate = wide[:, 3:67], wide[:, 99:]
        return (
            ops.add_shared_experts(draw(rows, 64), x, routing, packed, gate_up, gate, down),
            ops.add_experts(x.clone(), x, ids, weights, packed),
        )

    compare(run)


def test_a_row_is_the_same_in_any_company() -> None:
    draw = Draws(0)
    x, wide, norm, head_norm = draw(6, 384), draw(6, 384), Norm(draw(384), 1e-6), Norm(draw(128), 1e-6)
    packed = DEVICE.pack(draw(38, 384))

    def run(rows: slice) -> list[Tensor]:
        heads, gate, base = x[rows].view(-1, 3, 128), wide[rows].view(-1, 3, 128), wide[rows, :38].contiguous()
        return [
            *DEVICE.norm_linear(x[rows], norm, packed),
            DEVICE.add_sigmoid_linear(base, heads, gate, packed),
            DEVICE.add_gated_norm_linear(base, heads, gate, head_norm, packed),
        ]

    together = run(slice(6))
    for rows in (slice(0, 2), slice(1, 6)):
        assert all(torch.equal(part, whole[rows]) for part, whole in zip(run(rows), together, strict=True))


def kernels(module: ModuleType) -> list[ast.FunctionDef]:
    """What the module launches."""
    tree = ast.parse(inspect.getsource(module))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch"]
    names = {ast.unparse(call.args[0]) for call in calls}
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]


EARLY = (
    "slot = tl.load(segments +", "first, rows = (tl.load(segments +", "angle = angles + (tl.load(positions +",
    "cos = tl.load(angle,", "sin = tl.load(angle +", "tile = tl.load(weight +", "tile = tl.load(matrix +",
    "if FUSED:\n    memory = tl.load(cells,", "if EARLY:\n    page = tl.load(table +",
)  # fmt: skip


def touches(text: str) -> bool:
    return "tl.load" in text or "tl.store" in text or "atomic" in text


def functions(module: ModuleType) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.FunctionDef)]


def waits(statements: list[ast.stmt]) -> bool:
    """Whether every way through them waits, there or in a function."""
    return any(
        (isinstance(one, ast.If) and waits(one.body) and waits(one.orelse))
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and ast.unparse(one.value.func) in WAITING)
        for one in statements
    )


WAITING = {"wait"}
for _ in range(2):
    WAITING |= {function.name for module in MODULES for function in functions(module) if waits(function.body)}


@pytest.mark.parametrize("module", MODULES)
def test_before_they_wait_kernels_touch_nothing_but_weights_and_the_batch(module: ModuleType) -> None:
    assert kernels(module)
    for function in functions(module):
        lines = [ast.unparse(statement) for statement in function.body]
        if "wait()" in lines:
            early = [line for line in lines[: lines.index("wait()")] if touches(line)]
            assert all(line.startswith(EARLY) for line in early), function.name
    for kernel in kernels(module):
        lines = [ast.unparse(statement) for statement in kernel.body]
        if "wait()" in lines:
            assert lines[0] == "begin()" or "begin()" in lines[lines.index("wait()") :], kernel.name
        else:
            assert lines[0] == "begin()" and waits(kernel.body) and not any(map(touches, lines)), kernel.name


class Sizes(RandomSource):
    """Weights that are nowhere."""

    def __init__(self) -> None:
        self.dtype = torch.float16

    def _normal(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")


class Somewhere(ResidentExperts):
    def pack(self, gate_up: Tensor, down: Tensor) -> int:
        layout = Layout(self._format, down.shape[1], down.shape[2])
        self._layers.append((layout, torch.empty(down.shape[0], layout.nbytes, dtype=torch.uint8, device="meta")))
        return len(self._layers) - 1


def test_a_decode_step_is_so_many_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven for a layer of Gated DeltaNet, nine for one of attention, one for the head: each costs about a microsecond
    besides its work."""
    meta, names = torch.device("meta"), Counter[str]()
    for module in MODULES:
        monkeypatch.setattr(module, "launch", lambda kernel, *_, **__: names.update([kernel.__name__]))
    ops = DeviceOps(Somewhere(FORMATS["mxfp4"], meta), meta)
    model = Qwen35Moe(qwen36(4), Loader(Sizes(), ops, meta), PAGE, lambda *_: None)
    cache = make_cache(model.manifest, torch.bfloat16, 4, 4, meta)
    batch = make_batch([(1, 70, 1)])
    moved = {field.name: getattr(batch, field.name).to(meta) for field in fields(batch)}
    model.forward(Batch(**moved | {"logit_rows": torch.empty(1, dtype=torch.int64, device=meta)}), cache)
    assert names.total() == 3 * 7 + 9 + 1, names
