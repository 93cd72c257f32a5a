"""What a GPU has room for."""

from __future__ import annotations

from functools import cache

import torch


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have; 0 for what is no GPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
