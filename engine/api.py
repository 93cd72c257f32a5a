"""The contract between the API process and the engine's worker process: plain data, free of torch.

Positions and counts are in tokens. Token ids are tuples of ints here and u32 little-endian on the socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

PAGE = 64
"""Tokens in a page, at absolute positions; the unit of sliceable state and of page keys."""

FinishReason = Literal["stop", "length", "abort", "error"]
WorkerCause = Literal["none", "no_anchor", "evicted", "worker_restart", "corrupt", "unreported"]
ErrorKind = Literal["context_length", "invalid", "overloaded", "worker_lost", "internal"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Randomness is keyed by (seed, position), so it does not depend on the batch.

    ``top_k`` 0 and ``top_p`` 1.0 and ``min_p`` 0.0 mean off; ``temperature`` 0.0 is greedy. ``logprobs`` is how many
    alternatives to report per token (None: no logprobs at all). ``stop_tokens`` end the output when sampled.
    ``forced``: the sampler takes these tokens instead of drawing (scripted sampling); everything else is computed as
    usual, and after the last of them generation ends. ``constraint``: a grammar that what is drawn must follow
    (``engine.grammar``; Lark as llguidance reads it, control tokens as ``<[id]>``); the output ends with a stop token
    where the grammar may end, and with nothing else. A constraint that cannot be compiled fails as ``invalid`` before
    the request is admitted.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_tokens: tuple[int, ...] = ()
    forced: tuple[int, ...] | None = None
    constraint: str | None = None


class Anchor(NamedTuple):
    """A position of the prompt at which a checkpoint is wanted. The worker moves it down to its architecture's grid.
    Higher ``priority`` is kept longer; ``pinned`` anchors are never thinned while their session lives."""

    position: int
    kind: str
    priority: float
    pinned: bool = False


@dataclass(frozen=True)
class Watch:
    """A token sequence which, when sampled, asks for a checkpoint at the state before its first token is fed."""

    tokens: tuple[int, ...]
    kind: str
    priority: float


@dataclass(frozen=True)
class Request:
    """One generation. ``tokens`` is the whole prompt: a tuple, or on the client's side a view of u32, which is sent as
    it is. ``side`` requests read the cache and never evict from it. ``namespace`` separates caches of different API
    keys. ``session`` groups checkpoints for retention. A ``background`` request prefills in advance (``max_tokens`` 0):
    it runs only while no other request runs or waits, gives way to any other within a step, and evicts nothing but what
    side requests left."""

    id: str
    tokens: Sequence[int]
    sampling: Sampling
    anchors: tuple[Anchor, ...] = ()
    watches: tuple[Watch, ...] = ()
    session: str = ""
    namespace: str = ""
    side: bool = False
    background: bool = False


@dataclass(frozen=True)
class Reuse:
    """Where a prompt's tokens came from. device + host + disk + remote + replayed + new == prompt tokens.

    ``resumed`` tokens (device + host + disk: where their pages were; remote: in a tier that a remote engine does not
    name) were restored; ``replayed`` were computed before and had to be computed again; ``new`` lie past the
    divergence. ``cause`` is why replayed > 0, as far as the worker can know: ``none`` (nothing replayed), ``no_anchor``
    (no checkpoint near enough), ``evicted`` (there was one), ``worker_restart`` (a worker before this one computed
    them: there are its pages, and no checkpoint near enough), ``corrupt`` (something was read for this request, and
    wrong), ``unreported`` (a remote engine does not tell what it reused: all counts as new).
    """

    device: int
    host: int
    disk: int
    replayed: int
    new: int
    cause: WorkerCause = "none"
    remote: int = 0

    @property
    def resumed(self) -> int:
        return self.device + self.host + self.disk + self.remote

    @property
    def divergence(self) -> int:
        return self.resumed + self.replayed


# ── worker -> client ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Admitted:
    """The request has pages and a slot; ``reuse`` is the plan. Sent before prefill."""

    id: str
    reuse: Reuse


@dataclass(frozen=True)
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Tokens:
    """Newly sampled tokens, in order. ``logprobs`` has one entry per token when asked for, else is empty."""

    id: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Done:
    """The end of a request. ``reuse`` is what happened, ``checkpoints`` the positions kept, times are in seconds."""

    id: str
    reason: FinishReason
    reuse: Reuse
    checkpoints: tuple[int, ...] = ()
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


@dataclass(frozen=True)
class Failed:
    """The request ended with an error; ``limit`` carries the number that was exceeded, if there is one."""

    id: str
    kind: ErrorKind
    message: str
    limit: int = 0


@dataclass(frozen=True)
class ModelInfo:
    """Sent once by a worker when it is ready."""

    path: str
    architecture: str
    fingerprint: str
    vocab_size: int
    context_length: int
    recurrent: bool
    max_sequences: int
    instruction_set: str
    dtype: str
    incarnation: str


@dataclass(frozen=True)
class Stats:
    """Counters and gauges of a worker, by name; shown by ``/v1/stats`` and ``ft ctl``."""

    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AdminReply:
    """The answer to ``Admin``; ``message`` says what went wrong, or what was done."""

    id: str
    ok: bool
    values: dict[str, str | float] = field(default_factory=dict)
    message: str = ""


Reply = Admitted | Tokens | Done | Failed | ModelInfo | Stats | AdminReply

# ── client -> worker ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Abort:
    """Stop a request within one step; what it computed is kept. Answered by ``Done(reason="abort")``."""

    id: str


@dataclass(frozen=True)
class GetStats:
    pass


AdminAction = Literal[
    "store_stat", "store_verify", "store_gc", "store_forget", "store_pin", "store_unpin", "cache_stat", "cache_set"
]


@dataclass(frozen=True)
class Admin:
    """Something for a person who looks after the store, or the memory. ``store_forget`` (and the two about pins,
    always) take ``session``; without it all is forgotten. ``cache_set`` takes numbers: ``experts`` on the device,
    ``kv`` tokens that pages hold, ``states`` that are checkpoints; without any, the engine decides by itself again."""

    id: str
    action: AdminAction
    arguments: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Shutdown:
    pass


@dataclass(frozen=True)
class Ping:
    """Answered at once with ``Pong`` by the worker's thread for the socket, whatever the engine is doing."""


