"""The base of every way: a linear layer's tensors, memory for a chunk of its logits, and its gradients so far."""

from __future__ import annotations

from npu_tiling import Device
from npu_tiling.launching import recording
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import chunks, matmul
from ..chunks import part
from ..gradients import GradientSums, operands
from ..options import Options
from ..tiling import Tiling


class Head:
    """A linear layer whose logits are in memory a chunk at a time. One buffer holds every chunk, and its gradient.

    Args:
        x: [N, H].
        weight: [V, H].
        options: of the loss.
        tiling: how it is computed.
        device: whose kernels run; None for plain PyTorch.
        frozen: [V, H'], a weight of the first columns of x, without a gradient; `weight` is then [V, H - H'], of the others.
        weight_grad: [V, H], to which the weight's gradient is added.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        options: Options,
        tiling: Tiling,
        device: Device | None,
        frozen: Tensor | None,
        weight_grad: Tensor | None,
    ) -> None:
        if recording.active is not None:
            recording.active.decided(tiling)
        self.x, self.weight = x, weight if weight.dtype == x.dtype else weight.to(x.dtype)
        self._operands = operands(self.weight, frozen)
        self.options, self.tiling, self.device = options, tiling, device
        self.gradients = GradientSums(x, self._operands, tiling, weight_grad)
        self.buffer = allocate(x, (tiling.buffer,), tiling.logits_dtype)

    def products(self, tokens: slice, columns: slice, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A chunk of raw logits with a bias, and memory for its gradient in x's dtype.

        That memory lies over the logits; if x's dtype is narrower, in the upper half of each row.
        """
        x, count = part(self.x, tokens), columns.stop - columns.start
        size = x.shape[0], count
        pitch = chunks.pitch(size[1])
        logits = self.buffer.as_strided(size, (pitch, 1))
        for where, weight in self._operands:
            multiply = matmul.add_product if where.start else matmul.product
            multiply(part(x, where, 1), part(weight, columns).t(), logits)
        if bias is not None:
            logits.add_(part(bias, columns))
        if x.dtype == logits.dtype:
            return logits, logits
        narrow = self.buffer.view(x.dtype)
        return logits, narrow.as_strided(size, (2 * pitch, 1), narrow.storage_offset() + pitch)

    def release(self) -> None:
        """Gives memory back before the sums are cast."""
        self.buffer = self.buffer.new_empty(0)
