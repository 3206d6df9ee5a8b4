"""Attention Residuals as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from npu_tiling.pytorch import arguments
from torch import Tensor, nn

from .bank import attn_res_bank
from .checks import check_eps, check_like
from .functional import attn_res, attn_res_merge, attn_res_phase1
from .results import AttnResResult


class AttnRes(nn.Module):
    """`attn_res` with a learned query and a learned norm of the keys.

    The parameters are `query` [hidden_size], zero at first, which makes h the mean of the blocks, and `rms_weight`
    [hidden_size], one at first.

    Args:
        hidden_size: D, the size of the last dimension.
        rms_eps: added to the mean square.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: an argument is no number, or out of range.

    Source: "Attention Residuals", arXiv 2603.15031.
    """

    def __init__(
        self,
        hidden_size: int,
        rms_eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = arguments.whole("hidden_size", hidden_size, least=1)
        self.rms_eps = check_eps("rms_eps", rms_eps)
        self.query = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.rms_weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zero queries and unit norms, as in the paper."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.rms_weight)

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
            residuals: [N, ..., D], or a list or tuple of N tensors [..., D].
            output_rms_weight, output_rms_eps, return_weights: as for `attn_res`.

        Returns:
            h [..., D], or an AttnResResult, as `attn_res` returns it.

        Raises:
            TypeError, ValueError: as `attn_res` does.
        """
        weights = (self.query, self.rms_weight, output_rms_weight, self.rms_eps)
        return attn_res(residuals, *weights, output_rms_eps=output_rms_eps, return_weights=return_weights)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, rms_eps={self.rms_eps}"


