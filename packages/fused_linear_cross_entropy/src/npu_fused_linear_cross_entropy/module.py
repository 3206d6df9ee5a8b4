"""The loss as a module."""

from __future__ import annotations

from typing import Any

from npu_tiling.collectives import group_named
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .api import fused_linear_cross_entropy
from .call import LinearCrossEntropyOutput, Option
from .checks import check_values, named_options


class FusedLinearCrossEntropyLoss(nn.Module):
    """`fused_linear_cross_entropy` with options that stay the same.

    Args:
        class_weight: [V]; a buffer, moved and saved with the module.
        options: the options of `fused_linear_cross_entropy`, by name.
    """

    class_weight: Tensor | None

    def __init__(self, class_weight: Tensor | None = None, **options: Option) -> None:
        super().__init__()
        check_values(named_options(options)[1])
        self.register_buffer("class_weight", class_weight)
        self.options: dict[str, Any] = options

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        counted_tokens: int | Tensor | None = None,
        token_weight: Tensor | None = None,
        weight_grad: Tensor | None = None,
        adapter: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | LinearCrossEntropyOutput:
        """The loss of x [..., H], the linear layer's weight [V, H] and bias [V], and target [...]; the others as there.

        Returns:
            A number, [...] for "none", or a `LinearCrossEntropyOutput`: as `fused_linear_cross_entropy` with these options.

        Raises:
            TypeError, ValueError, IndexError: as `fused_linear_cross_entropy`.
        """
        tensors = {"class_weight": self.class_weight, "token_weight": token_weight, "counted_tokens": counted_tokens}
        given: dict[str, Any] = {**self.options, **tensors, "weight_grad": weight_grad, "adapter": adapter}
        return fused_linear_cross_entropy(x, weight, target, bias, **given)

    def __getstate__(self) -> dict[str, Any]:
        """With the name of a process group, which can be copied and pickled, in place of the group."""
        group = self.options.get("process_group")
        if not isinstance(group, ProcessGroup):
            return self.__dict__
        return {**self.__dict__, "options": {**self.options, "process_group": group.group_name}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(name := self.options.get("process_group"), str):
            self.options["process_group"] = group_named(name)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())
