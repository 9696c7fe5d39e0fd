"""Linear layers for a handful of rows on a CPU: weights packed once, in the blocks that oneDNN's kernels read.

Verifying is multiplying few rows (a root and its nodes) with every weight of the model. What torch does for few rows is
made for one row or for hundreds: bfloat16 weights are re-packed inside every call, and float32 goes to MKL,
which takes 2.4 times as long for 8 rows as for one and longer still for 2 or 3. With weights packed beforehand (as inductor
does when it freezes a model) the same products take, in thousandths of torch's time for one row (a matrix of 576 x 1536 out
of the last-level cache, one core of an AMD EPYC without AMX):

    rows             1      4      8     16     32
    bfloat16 torch   1.00   1.09   1.24   1.53   2.11
             packed  0.60   0.52   0.65   0.93   1.51
    float32  torch   1.00   1.24   1.49   1.98   2.80
             packed  0.89   0.64   0.82   1.12   1.96

so a tree of 8 nodes costs less than a plain step did, and 16 nodes about as much. The sums are the same up to rounding, as
they are between forwards of different shape.

Cost: a second copy of the weights, made at the model's first use (half a second for 135M parameters) and kept as long as
the model. Where it would take more than half of the memory that is left, and on other processors and systems than
x86-64 Linux, which is what this was measured on, the model runs as it is. So do layers that are not plain `nn.Linear` in float32 or
bfloat16 on the CPU.
"""

from __future__ import annotations

import platform
import threading
import weakref
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["packed_linears"]

_ROWS = 32  # what blocks are chosen for; of 1, 16 and 32 the best for every number of rows up to 64
_SHARE = 0.5
_SAMPLES = 16

_packed: weakref.WeakKeyDictionary[nn.Linear, _Packed] = weakref.WeakKeyDictionary()
_users: Counter[int] = Counter()  # by id of a layer that is in use, and so alive
_lock = threading.Lock()


class _Packed(NamedTuple):
    """A packed weight, and what tells whether the layer's own is still the one it was made from."""

    weight: torch.Tensor
    state: tuple


@contextmanager
def packed_linears(model: nn.Module):
    """Within the block, the model's linear layers multiply with packed weights where that is possible.

    Weights that were changed since they were packed are packed again. Blocks may nest and overlap in threads.
    """
    layers = [module for module in model.modules() if _can_be_packed(module)]
    with _lock:
        if not _fits(layers):
            layers = []
        for layer in layers:
            if not _users[id(layer)]:
                layer.forward = _forward(layer)
            _users[id(layer)] += 1
    try:
        yield
    finally:
        with _lock:
            for layer in layers:
                _users[id(layer)] -= 1
                if not _users[id(layer)]:
                    del layer.forward, _users[id(layer)]


def _can_be_packed(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.float32, torch.bfloat16)
        and ("forward" not in module.__dict__ or _users[id(module)] > 0)  # somebody else's wrapper stays where it is
        and _supported(module.weight.dtype)
    )


def _supported(dtype: torch.dtype) -> bool:
    if platform.system() != "Linux" or platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _fits(layers: list[nn.Linear]) -> bool:
    """Whether what is not packed yet may be."""
    missing = sum(layer.weight.nbytes for layer in layers if layer not in _packed)
    return missing == 0 or missing <= _SHARE * _available_memory()


def _available_memory() -> int:
    """Bytes that this process may still take, by the kernel's estimate and its control group's limit."""
    (line,) = (line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    available = int(line.split()[1]) * 1024
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return available


def _forward(layer: nn.Linear):
    """`nn.Linear.forward` with the layer's packed weight."""
    state = _state(layer.weight)
    kept = _packed.get(layer)
    if kept is None or kept.state != state:
        # outside of inference mode, whose tensors keep no version
        with torch.inference_mode(False), torch.no_grad():
            kept = _Packed(torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS), state)
        _packed[layer] = kept
    multiply, weight, bias = torch.ops.mkldnn._linear_pointwise.default, kept.weight, layer.bias

    def forward(x: torch.Tensor) -> torch.Tensor:
        return multiply(x, weight, bias, "none", [], "")

    return forward


def _state(weight: torch.Tensor) -> tuple:
    """Changes with the weight: by in-place operations through its version, by those on `.data` through samples."""
    version = None if weight.is_inference() else weight._version
    values = weight.detach().reshape(-1)
    step = max(len(values) // _SAMPLES, 1)
    return weight.data_ptr(), version, tuple(values[::step][:_SAMPLES].tolist())
