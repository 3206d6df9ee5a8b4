"""Attention Residuals in two phases: public functions, and Block AttnRes as a module with its state.

Experimental: no trainer and no model of others that we know calls it. `attn_res_bank` gives a layer's input in one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from npu_tiling import arguments
from npu_tiling.dtensor import is_distributed
from torch import Tensor, nn

from ..checks import as_blocks, check_merge, check_phase1, check_rows_like, phase1_of_parts, with_prefix_of_parts
from ..records import AttnResResult, Phase1Result
from ..reference import scaled_query
from .operator import MERGE, PHASE1, Merge, Phase1


def attn_res_phase1(
    queries: Tensor, residuals: Tensor | Sequence[Tensor], rms_weight: Tensor, rms_eps: float = 1e-6, scale: float = 1.0
) -> Phase1Result:
    """The first phase of Block AttnRes: the finished blocks' share of several layers' inputs, for all of them at once.

        s_i = scale <query, k_i>, as in `attn_res`
        o = sum_i softmax_i(s_i) v_i                      lse = log(sum_i exp(s_i))

    so that o is what `attn_res` gives for a layer, and `attn_res_merge` joins what comes later. Every block is read twice,
    or once on CUDA where one token's rows of all layers fit in registers; both results may be differentiated.

    Args:
        queries: [S, D], one query for each layer.
        residuals: as for `attn_res`.
        rms_weight: [D], or [S, D], one for each layer.
        rms_eps, scale: as for `attn_res`.

    Returns:
        A Phase1Result of o [S, ..., D] and lse [S, ...], fp32: nothing is rounded before the phases are joined.

    Raises:
        TypeError, ValueError: as for `attn_res`.

    Source: arXiv 2603.15031, the two-phase computation.
    """
    stacked = isinstance(residuals, Tensor)
    sources = [residuals] if isinstance(residuals, Tensor) else as_blocks(residuals)
    first, rms_eps, scale = check_phase1(queries, sources, stacked, rms_weight, rms_eps, scale)
    if is_distributed((queries, sources, rms_weight)):
        run = functools.partial(attn_res_phase1, rms_eps=rms_eps, scale=scale)
        return Phase1Result(*phase1_of_parts(run, queries, residuals if stacked else sources, rms_weight))
    call = Phase1(scaled_query(queries, scale), sources, rms_weight, stacked, eps=rms_eps, save=False)
    o, lse, *_ = PHASE1(call)
    leading = first.shape[1:-1] if stacked else first.shape[:-1]
    o = o.view(*leading, *o.shape[1:]).movedim(-2, 0)
    return Phase1Result(o, lse.view(len(queries), *leading))


def attn_res_merge(
    o: Tensor,
    lse: Tensor,
    prefix: Tensor,
    query: Tensor,
    rms_weight: Tensor,
    output_rms_weight: Tensor | None = None,
    rms_eps: float = 1e-6,
    scale: float = 1.0,
    *,
    layer_output: Tensor | None = None,
    output_rms_eps: float | None = None,
) -> AttnResResult:
    """The second phase of Block AttnRes: one more block, the prefix, joins a layer's first phase.

        s = scale <query, k(prefix)>        a = exp(s) / (exp(lse) + exp(s))        h = (1 - a) o + a prefix

    which is what `attn_res` gives over all blocks and the prefix.

    Args:
        o: [..., D], lse: [...]: of one layer, as `attn_res_phase1` returned them.
        prefix: [..., D], the running sum of a block's layers; fp32, bf16 or fp16 (fp64 too on a CPU).
        query, rms_weight: [D], the prefix's dtype or fp32: the layer's.
        output_rms_weight: as for `attn_res`.
        rms_eps, scale: as for `attn_res`.
        layer_output: [..., D], of any of these dtypes: added to the prefix first, in the same pass; the sum is rounded to
            the prefix's dtype.
        output_rms_eps: as for `attn_res`.

    Returns:
        An AttnResResult, h [..., D] in the prefix's dtype.

    Raises:
        TypeError, ValueError: as for `attn_res`.

    Source: arXiv 2603.15031, the two-phase computation.
    """
    weights, state = (query, rms_weight, output_rms_weight), {"o": o, "lse": lse}
    numbers = (rms_eps, scale, output_rms_eps)
    rms_eps, scale, output_rms_eps = check_merge(state, prefix, layer_output, weights, numbers)
    rows = {**state, "prefix": prefix, "layer_output": layer_output}
    if is_distributed((*rows.values(), *weights)):
        run = functools.partial(attn_res_merge, rms_eps=rms_eps, scale=scale, output_rms_eps=output_rms_eps)
        return with_prefix_of_parts(run, rows, weights)
    call = Merge(
        o=o,
        lse=lse,
        prefix=prefix,
        layer_output=layer_output,
        query=scaled_query(query, scale),
        rms_weight=rms_weight,
        output_rms_weight=output_rms_weight,
        eps=rms_eps,
        norm_eps=output_rms_eps,
        save=False,
    )
    h, y, new_prefix, *_ = MERGE(call)
    return AttnResResult(h, None if output_rms_weight is None else y, prefix if layer_output is None else new_prefix)


class BlockAttnRes(nn.Module):
    """Block AttnRes for a whole model: the inputs of its layers, two lines a layer.

        depth = attention.start(embedding)
        for layer in layers:
            depth.add(layer(depth.input()))
        output = depth.input()

    Layers form blocks of `block_size`; a block is the sum of its layers' outputs, and the embedding is a block of its own.
    The input of a layer is `attn_res` over the finished blocks and the partial sum of its own block: `attn_res_phase1` when
    a block begins, then `attn_res_merge` in each layer.

    A layer that takes the depth itself returns its last output, so that FSDP2 gathers its parameters for the backward.

    The parameters are `query` and `rms_weight` [n_inputs, hidden_size], zero and one at first.

    Args:
        hidden_size: D, the size of the last dimension.
        n_inputs: how many inputs the model asks for: its layers, and one more for what follows the last.
        block_size: S, layers of a block.
        rms_eps, scale: as for `attn_res`.
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
        scale: float = 1.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        arguments.whole("hidden_size", hidden_size, least=1)
        arguments.whole("n_inputs", n_inputs, least=1)
        self.block_size = arguments.whole("block_size", block_size, least=1)
        self.rms_eps = arguments.number("rms_eps", rms_eps, least=0, finite=False)
        self.scale = arguments.number("scale", scale)
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
        options = f"block_size={self.block_size}, rms_eps={self.rms_eps}, scale={self.scale}"
        return f"{hidden_size}, n_inputs={n_inputs}, {options}"


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
        self._phase1: tuple[Tensor, Tensor] | None = None

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
                weights.query[of_block], self.blocks, weights.rms_weight[of_block], weights.rms_eps, weights.scale
            )
        assert self._phase1 is not None
        o, lse = (result[place] for result in self._phase1)
        self._layer += 1
        if place == 0:
            return o.to(self.blocks[0].dtype)
        if self._output is None:
            raise ValueError(f"the output of layer {layer - 1} is missing and must be given to add() first.")
        if self.prefix is None:
            prefix, output = self._output.to(self.blocks[0].dtype), None
        else:
            prefix, output = self.prefix, self._output
        of_layer = (weights.query[layer], weights.rms_weight[layer], None, weights.rms_eps, weights.scale)
        result = attn_res_merge(o, lse, prefix, *of_layer, layer_output=output)
        self.prefix, self._output = result.prefix, None
        return result.output

    def add(self, output: Tensor) -> None:
        """Take the output of the layer whose input was asked for last.

        Args:
            output: [..., D], of any floating dtype, as autocast gives it; the sum has the embedding's.

        Raises:
            TypeError, ValueError: it is no such tensor, it was given twice, or no input was asked for.
        """
        if self._output is not None or not self._layer:
            how = "twice" if self._layer else "before the first input()"
            raise ValueError(f"the output of a layer was given to add() {how} and must be given once for every input().")
        check_rows_like("output", output, self.blocks[0], "the embedding's")
        self._output = output

    def _finish_block(self) -> None:
        if self._output is None:
            if self._layer:
                raise ValueError(f"the output of layer {self._layer - 1} is missing and must be given to add() first.")
            return
        block = self._output if self.prefix is None else self.prefix + self._output
        self.blocks.append(block.to(self.blocks[0].dtype))
        self.prefix = self._output = None
