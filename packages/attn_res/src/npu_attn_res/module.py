"""Attention Residuals as modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from npu_tiling.pytorch import arguments
from torch import Tensor, nn

from .checks import check_eps, check_like
from .functional import attn_res, attn_res_merge, attn_res_phase1


class AttnRes(nn.Module):
    """`attn_res` with a learned query and a learned norm of the keys.

    The parameters are `w_query` [hidden_size], zero at first, which makes h the mean of the blocks, and `w_norm`
    [hidden_size], one at first.

    Args:
        hidden_size: D, the size of the last dimension.
        eps: added to the mean square.
        device, dtype: of the parameters.

    Raises:
        TypeError, ValueError: an argument is no number, or out of range.

    Source: "Attention Residuals", arXiv 2603.15031.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = arguments.whole("hidden_size", hidden_size, least=1)
        self.eps = check_eps("eps", eps)
        self.w_query = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.w_norm = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zero queries and unit norms, as in the paper."""
        nn.init.zeros_(self.w_query)
        nn.init.ones_(self.w_norm)

    def forward(
        self,
        blocks: Tensor | Sequence[Tensor],
        *,
        return_weights: bool = False,
        norm_weight: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> Tensor | tuple[Tensor, ...]:
        """`attn_res` of the blocks.

        Args:
            blocks: [N, ..., D], or a list or tuple of N tensors [..., D].
            return_weights, norm_weight, norm_eps: as for `attn_res`.

        Returns:
            h [..., D], or a tuple of h, y and alpha, as `attn_res` returns it.

        Raises:
            TypeError, ValueError: as `attn_res` does.
        """
        weights = (self.w_query, self.w_norm)
        return attn_res(
            blocks, *weights, self.eps, return_weights=return_weights, norm_weight=norm_weight, norm_eps=norm_eps
        )

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}"


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

    The parameters are `w_query` and `w_norm` [n_inputs, hidden_size], zero and one at first.

    Args:
        hidden_size: D, the size of the last dimension.
        n_inputs: how many inputs the model asks for: its layers, and one more for what follows the last.
        block_size: S, layers of a block.
        eps: added to the mean square.
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
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        arguments.whole("hidden_size", hidden_size, least=1)
        arguments.whole("n_inputs", n_inputs, least=1)
        self.block_size = arguments.whole("block_size", block_size, least=1)
        self.eps = check_eps("eps", eps)
        self.w_query = nn.Parameter(torch.empty(n_inputs, hidden_size, device=device, dtype=dtype))
        self.w_norm = nn.Parameter(torch.empty(n_inputs, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zero queries and unit norms, as in the paper."""
        nn.init.zeros_(self.w_query)
        nn.init.ones_(self.w_norm)

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
        n_inputs, hidden_size = self.w_query.shape
        return f"{hidden_size}, n_inputs={n_inputs}, block_size={self.block_size}, eps={self.eps}"


class Depth:
    """One forward pass through the layers: the finished blocks, and the partial sum of the one under way.

    Attributes:
        blocks: the finished ones, the embedding first.
        partial: the sum of the outputs of this block's layers but the last one's; None before the second.
    """

    def __init__(self, weights: BlockAttnRes, embedding: Tensor) -> None:
        arguments.rows("embedding", embedding)
        self.blocks = [embedding]
        self.partial: Tensor | None = None
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
        if layer >= len(weights.w_query):
            raise ValueError(f"input() was called {layer + 1} times and must be called at most n_inputs, {layer}, times.")
        place = layer % weights.block_size
        if place == 0:
            self._finish_block()
            of_block = slice(layer, layer + weights.block_size)
            self._phase1 = attn_res_phase1(weights.w_query[of_block], self.blocks, weights.w_norm[of_block], weights.eps)
        assert self._phase1 is not None
        o, maximum, total = (found[place] for found in self._phase1)
        self._layer += 1
        if place == 0:
            return (o / total.unsqueeze(-1)).to(self.blocks[0].dtype)
        if self._output is None:
            raise ValueError(f"the output of layer {layer - 1} is missing and must be given to add() first.")
        state = (o, maximum, total)
        own = (weights.w_query[layer], weights.w_norm[layer], weights.eps)
        if self.partial is None:
            self.partial, self._output = self._output, None
            return attn_res_merge(*state, self.partial, *own)
        h, self.partial = attn_res_merge(*state, self.partial, *own, layer_output=self._output)
        self._output = None
        return h

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
        self.blocks.append(self._output if self.partial is None else self.partial + self._output)
        self.partial = self._output = None
