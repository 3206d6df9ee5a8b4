"""The base of every way: a linear layer's tensors, memory for a chunk of its logits, and its gradients so far."""

from __future__ import annotations

from npu_tiling import Device
from npu_tiling.launching import recording
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import chunks, matmul
from ..calls import EachInputs
from ..chunks import part
from ..gradients import GradientSums, operands
from ..options import Options
from ..tiling import Tiling


class Head:
    """A linear layer whose logits are in memory a chunk at a time. One buffer holds every chunk, and its gradient.

    Args:
        inputs: a record of calls.py, the weight in x's dtype.
        options: of the loss.
        tiling: how it is computed.
        device: whose kernels run; None for plain PyTorch.
    """

    def __init__(self, inputs: EachInputs, options: Options, tiling: Tiling, device: Device | None) -> None:
        if recording.active is not None:
            recording.active.decided(tiling)
        self.x, self.weight, self.bias = inputs.x, inputs.weight, inputs.bias
        self._operands = operands(self.weight, inputs.frozen)
        self.options, self.tiling, self.device = options, tiling, device
        self.gradients = GradientSums(self.x, self._operands, tiling, inputs.weight_grad)
        self.buffer = allocate(self.x, (tiling.buffer,), tiling.logits_dtype)

    def products(self, tokens: slice, columns: slice, *, bias: bool = False) -> Tensor:
        """A chunk of raw logits, with the bias or without."""
        x, count = part(self.x, tokens), columns.stop - columns.start
        logits = self.buffer.as_strided((x.shape[0], count), (chunks.pitch(count), 1))
        for where, weight in self._operands:
            multiply = matmul.add_product if where.start else matmul.product
            multiply(part(x, where, 1), part(weight, columns).t(), logits)
        if bias and self.bias is not None:
            logits.add_(part(self.bias, columns))
        return logits

    def gradient_memory(self, logits: Tensor) -> Tensor:
        """Memory in x's dtype for a chunk's gradient: over its logits, in the upper half of each row if x's is narrower."""
        if self.x.dtype == logits.dtype:
            return logits
        pitch, narrow = logits.stride(0), self.buffer.view(self.x.dtype)
        return narrow.as_strided(logits.shape, (2 * pitch, 1), narrow.storage_offset() + pitch)

    def release(self) -> None:
        """Gives memory back before the sums are cast."""
        self.buffer = self.buffer.new_empty(0)