class AttnResBank(nn.Module):
    """`attn_res_bank` with a learned query, a learned norm of the keys and the RMSNorm that follows.

    Two of them make a decoder's layer one of Attention Residuals, one before attention and one before the MLP:

        found = self.before_attention(blocks, prefix, layer_output=output)
        if self.begins_block:
            blocks, prefix, output = [*blocks, found.prefix], self.attention(found.normalized), None
        else:
            prefix, output = found.prefix, self.attention(found.normalized)
        found = self.before_mlp(blocks, prefix, layer_output=output)
        return blocks, found.prefix, self.mlp(found.normalized)

    The parameters are `query` [hidden_size], zero at first, which makes h the mean of the blocks and the prefix, and
    `rms_weight` and `output_rms_weight` [hidden_size], one at first.

    Args:
        hidden_size: D, the size of the last dimension.
        rms_eps: added to the mean squares.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: an argument is no number, or out of range.

    Source: "Attention Residuals", arXiv 2603.15031.
    """

    def __init__(
        self,
        hidden_size: int,
        rms_eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = arguments.whole("hidden_size", hidden_size, least=1)
        self.rms_eps = check_eps("rms_eps", rms_eps)
        self.query = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.rms_weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.output_rms_weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zero queries and unit norms, as in the paper."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.rms_weight)
        nn.init.ones_(self.output_rms_weight)

    def forward(
        self,
        bank: Tensor | Sequence[Tensor],
        prefix: Tensor,
        n_blocks: int | Tensor | None = None,
        *,
        layer_output: Tensor | None = None,
        append: bool = False,
        in_place: bool = False,
    ) -> AttnResResult:
        """`attn_res_bank` of the blocks and the prefix.

        Args:
            bank: [..., capacity, D], or a list or tuple of blocks [..., D], which may be empty.
            prefix: [..., D].
            n_blocks, layer_output, append, in_place: as for `attn_res_bank`.

        Returns:
            An AttnResResult: `normalized` is what a layer takes, `prefix` the new prefix.

        Raises:
            TypeError, ValueError: as `attn_res_bank` does.
        """
        weights = (self.query, self.rms_weight, self.output_rms_weight, self.rms_eps)
        given = (bank, n_blocks, prefix, *weights)
        return attn_res_bank(*given, layer_output=layer_output, append=append, in_place=in_place)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, rms_eps={self.rms_eps}"


class BlockAttnRes(nn.Module):
    """Block AttnRes for a whole model: the inputs of its layers, two lines a layer.

        depth = attention.start(embedding)
        for layer in layers:
            depth.add(layer(depth.input()))
        output = depth.input()

    Layers form blocks of `block_size`; a block is the sum of its layers' outputs, and the embedding is a block of its own.
    The input of a layer is `attn_res` over the finished blocks and the partial sum of its own block. When a block begins,
    the finished ones are read for all of its layers at once (`attn_res_phase1`); each layer then joins the partial sum
    (`attn_res_merge`), to which the output of the layer before is added in the same pass.

    A layer that takes the depth itself returns its last output, so that FSDP2 gathers its parameters for the backward.

    The parameters are `query` and `rms_weight` [n_inputs, hidden_size], zero and one at first.

    Args:
        hidden_size: D, the size of the last dimension.
        n_inputs: how many inputs the model asks for: its layers, and one more for what follows the last.
        block_size: S, layers of a block.
        rms_eps: added to the mean square.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: an argument is no number, or out of range.

    Source: "Attention Residuals", arXiv 2603.15031.
    """

    def __init__(
        self,
        hidden_size: int,
        n_inputs: int,
        block_size: int,
        rms_eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        arguments.whole("hidden_size", hidden_size, least=1)
        arguments.whole("n_inputs", n_inputs, least=1)
        self.block_size = arguments.whole("block_size", block_size, least=1)
        self.rms_eps = check_eps("rms_eps", rms_eps)
        self.query = nn.Parameter(torch.empty(n_inputs, hidden_size, device=device, dtype=dtype))
        self.rms_weight = nn.Parameter(torch.empty(n_inputs, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zero queries and unit norms, as in the paper."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.rms_weight)

    def start(self, embedding: Tensor) -> Depth:
        """Begin a forward pass.

        Args:
            embedding: [..., D], the first block.

        Returns:
            The state of this pass.

        Raises:
            TypeError, ValueError: `embedding` is no floating tensor with rows.
        """
        return Depth(self, embedding)

    def extra_repr(self) -> str:
        n_inputs, hidden_size = self.query.shape
        return f"{hidden_size}, n_inputs={n_inputs}, block_size={self.block_size}, rms_eps={self.rms_eps}"


class Depth:
    """One forward pass through the layers: the finished blocks, and the partial sum of the one under way.

    Attributes:
        blocks: the finished ones, the embedding first.
        prefix: the sum of the outputs of this block's layers but the last one's; None before the second.
    """

    def __init__(self, weights: BlockAttnRes, embedding: Tensor) -> None:
        arguments.rows("embedding", embedding)
        self.blocks = [embedding]
        self.prefix: Tensor | None = None
        self._weights = weights
        self._output: Tensor | None = None  # of the last layer, not yet in the partial sum
        self._layer = 0
        self._phase1: tuple[Tensor, Tensor, Tensor] | None = None

    def input(self) -> Tensor:
        """The input of the next layer.

        Returns:
            h [..., D] in the embedding's dtype.

        Raises:
            ValueError: there are no more layers, or the output of the layer before is missing.
        """
        weights, layer = self._weights, self._layer
        if layer >= len(weights.query):
            raise ValueError(f"input() was called {layer + 1} times and must be called at most n_inputs, {layer}, times.")
        place = layer % weights.block_size
        if place == 0:
            self._finish_block()
            of_block = slice(layer, layer + weights.block_size)
            self._phase1 = attn_res_phase1(
                weights.query[of_block], self.blocks, weights.rms_weight[of_block], weights.rms_eps
            )
        assert self._phase1 is not None
        o, maximum, total = (found[place] for found in self._phase1)
        self._layer += 1
        if place == 0:
            return (o / total.unsqueeze(-1)).to(self.blocks[0].dtype)
        if self._output is None:
            raise ValueError(f"the output of layer {layer - 1} is missing and must be given to add() first.")
        state, weight = (o, maximum, total), (weights.query[layer], weights.rms_weight[layer])
        if self.prefix is None:
            self.prefix, self._output = self._output, None
            return attn_res_merge(*state, self.prefix, *weight, rms_eps=weights.rms_eps)
        found = attn_res_merge(*state, self.prefix, *weight, rms_eps=weights.rms_eps, layer_output=self._output)
        assert isinstance(found, AttnResResult)
        self.prefix, self._output = found.prefix, None
        return found.output

    def add(self, output: Tensor) -> None:
        """Take the output of the layer whose input was asked for last.

        Args:
            output: [..., D], as the embedding.

        Raises:
            TypeError, ValueError: it is no such tensor, or it was given twice.
        """
        if self._output is not None:
            raise ValueError("the output of a layer was given to add() twice and must be given once for every input().")
        embedding = self.blocks[0]
        check_like("output", output, embedding.shape, embedding.dtype, embedding, "the embedding's")
        self._output = output

    def _finish_block(self) -> None:
        if self._output is None:
            if self._layer:
                raise ValueError(f"the output of layer {self._layer - 1} is missing and must be given to add() first.")
            return
        self.blocks.append(self._output if self.prefix is None else self.prefix + self._output)
        self.prefix = self._output = None
