"""The operations in C++. Tensors cross as raw pointers, so every argument is checked here first."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.api import PAGE
from engine.layers.composed import Composed
from engine.layers.ops import Batch
from engine.layers.rope_table import rope_table
from engine.native.library import (
    BatchView,
    NativeLibraryError,
    find_library,
    load_library,
    physical_cores,
    supported_instruction_sets,
)

_LARGE_PAGE = 2 << 20
_PANEL = 32
_HALF = 16
_ANY = -1
_WEIGHTS = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class PackedWeight:
    """A linear weight [out, inner] in the kernels' order (``buffer``, bytes)."""

    buffer: Tensor
    out: int
    inner: int
    bfloat: bool


@dataclass(frozen=True)
class PackedExperts:
    """One layer's experts in the kernels' order."""

    gate_up: Tensor
    down: Tensor
    count: int
    hidden: int
    inner: int
    bfloat: bool


class NativeOps(Composed):
    """Implements ``engine.layers.ops.Ops``; shapes and meanings are documented there.

    A tensor of a wrong shape, dtype or layout, and a batch that points outside its tensors, raise ValueError. Results
    are the same bits for every instruction set and number of threads, but that one NaN is as good as another. Not for
    use after a fork.
    """

    def __init__(self, instruction_set: str = "auto", threads: int = 0, library: Path | None = None) -> None:
        """``instruction_set``: ``auto``, ``avx512``, ``avx2`` or ``scalar``. ``threads`` 0: one per physical core.
        Raises NativeLibraryError."""
        self._library = load_library(library or find_library())
        supported = supported_instruction_sets(self._library)
        self.instruction_set = supported[0] if instruction_set == "auto" else instruction_set
        if self.instruction_set not in supported:
            raise NativeLibraryError(
                f"instruction set {instruction_set!r} cannot run here: --instruction-set is auto, or one of "
                f"{', '.join(supported)}"
            )
        self.threads = threads or physical_cores()
        self._context = ctypes.c_void_p(self._library.ft_create(self.instruction_set.encode(), self.threads))
        if not self._context:
            raise NativeLibraryError(f"{self.threads} threads could not be started: ask for fewer (--threads)")
        weakref.finalize(self, self._library.ft_destroy, self._context)
        self._viewed: tuple[Batch, BatchView] | None = None

    # ── linear layers and experts ───────────────────────────────────────────────────────────────────────────────

    def pack(self, weight: Tensor) -> PackedWeight:
        _check("weight", weight, (None, None), *_WEIGHTS)
        out, inner = weight.shape
        packed = PackedWeight(
            self.room(weight.element_size() * _panels(out, _PANEL) * inner), out, inner, _is_bfloat(weight)
        )
        self._call(self._library.ft_pack, weight.data_ptr(), packed.bfloat, out, inner, packed.buffer.data_ptr())
        return packed

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        _check("x", x, (_ANY, weight.inner))
        if bias is not None:
            _check("bias", bias, (weight.out,))
        y = torch.empty((x.shape[0], weight.out))
        self._call(
            self._library.ft_linear,
            x.data_ptr(),
            x.shape[0],
            weight.buffer.data_ptr(),
            weight.bfloat,
            weight.out,
            weight.inner,
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
        )
        return y

    def room_for_experts(self, count: int, hidden: int, inner: int, dtype: torch.dtype) -> PackedExperts:
        """Uninitialised experts, to be filled by ``pack_experts`` or, where any values do, directly."""
        return PackedExperts(
            self.room(dtype.itemsize * count * _panels(inner, _HALF) * hidden),
            self.room(dtype.itemsize * count * _panels(hidden, _PANEL) * inner),
            count,
            hidden,
            inner,
            dtype == torch.bfloat16,
        )

    def pack_experts(self, gate_up: Tensor, down: Tensor) -> PackedExperts:
        _check("down", down, (None, None, None), *_WEIGHTS)
        count, hidden, inner = down.shape
        _check("gate_up", gate_up, (count, 2 * inner, hidden), down.dtype)
        packed = self.room_for_experts(count, hidden, inner, down.dtype)
        self._call(
            self._library.ft_pack_experts,
            gate_up.data_ptr(),
            down.data_ptr(),
            packed.bfloat,
            count,
            hidden,
            inner,
            packed.gate_up.data_ptr(),
            packed.down.data_ptr(),
        )
        return packed

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts) -> Tensor:
        _check("x", x, (_ANY, experts.hidden))
        _check("ids", ids, (x.shape[0], None), torch.int32)
        _check("weights", weights, tuple(ids.shape))
        y = torch.empty_like(x)
        self._call(
            self._library.ft_experts,
            x.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            *ids.shape,
            experts.gate_up.data_ptr(),
            experts.down.data_ptr(),
            experts.bfloat,
            experts.count,
            experts.hidden,
            experts.inner,
            y.data_ptr(),
        )
        return y

    def route(self, logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        _check("logits", logits, (_ANY, None))
        rows, count = logits.shape
        if not 1 <= k <= count:
            raise ValueError(f"k must be between 1 and the {count} experts, not {k}")
        ids, weights = torch.empty((rows, k), dtype=torch.int32), torch.empty((rows, k))
        self._call(
            self._library.ft_route,
            logits.data_ptr(),
            rows,
            count,
            k,
            renormalize,
            ids.data_ptr(),
            weights.data_ptr(),
        )
        return ids, weights

    # ── norms and activations ───────────────────────────────────────────────────────────────────────────────────

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return self._norm(x, None, weight, eps, offset)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        gate = gate.contiguous()
        _check("gate", gate, tuple(x.shape))
        return self._norm(x, gate, weight, eps, 0.0)

    def _norm(self, x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, offset: float) -> Tensor:
        x = x.contiguous()
        _check("x", x, (_ANY,) * (x.dim() - 1) + (None,))
        dim = x.shape[-1]
        _check("weight", weight, (dim,))
        y = torch.empty_like(x)
        self._call(
            self._library.ft_rms_norm,
            x.data_ptr(),
            weight.data_ptr(),
            None if gate is None else gate.data_ptr(),
            eps,
            offset,
            x.numel() // dim,
            dim,
            y.data_ptr(),
        )
        return y

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        _check("gate_up", gate_up, (_ANY, None))
        rows, width = gate_up.shape
        if width % 2:
            raise ValueError(f"gate_up must have an even last dimension, not {width}")
        y = torch.empty((rows, width // 2))
        self._call(self._library.ft_silu_mul, gate_up.data_ptr(), rows, width // 2, y.data_ptr())
        return y

    def sigmoid_mul(self, x: Tensor, gate: Tensor, base: Tensor | None = None) -> Tensor:
        x, gate = x.contiguous(), gate.contiguous()
        _check("x", x, (_ANY,) * (x.dim() - 1) + (None,))
        rows = x.shape[0]
        width = x.shape[1:].numel()
        shared = gate.shape[-1] == 1
        _check("gate", gate, (rows, 1) if shared else tuple(x.shape))
        y = torch.empty_like(x)
        self._call(self._library.ft_sigmoid_mul, x.data_ptr(), gate.data_ptr(), shared, rows, width, y.data_ptr())
        return y if base is None else base + y

    def rope_table(self, context: int, rotary: int, theta: float) -> Tensor:
        return rope_table(context, rotary, theta)

    def rope(self, x: Tensor, positions: Tensor, table: Tensor) -> None:
        _check("x", x, (_ANY, None, None))
        rows, heads, head_dim = x.shape
        _check("positions", positions, (rows,), torch.int32)
        _check("table", table, (None, None, 2))
        context, half, _ = table.shape
        if 2 * half > head_dim:
            raise ValueError(f"the table rotates {2 * half} dimensions of heads that have {head_dim}")
        self._call(
            self._library.ft_rope,
            x.data_ptr(),
            positions.data_ptr(),
            table.data_ptr(),
            context,
            half,
            rows,
            heads,
            head_dim,
        )

    # ── recurrences ─────────────────────────────────────────────────────────────────────────────────────────────

    def conv(self, x: Tensor, weight: Tensor, state: Tensor, batch: Batch) -> Tensor:
        view, x = self._view(batch), x.contiguous()
        _check("x", x, (view.rows, None))
        channels = x.shape[1]
        _check("weight", weight, (channels, None))
        width = weight.shape[1]
        _check("state", state, (None, channels, width - 1))
        y = torch.empty_like(x)
        self._call(
            self._library.ft_conv,
            x.data_ptr(),
            channels,
            width,
            weight.data_ptr(),
            state.data_ptr(),
            state.shape[0],
            view,
            y.data_ptr(),
        )
        return y

    def gdn_gates(self, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        a, b = a.contiguous(), b.contiguous()
        _check("a", a, (_ANY, None))
        rows, heads = a.shape
        _check("b", b, (rows, heads))
        _check("a_log", a_log, (heads,))
        _check("dt_bias", dt_bias, (heads,))
        decay, beta = torch.empty_like(a), torch.empty_like(a)
        self._call(
            self._library.ft_gdn_gates,
            a.data_ptr(),
            b.data_ptr(),
            a_log.data_ptr(),
            dt_bias.data_ptr(),
            rows,
            heads,
            decay.data_ptr(),
            beta.data_ptr(),
        )
        return decay, beta

    def gated_delta(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, batch: Batch
    ) -> Tensor:
        view = self._view(batch)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        _check("k", k, (view.rows, None, None))
        _, key_heads, key_dim = k.shape
        _check("q", q, (view.rows, key_heads, key_dim))
        _check("v", v, (view.rows, None, None))
        _, value_heads, value_dim = v.shape
        if value_heads % key_heads:
            raise ValueError(f"{value_heads} value heads cannot share {key_heads} key heads")
        _check("decay", decay, (view.rows, value_heads))
        _check("beta", beta, (view.rows, value_heads))
        _check("state", state, (None, value_heads, key_dim, value_dim))
        y = torch.empty_like(v)
        self._call(
            self._library.ft_gated_delta,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            decay.data_ptr(),
            beta.data_ptr(),
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            state.data_ptr(),
            state.shape[0],
            view,
            y.data_ptr(),
        )
        return y

    def copy_state(self, state: Tensor, source: int, target: int) -> None:
        state[target].copy_(state[source])

    # ── attention ───────────────────────────────────────────────────────────────────────────────────────────────

    def attention(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch, scale: float) -> Tensor:
        view = self._view(batch)
        pages, kv_heads, head_dim = _check_pages(k_pages, v_pages)
        _check("q", q, (view.rows, None, head_dim))
        heads = q.shape[1]
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads")
        y = torch.empty_like(q)
        self._call(
            self._library.ft_attention,
            q.data_ptr(),
            heads,
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            _is_bfloat(k_pages),
            pages,
            kv_heads,
            head_dim,
            scale,
            view,
            y.data_ptr(),
        )
        return y

    def write_pages(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, batch: Batch) -> None:
        view = self._view(batch)
        pages, kv_heads, head_dim = _check_pages(k_pages, v_pages)
        k, v = k.contiguous(), v.contiguous()
        _check("k", k, (view.rows, kv_heads, head_dim))
        _check("v", v, (view.rows, kv_heads, head_dim))
        self._call(
            self._library.ft_write_pages,
            k.data_ptr(),
            v.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            _is_bfloat(k_pages),
            pages,
            kv_heads,
            head_dim,
            view,
        )

    # ── measuring ───────────────────────────────────────────────────────────────────────────────────────────────

    def read(self, memory: Tensor) -> int:
        """XOR of the 64-bit words in the whole MiB of ``memory`` (uint8 [bytes]), read by all threads."""
        _check("memory", memory, (_ANY,), torch.uint8)
        total = ctypes.c_uint64()
        self._call(self._library.ft_read, memory.data_ptr(), memory.numel(), ctypes.addressof(total))
        return total.value

    # ── crossing over ───────────────────────────────────────────────────────────────────────────────────────────

    def _call(self, function: ctypes._NamedFuncPointer, *arguments: int | float | BatchView | None) -> None:
        code = function(self._context, *arguments)
        if code:
            message = self._library.ft_error(self._context).decode()
            raise ValueError(message) if code == 1 else MemoryError(message)

    def _view(self, batch: Batch) -> BatchView:
        """The batch as the library sees it; a step uses the same batch in every layer, so the last one is kept."""
        if self._viewed is not None and self._viewed[0] is batch:
            return self._viewed[1]
        _check("segments", batch.segments, (_ANY, 4), torch.int32)
        sequences = batch.segments.shape[0]
        _check("page_table", batch.page_table, (sequences, batch.page_table.shape[-1]), torch.int32)
        _check("snapshots", batch.snapshots, (_ANY, 3), torch.int32)
        view = BatchView(
            batch.positions.shape[0],
            sequences,
            batch.page_table.shape[1],
            batch.snapshots.shape[0],
            batch.segments.data_ptr(),
            batch.page_table.data_ptr(),
            batch.snapshots.data_ptr(),
        )
        self._viewed = (batch, view)
        return view

    def room(self, size: int) -> Tensor:
        """uint8 [size], uninitialised, on large pages where it fills one."""
        if size < _LARGE_PAGE:
            return torch.empty(size, dtype=torch.uint8)
        room = torch.empty(size + _LARGE_PAGE, dtype=torch.uint8)
        start = -room.data_ptr() % _LARGE_PAGE
        room = room[start : start + size]
        self._library.ft_large_pages(room.data_ptr(), size)
        return room


def _panels(columns: int, width: int) -> int:
    """Weights per row of depth: columns rounded up to whole panels of ``width``, each stored as a full panel."""
    return -(-columns // width) * _PANEL


def _is_bfloat(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16


def _check(name: str, tensor: Tensor, shape: tuple[int | None, ...], *dtypes: torch.dtype) -> None:
    """None stands for any size but zero, ``_ANY`` for any."""
    actual = tensor.shape
    fits = len(actual) == len(shape) and all(
        want == _ANY or (have > 0 if want is None else have == want) for have, want in zip(actual, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size in (None, _ANY) else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], not {list(actual)}")
    if tensor.dtype not in (dtypes or (torch.float32,)):
        names = " or ".join(str(dtype) for dtype in dtypes or (torch.float32,))
        raise ValueError(f"{name} must be {names}, not {tensor.dtype}")
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be contiguous and in host memory")


def _check_pages(k_pages: Tensor, v_pages: Tensor) -> tuple[int, int, int]:
    _check("k_pages", k_pages, (None, PAGE, None, None), *_WEIGHTS)
    _check("v_pages", v_pages, tuple(k_pages.shape), k_pages.dtype)
    pages, _, kv_heads, head_dim = k_pages.shape
    return pages, kv_heads, head_dim