@dataclass(frozen=True)
class Pong:
    """``step_seconds``: how long the engine has been in its current step; 0.0 between steps."""

    step_seconds: float


Command = Request | Abort | GetStats | Admin | Shutdown


@dataclass(frozen=True)
class StoreSettings:
    """Where state outlives the worker. ``host_bytes``: recent payloads kept in RAM. ``daily_write_bytes``: written per
    day on average. ``key_file``: what is in it decides the key that everything is encrypted with; "" for no
    encryption."""

    directory: str
    quota_bytes: int = 64 << 30
    host_bytes: int = 4 << 30
    daily_write_bytes: int = 300_000_000_000
    retention_days: float = 7.0
    key_file: str = ""


Attention = tuple[Literal["auto", "triton", "torch"], Literal["auto", "triton"]]
"""Backends of attention in prefill and in decode; see ``engine.device.attention``."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything a worker needs, fixed at its start.

    ``dtype``: dtype the weights and attention pages are held in (``auto``: as in the checkpoint). ``kv_bytes``: room
    for attention pages. ``checkpoint_bytes``: room for recurrent-state checkpoints. ``context_length`` 0: the model's.
    ``kernels``: ``native`` (C++) or ``reference`` (torch twins). ``instruction_set``: ``auto`` or one of the native
    library's. ``threads`` 0: one per physical core. ``chunk_tokens`` of a prompt are computed in one step (0: as many
    as suit the device). ``store`` None: state ends with the worker.

    ``device``: what the model runs on; ``auto`` takes a GPU if there is one that can be used. The fields after it are
    for GPUs alone. ``experts``: where routed experts are computed. ``device``: on the GPU, which holds all of them; the
    others keep those in host memory and some on the GPU: ``offload`` fetches what is missing, ``cpu`` has the CPU
    compute all, ``hybrid`` does both at once, by a ``split`` that it finds, or by a given share of what is missing that
    is fetched; ``auto`` is ``device`` where all fit, else ``hybrid``. ``expert_format``: numbers that experts are held
    in; ``auto``: as in the checkpoint. ``gpu_bytes``: memory of the GPU that may be used (0: what is free, less some).
    ``attention``: what computes it in prefill and in decode.
    """

    model: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kernels: Literal["native", "reference"] = "native"
    instruction_set: str = "auto"
    threads: int = 0
    context_length: int = 0
    kv_bytes: int = 2 << 30
    checkpoint_bytes: int = 1 << 30
    max_sequences: int = 8
    chunk_tokens: int = 0
    queue: int = 64
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    experts: Literal["auto", "device", "offload", "hybrid", "cpu"] = "auto"
    expert_format: Literal["auto", "bf16", "int8", "mxfp4"] = "auto"
    gpu_bytes: int = 0
    split: float | None = None
    attention: Attention = ("auto", "auto")
    store: StoreSettings | None = None
