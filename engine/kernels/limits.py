"""What a GPU has room for."""

from __future__ import annotations

from functools import cache

import torch
from triton.runtime import driver


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have; 0 for what is no GPU."""
    if device.type != "cuda":
        return 0
    return int(driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"])
