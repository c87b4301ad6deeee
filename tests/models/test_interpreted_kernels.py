"""Our Triton kernels without a GPU: Triton's interpreter runs them, with the products of float32.

Triton reads TRITON_INTERPRET when it is imported, so this happens in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")
PROGRAM = """
import torch
from potluck.core.rng import Rng
from potluck.models.fused import kernels, pooled_convolution
from test_pooled_convolution import EXACT, SHAPES, as_chosen, distance, layer_and_input, plain

pooled_convolution._ours = lambda: kernels
for samples, *sizes in SHAPES:
    shape = min(samples, 4), *sizes  # the interpreter is slow
    layer, x = layer_and_input(shape, "cpu")
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    y, choice = pooled_convolution.pooled_answers(kernels, x, weight, bias, "tf32x3")
    with Rng(2).as_default():
        direction = torch.randn(y.shape)
    back = pooled_convolution._Backwards(x, weight, direction, choice, "tf32x3")
    found = y, *back.of_layer(), back.of_input()

    exact, x64 = layer.double(), x.double().requires_grad_()
    y64 = as_chosen(exact, x64, choice)
    of64 = torch.autograd.grad(y64, [exact.weight, exact.bias, x64], direction.double())
    assert distance(y64, plain(exact, x64)) < EXACT["float32"], shape
    for one, expected in zip(found, (y64, *of64), strict=True):
        assert distance(one, expected) < EXACT["float32"], shape
"""


@pytest.mark.slow
def test_our_kernels_agree_with_float64_also_in_the_interpreter() -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
