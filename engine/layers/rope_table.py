"""The rotary table, shared by both implementations of the operations."""

import torch
from torch import Tensor


def rope_table(context: int, rotary: int, theta: float) -> Tensor:
    """cos and sin of position * theta^(-2i/rotary), computed in double: float32 [context, rotary // 2, 2]."""
    exponents = torch.arange(0, rotary, 2, dtype=torch.float64) / rotary
    angles = torch.arange(context, dtype=torch.float64)[:, None] * theta**-exponents
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()
