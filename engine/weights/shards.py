"""Reading safetensors files: headers checked against the file's size, tensors read one at a time without mmap."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.weights.errors import BrokenShard, MissingShard, MissingTensor, WrongTensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_HEADER_LIMIT = 100 << 20


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: bytes ``[start, end)`` of ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


AGAIN = "download or convert this file again"


def read_header(path: Path) -> tuple[bytes, dict[str, Entry]]:
    """The raw header of a safetensors file and its entries; raises BrokenShard."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise BrokenShard(f"{path} is truncated ({size} bytes, not even a header); {AGAIN}")
        (length,) = struct.unpack("<Q", head)
        if length > _HEADER_LIMIT or 8 + length > size:
            raise BrokenShard(
                f"{path} is truncated or no safetensors file (header {length}, file {size} bytes); {AGAIN}"
            )
        raw = file.read(length)
    try:
        header: dict[str, Any] = json.loads(raw)
        entries = {
            name: Entry(
                path,
                str(value["dtype"]),
                tuple(int(n) for n in value["shape"]),
                8 + length + int(value["data_offsets"][0]),
                8 + length + int(value["data_offsets"][1]),
            )
            for name, value in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise BrokenShard(f"{path} has an unreadable header ({error}); {AGAIN}") from error
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda one: (one[1].start, one[1].end)):
        if not end <= entry.start <= entry.end:
            raise BrokenShard(f"{path} has an unreadable header (tensor {name} overlaps another); {AGAIN}")
        end = entry.end
    if end > size:
        raise BrokenShard(f"{path} is truncated: {size} bytes of {end}; {AGAIN}")
    return raw, entries


class Shards:
    """All tensors of a checkpoint directory by their names in the files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = _shard_files(directory)
        self.headers: dict[Path, bytes] = {}
        self.entries: dict[str, Entry] = {}
        for path in self.files:
            raw, entries = read_header(path)
            self.headers[path] = raw
            self.entries.update(entries)

    def find(self, name: str, shape: tuple[int, ...]) -> tuple[Entry, torch.dtype]:
        """Where a tensor is and its dtype there; raises MissingTensor, WrongTensor or BrokenShard."""
        entry = self.entries.get(name)
        if entry is None:
            raise MissingTensor(
                f"tensor {name} is in none of the {len(self.files)} weight files of {self.directory}; "
                "the checkpoint is incomplete or config.json belongs to another model"
            )
        if entry.shape != shape:
            raise WrongTensor(
                f"{entry.file}: tensor {name} has shape {list(entry.shape)}, config.json implies {list(shape)}; "
                "check that config.json and the weights are of the same model"
            )
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise WrongTensor(
                f"{entry.file}: tensor {name} is stored as {entry.dtype}; supported are {', '.join(DTYPES)}. "
                "Use the unquantized release of this model"
            )
        size = dtype.itemsize * math.prod(shape)
        if size != entry.end - entry.start:
            raise BrokenShard(f"{entry.file}: tensor {name} has {entry.end - entry.start} bytes of {size}; {AGAIN}")
        return entry, dtype

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """One tensor in the dtype it is stored in; raises as ``find``, and BrokenShard where a number is none."""
        entry, dtype = self.find(name, shape)
        tensor = torch.empty(shape, dtype=dtype)
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.start)
            done = 0
            while done < len(view):
                count = file.readinto(view[done:])
                if not count:
                    raise BrokenShard(f"{entry.file} ended inside tensor {name}; {AGAIN}")
                done += count
        least, most = torch.aminmax(tensor)  # NaN, if any is
        if not (least.isfinite() and most.isfinite()):
            raise BrokenShard(f"{entry.file}: tensor {name} holds numbers that are infinite or none; {AGAIN}")
        return tensor


def _shard_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [directory / str(name) for name in names]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise BrokenShard(f"{index} is unreadable ({error}); download it again") from error
        missing = [path.name for path in files if not path.is_file()]
        if missing:
            raise MissingShard(
                f"{len(missing)} of {len(files)} weight files are missing from {directory}: "
                f"{', '.join(missing[:4])}; finish the download"
            )
        return files
    single = directory / SINGLE
    if single.is_file():
        return [single]
    raise MissingShard(f"{directory} holds neither {SINGLE} nor {INDEX}; only safetensors checkpoints are supported")
