"""What stands before products of many rows: results in 16 bits against those in 32."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels import products
from engine.kernels.linear import pack
from engine.layers.ops import Norm
from tests.gpu.test_device_ops import TWIN, Draws


def test_inputs_of_float16_are_read_and_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """And divided by what the weight is multiplied by."""
    monkeypatch.setattr(products, "_half", lambda weight, device: weight.whole.dtype)
    draw, weight = Draws(3), pack(torch.ones(8, 96, dtype=torch.bfloat16))
    wide, norm = draw(19, 300).half(), Norm(draw(32), 1e-6, 1.0)
    x, gate, share = wide[:, 100:196].view(19, 3, 32), wide[:, 200:296].view(19, 3, 32), wide[:, 4:5].float()
    got = products.prepare(x, weight, norm=norm, gate=gate, share=share)
    normed = TWIN.rms_norm(x.float(), norm.weight, 1e-6, 1.0) * gate.float() * torch.sigmoid(gate.float())
    want = (normed.reshape(19, -1) * torch.sigmoid(share) / 8).half()
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, want, rtol=2e-3, atol=1e-6)


def test_kernels_that_read_float16_compile(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    kept |= {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", str(Path(__file__).with_name("float16_dry.py")), "conv", "norm"]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
