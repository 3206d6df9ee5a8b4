"""Distributions of rows: statistics, logits of ids, the largest logits, and gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from npu_tiling import Device
from npu_tiling.pytorch import collectives
from npu_tiling.pytorch.tensors import allocate
from torch import Tensor

from .. import distribution_rows, ids
from ..calls import DistributionInputs
from ..chunks import part
from ..gradients import Gradients
from ..launch.distributions import DistributionKernels
from ..options import Options
from ..reference.chunks import ReferenceChunks
from ..reference.distributions import ReferenceDistributions, logits_of, slopes_of
from ..shape import Shape
from ..tiling import choose
from .head import Head


class Found(NamedTuple):
    """Numbers read from the logits; None where not asked for.

    Attributes:
        statistics: [5, N], see distribution_rows.py.
        ids_below: [N, K], z less the row's largest; of ids that are no columns any number.
        top_below, top_ids: [N, top_k], the same.
        first: int64 [N], the column of the first largest logit.
    """

    statistics: Tensor
    ids_below: Tensor | None
    top_below: Tensor | None
    top_ids: Tensor | None
    first: Tensor | None


class Distributions(Head):
    """See `Way.DISTRIBUTIONS`: some columns at a time, or all of them."""

    def __init__(self, inputs: DistributionInputs, options: Options, shape: Shape, device: Device | None) -> None:
        super().__init__(inputs, options, choose(shape), device)
        self._ids, self._rates, self._on_cpu = inputs.ids, inputs.rates, device is None
        self._kernels = ReferenceDistributions(options) if device is None else DistributionKernels(options, device)

    def found(self, top_k: int, find_first: bool) -> Found:
        """Numbers of the whole vocabulary."""
        rows, exact = self.x.shape[0], self.tiling.exact
        found = Found(
            allocate(self.x, (distribution_rows.STATISTICS, rows), exact),
            None if self._ids is None else allocate(self.x, self._ids.shape, exact),
            allocate(self.x, (rows, top_k), exact) if top_k else None,
            allocate(self.x, (rows, top_k), torch.int64) if top_k else None,
            allocate(self.x, (rows,), torch.int64) if find_first else None,
        )
        for tokens in self.tiling.chunks.tokens:
            self._find(tokens, Found(part(found.statistics, tokens, 1), *[part(whole, tokens) for whole in found[1:]]))
        return found

    def _find(self, tokens: slice, result: Found) -> None:
        rates, named = part(self._rates, tokens), part(self._ids, tokens)
        rising, exact, group = self.options.logit_scale >= 0.0, self.tiling.exact, self.options.group
        tops, firsts = [], []
        for columns in self.tiling.chunks.columns:
            logits = self.products(tokens, columns, bias=True)
            first = self.options.vocab_first + columns.start
            self._kernels.statistics(logits, rates, result.statistics, merge=columns.start > 0)
            if result.ids_below is not None:
                assert named is not None
                chosen = ids.gather(logits, named, first).to(exact)
                result.ids_below.copy_(chosen if columns.start == 0 else result.ids_below + chosen)
            if result.top_ids is not None:
                values, places = logits.topk(min(result.top_ids.shape[1], logits.shape[1]), dim=1, largest=rising)
                tops.append((logits_of(values.to(exact), rates, self.options), places + first))
            if result.first is not None:
                values, places = self._capped(logits).max(1)
                firsts.append((values, places + first))
        if group:
            result.statistics.copy_(distribution_rows.merged(collectives.gather(result.statistics, group)))
        maximum = result.statistics[distribution_rows.MAXIMUM].unsqueeze(1)
        if result.ids_below is not None:
            if group:
                collectives.sum_(result.ids_below, group)
            torch.sub(logits_of(result.ids_below, rates, self.options), maximum, out=result.ids_below)
        if result.top_below is not None and result.top_ids is not None:
            values, places = self._largest(tops, result.top_ids.shape[1])
            torch.sub(values, maximum, out=result.top_below)
            result.top_ids.copy_(places)
        if result.first is not None:
            values, places = (torch.stack(part) for part in zip(*firsts, strict=True))
            values, places = ids.first_largest(values, places)
            if group:
                _, places = ids.first_largest(collectives.gather(values, group), collectives.gather(places, group))
            result.first.copy_(places)

    def _capped(self, logits: Tensor) -> Tensor:
        """z of raw logits, all rates 1, with the roundings of the loss: of its kernels, or of its definition on a CPU.

        May overwrite the logits.
        """
        if self.options.softcap is None and self.options.logit_scale == 1.0:
            return logits
        z = logits.to(self.tiling.exact)
        if self._on_cpu or self.options.softcap is None:
            ReferenceChunks(None, None, self.options).prepare(z, slice(0, z.shape[1]))
            return z
        z *= self.options.logit_scale
        e = z.abs().mul_(-2.0 / self.options.softcap).exp_()  # as `formula.logits_of_raw`
        return torch.copysign((1.0 - e).div_(1.0 + e), z).mul_(self.options.softcap)

    def _largest(self, found: list[tuple[Tensor, Tensor]], count: int) -> tuple[Tensor, Tensor]:
        """The largest logits [rows, count] of all parts of the columns, and their ids."""
        of_all, all_ids = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        group, lowest = self.options.group, torch.finfo(of_all.dtype).min
        if not group:
            return ids.largest(of_all, all_ids, count)
        lacking = max(0, count - of_all.shape[1])  # of a rank that has fewer columns
        # A column that is ruled out, minus infinity, comes before what a rank lacks.
        of_all = torch.nn.functional.pad(of_all.clamp_min(lowest), (0, lacking), value=-torch.inf)
        own = ids.largest(of_all, torch.nn.functional.pad(all_ids, (0, lacking)), count)
        of_all, all_ids = (collectives.gather(one, group).transpose(0, 1).flatten(1) for one in own)
        values, places = ids.largest(of_all, all_ids, count)
        return values.masked_fill(values == lowest, -torch.inf), places

    def gradients_of(
        self, coefficients: Tensor, log_probs: Tensor | None, did_log_probs: Tensor | None, need_drates: bool
    ) -> tuple[Gradients, Tensor | None]:
        """Gradients of x, weight and bias, and of rates.

        Args:
            coefficients: [6, N], see distribution_rows.py.
            log_probs, did_log_probs: [N, K], of the ids, and their upstream gradients; 0 where an id is no column.
        """
        drates = coefficients.new_empty(self.x.shape[0]) if need_drates else None
        for tokens in self.tiling.chunks.tokens:
            own, rates = part(coefficients, tokens, 1), part(self._rates, tokens)
            named, values, dots = part(self._ids, tokens), None, None
            if named is not None:
                assert log_probs is not None
                assert did_log_probs is not None
                values, dots = self._of_ids(own, named, part(log_probs, tokens), part(did_log_probs, tokens), rates)
            for columns in self.tiling.chunks.columns:
                logits = self.products(tokens, columns, bias=True)
                gradient = self.gradient_memory(logits)
                of_columns = None if drates is None else own.new_empty(own.shape[1])
                self._kernels.gradient(logits, rates, gradient, own, of_columns)
                if named is not None:
                    assert values is not None
                    ids.scatter(gradient, named, values, self.options.vocab_first + columns.start)
                self.gradients.add(tokens, columns, gradient)
                if drates is not None:
                    assert of_columns is not None
                    whole = part(drates, tokens)
                    whole.copy_(of_columns if columns.start == 0 else of_columns + whole)
            if drates is not None:
                whole, (maximum, *_, dmean) = part(drates, tokens), own.unbind()
                if self.options.group:
                    collectives.sum_(whole, self.options.group)
                whole.add_(dmean * maximum, alpha=self.options.vocab_size)
                if dots is not None:
                    whole.add_(dots)
        self.release()
        if drates is not None:
            assert self._rates is not None
            drates = drates / self._rates
        return self.gradients.finished(), drates

    def _of_ids(
        self, coefficients: Tensor, named: Tensor, log_probs: Tensor, did: Tensor, rates: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the raw logits of ids, [rows, K], and the sum of (z - k) times the upstream gradient, [rows]."""
        maximum, log, a, b, c, d = coefficients.unsqueeze(2).unbind(0)
        p = log_probs.exp()
        log_probs = log_probs.masked_fill(log_probs == -torch.inf, 0.0)  # of a column that is ruled out, at any temperature
        of_z, below = p * (a + b * log_probs + c * p) + d + ids.sums_of_equals(named, did), log_probs + log
        return of_z * slopes_of(below + maximum, rates, self.options), (did * below).sum(1)
