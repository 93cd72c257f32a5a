"""The flags of ``ft serve``, and the settings they make."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from launchers import keys
from launchers.agents.common import state_directory
from launchers.running import ServerProblem, read_keys
from launchers.settings import ENGINE_KEY, ServeSettings

GPU = ("experts", "gpu_bytes", "split", "attention")
"""Settings that the CPU has not."""
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size(text: str) -> int:
    """Bytes, with an optional binary unit: ``1073741824``, ``512m``, ``1.5g``, ``2GiB``."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = UNITS.get(number[-1:], 1)
    try:
        amount = float(number[:-1] if unit > 1 else number) * unit
    except ValueError:
        amount = math.nan
    if not 1 <= amount < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write bytes, or a number with k, m, g or t")
    return int(amount)


def share(text: str) -> float | None:
    """From 0 to 1; None for ``auto``."""
    if text == "auto":
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share: write auto, or a number from 0 to 1")
    return number


def phases(text: str) -> tuple[str, ...]:
    """A name for prefill and one for decode; one alone is for both."""
    names = tuple(text.split(","))
    return names * 2 if len(names) == 1 else names


def add_options(parser: argparse.ArgumentParser) -> None:
    """Each flag fills the field of ServeSettings of the same name; one not given keeps that field's default."""
    model = parser.add_argument_group("what is served")
    flag(model, "--model", Path, "DIR", "a Hugging Face checkpoint folder", "the embedded model, built on first use")
    flag(model, "--model-name", str, "NAME", "what clients call it")
    flag(model, "--family", str, "NAME", "wire format of its conversations", "found from its chat template")
    flag(model, "--context-length", int, "TOKENS", "longest conversation", "the model's")
    flag(model, "--max-output-tokens", int, "TOKENS", "longest answer", "what the context leaves")
    flag(
        model, "--engine", str, "URL",
        "an SGLang or vLLM server that computes, instead of this machine; of --model only config, tokenizer and chat "
        "template are read", "none",
    )  # fmt: skip
    flag(model, "--engine-model", str, "NAME", "which of its models", "its first")
    flag(model, "--engine-key-file", Path, "FILE", f"the API key it wants; see also {ENGINE_KEY}", "none")
    flag(
        model, "--engine-silence", float, "SECONDS",
        "give up an answer that has begun and says nothing more for so long",
    )  # fmt: skip
    flag(
        model, "--script", Path, "FILE", "take the next tokens from these rules, and compute the rest for real", "none"
    )

    network = parser.add_argument_group("where")
    flag(network, "--host", str, "ADDRESS", "address to listen on; one beyond this machine needs an API key")
    flag(network, "--port", int, "PORT", "port to listen on; 0 takes a free one")
    network.add_argument(
        "--allowed-host",
        dest="allowed_hosts",
        action="append",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help="a name clients may also use, as behind a proxy (may be repeated; default: this machine's own)",
    )
    flag(network, "--tls-cert", Path, "FILE", "certificate chain (PEM): speak HTTPS", "none")
    flag(network, "--tls-key", Path, "FILE", "its private key", "none")
    flag(network, "--max-body", size, "SIZE", "longest request body")
    flag(network, "--ready-file", Path, "FILE", "written once requests are answered, with url and process ids", "none")
    flag(network, "--cache", Path, "DIR", "where the embedded model is kept", "ft in the user's cache directory")
    flag(network, "--runtime-dir", Path, "DIR", "for the socket and the lock", "ft in the user's runtime directory")

    access = parser.add_argument_group("who may use it")
    flag(
        access, "--api-key-file", Path, "FILE",
        "API keys clients must send, one a line, each with a name before it or not; read again when it changes; see "
        f"also {keys.VARIABLE}", "none",
    )  # fmt: skip
    flag(access, "--key-running", int, "N", "requests of one key answered at once; 0: any number")
    flag(access, "--key-waiting", int, "N", "more requests of one key that may wait for those")
    access.add_argument(
        "--share-cache",
        action="store_true",
        default=argparse.SUPPRESS,
        help="all keys use one cache and see each other's sessions (default: each its own)",
    )

    memory = parser.add_argument_group("memory (sizes in bytes, or with k, m, g, t)")
    flag(memory, "--kv-bytes", size, "SIZE", "attention pages of all conversations together")
    flag(memory, "--checkpoint-bytes", size, "SIZE", "checkpoints of recurrent state")
    flag(memory, "--max-sequences", int, "N", "requests computed at once")
    flag(memory, "--max-sessions", int, "N", "sessions whose exact tokens are remembered")
    flag(memory, "--queue", int, "N", "requests that may wait")

    store = parser.add_argument_group("the store: what was computed survives restarts, readable by you alone")
    add_store(store)
    flag(store, "--store-key-file", Path, "FILE", "encrypt the store with what is in this file", "not encrypted")
    flag(store, "--store-quota", size, "SIZE", "disk space of the store")
    flag(store, "--store-daily-writes", size, "SIZE", "written per day on average, to spare the disk", "300 GB")
    flag(store, "--host-cache", size, "SIZE", "memory for what was computed last, before the disk is asked")
    store.add_argument(
        "--no-idle-prefill",
        dest="idle_prefill",
        action="store_false",
        default=argparse.SUPPRESS,
        help="in quiet moments, do not compute ahead what the next message is expected to continue",
    )

    compute = parser.add_argument_group("how it is computed")
    flag(
        compute, "--dtype", str, None, "numbers weights and pages are held in", choices=("auto", "float32", "bfloat16")
    )
    flag(compute, "--kernels", str, None, "C++, or the slow torch twins", choices=("native", "reference"))
    flag(compute, "--instruction-set", str, "NAME", "of the C++ kernels: auto, or one this processor has")
    flag(compute, "--threads", int, "N", "threads of the C++ kernels", "one per physical core")
    flag(
        compute, "--chunk-tokens", int, "TOKENS", "tokens of a prompt computed in one step", "512; 4096 on a GPU"
    )  # fmt: skip

    add_gpu(parser)


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """The flags that say what a model runs on."""
    gpu = parser.add_argument_group("serving from a GPU, which need not hold the experts")
    flag(
        gpu, "--device", str, None, "what the model runs on; auto: a GPU if one can be used",
        choices=("cpu", "cuda", "auto"),
    )  # fmt: skip
    flag(
        gpu, "--experts", str, None,
        "where routed experts are computed: device (the GPU holds all of them), offload (it fetches those it misses), "
        "cpu, hybrid (both at once, at first as `ft bench bw` measured); auto: device if all fit, else hybrid",
        choices=("auto", "device", "offload", "hybrid", "cpu"),
    )  # fmt: skip
    flag(
        gpu, "--expert-format", str, None,
        "numbers that routed experts are held in, on a CPU, too; auto: as in the checkpoint",
        choices=("auto", "bf16", "int8", "mxfp4"),
    )  # fmt: skip
    flag(gpu, "--gpu-bytes", size, "SIZE", "its memory that may be used", "what is free, less 1g")
    flag(gpu, "--split", share, "SHARE", "of what hybrid misses, fetched: 0 to 1, or auto: whatever is fastest", "auto")
    flag(
        gpu, "--attention", phases, "PREFILL,DECODE",
        "what computes attention: triton (kernels of this project), in prefill also torch (cuDNN, for long runs of "
        "rows, which it takes seconds to get ready for); auto: triton", "auto,auto",
    )  # fmt: skip


