"""Attention Residuals as modules: `attn_res` and `attn_res_bank` with their parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from npu_tiling import arguments
from torch import Tensor, nn

from .api import attn_res
from .bank import attn_res_bank
from .records import AttnResResult


class _Weights(nn.Module):
    """The query of one layer, and the weights of its norms.

    Attributes:
        hidden_size, rms_eps, scale: the arguments.
        query, rms_weight: [hidden_size]; a subclass may name more norms.
    """

    rms_weight: nn.Parameter
    _norms: tuple[str, ...] = ("rms_weight",)

    def __init__(
        self,
        hidden_size: int,
        rms_eps: float = 1e-6,
        scale: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = arguments.whole("hidden_size", hidden_size, least=1)
        self.rms_eps = arguments.number("rms_eps", rms_eps, least=0, finite=False)
        self.scale = arguments.number("scale", scale)
        self.query = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        for name in self._norms:
            self.register_parameter(name, nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zero queries and unit norms, as in the paper."""
        nn.init.zeros_(self.query)
        for name in self._norms:
            nn.init.ones_(getattr(self, name))

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, rms_eps={self.rms_eps}, scale={self.scale}"


class AttnRes(_Weights):
    """`attn_res` with a learned query and a learned norm of the keys.

    The parameters are `query` [hidden_size], zero at first, which makes h the mean of the blocks, and `rms_weight`
    [hidden_size], one at first.

    Args:
        hidden_size: D, the size of the last dimension.
        rms_eps, scale: as for `attn_res`.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: an argument is no number, or out of range.

    Source: "Attention Residuals", arXiv 2603.15031.
    """

    def forward(
        self,
        residuals: Tensor | Sequence[Tensor],
        output_rms_weight: Tensor | None = None,
        *,
        output_rms_eps: float | None = None,
        return_weights: bool = False,
    ) -> Tensor | AttnResResult:
        """`attn_res` of the blocks.

        Args:
            residuals: [N, ..., D], or a list of N tensors [..., D].
            output_rms_weight, output_rms_eps, return_weights: as for `attn_res`.

        Returns:
            h [..., D], or an AttnResResult, as `attn_res` returns it.

        Raises:
            TypeError, ValueError: as `attn_res` does.
        """
        weights = (self.query, self.rms_weight, output_rms_weight, self.rms_eps, self.scale)
        return attn_res(residuals, *weights, output_rms_eps=output_rms_eps, return_weights=return_weights)


class AttnResBank(_Weights):
    """`attn_res_bank` with a learned query, a learned norm of the keys and the RMSNorm that follows.

    Two of them make a decoder's layer one of Attention Residuals: README.md, "In a decoder".

    The parameters are `query` [hidden_size], zero at first, which makes h the mean of the blocks and the prefix, and
    `rms_weight` and `output_rms_weight` [hidden_size], one at first.

    Args:
        hidden_size: D, the size of the last dimension.
        rms_eps, scale: as for `attn_res`.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: an argument is no number, or out of range.

    Source: "Attention Residuals", arXiv 2603.15031.
    """

    output_rms_weight: nn.Parameter
    _norms = ("rms_weight", "output_rms_weight")

    def forward(
        self,
        bank: Tensor | Sequence[Tensor],
        n_blocks: int | Tensor | None,
        prefix: Tensor,
        *,
        layer_output: Tensor | None = None,
        append: bool = False,
        in_place: bool = False,
        output_dtype: torch.dtype | None = None,
        output_rms_eps: float | None = None,
        return_weights: bool = False,
    ) -> AttnResResult:
        """`attn_res_bank` of the blocks and the prefix.

        Args:
            bank: [..., capacity, D], or a list of blocks [..., D], which may be empty.
            n_blocks: how many blocks count, an int or a tensor; None: all.
            prefix: [..., D].
            layer_output, append, in_place, output_dtype, output_rms_eps, return_weights: as for `attn_res_bank`.

        Returns:
            An AttnResResult: `normalized` is what a layer takes, `prefix` the new prefix.

        Raises:
            TypeError, ValueError: as `attn_res_bank` does.
        """
        weights = (self.query, self.rms_weight, self.output_rms_weight, self.rms_eps, self.scale)
        return attn_res_bank(
            bank,
            n_blocks,
            prefix,
            *weights,
            layer_output=layer_output,
            append=append,
            in_place=in_place,
            output_dtype=output_dtype,
            output_rms_eps=output_rms_eps,
            return_weights=return_weights,
        )