def gpu_flags(options: argparse.Namespace) -> list[str]:
    """Those flags that were given, for a server of our own. Raises ServerProblem for what cannot be meant."""
    settings(options)
    given = {name: value for name, value in vars(options).items() if name in ("device", "expert_format", *GPU)}
    return [part for name, value in given.items() for part in (flag_of(name), _written(value))]


def _written(value: Any) -> str:
    return ",".join(value) if isinstance(value, tuple) else "auto" if value is None else str(value)


def default_store() -> Path:
    return state_directory(os.environ) / "store"


def add_store(group: argparse._ArgumentGroup) -> None:
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--store", type=Path, metavar="DIR", default=default_store(), help="its folder (default: %(default)s)"
    )
    choice.add_argument("--no-store", dest="store", action="store_const", const=None, help="keep nothing on disk")


def flag(
    group: argparse._ArgumentGroup,
    name: str,
    kind: Any,
    metavar: str | None,
    text: str,
    default: str | None = None,
    **more: Any,
) -> None:
    """``default`` describes it where the field's value would not."""
    field = ServeSettings.model_fields[name.removeprefix("--").replace("-", "_")]
    shown = default or (in_units(field.default) if kind is size else field.default)
    group.add_argument(
        name, type=kind, metavar=metavar, default=argparse.SUPPRESS, help=f"{text} (default: {shown})", **more
    )


def in_units(size_bytes: int) -> str:
    unit = max((unit for unit in UNITS.items() if unit[1] <= min(size_bytes, 1 << 30)), key=lambda unit: unit[1])
    return f"{size_bytes / unit[1]:g}{unit[0]}"


def settings(options: argparse.Namespace) -> ServeSettings:
    """Raises ServerProblem with each flag that has a wrong value, or whose file cannot be read."""
    given = {name: value for name, value in vars(options).items() if name in ServeSettings.model_fields}
    try:
        made = ServeSettings(**given, api_keys=read_keys(given.get("api_key_file")))
    except ValidationError as error:
        problems = (f"{flag_of(str(one['loc'][0]))}: {one['msg']}" for one in error.errors())
        raise ServerProblem(f"{'; '.join(problems)} (see ft serve --help)") from error
    if made.engine is None:  # which has words of its own for them
        _refuse_combinations(made)
    return made


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")


def _refuse_combinations(made: ServeSettings) -> None:
    """Of settings that concern a GPU, those that cannot be meant: known without a worker. Raises ServerProblem."""
    idle = [name for name in GPU if getattr(made, name) != ServeSettings.model_fields[name].default]
    if made.device == "cpu" and idle:
        flags = ", ".join(map(flag_of, idle))
        raise ServerProblem(f"{flags}: for serving from a GPU alone; leave it out, or --device cpu")
    if made.split is not None and made.experts != "hybrid":
        raise ServerProblem(f"--split {made.split:g}: for --experts hybrid alone; add that, or leave it out")
    if made.device == "cuda" and made.kernels != "native":
        raise ServerProblem(f"--kernels {made.kernels}: for the CPU alone; leave it out, or --device cuda")
