"""Whatever a caller may hand over, in whatever way: attention over depth in fp64, wherever the operators run."""

import pytest
import torch
from attention_examples import Example, Maker, compare, examples, normalise, scores, through
from npu_attn_res import attn_res, attn_res_merge, attn_res_phase1
from torch import Tensor

from testing.properties import Drawn, blurred

pytestmark = pytest.mark.usefixtures("npu_poisoned")


def test_attn_res_is_attention_over_depth(device, npu_search):
    def holds(example: Example) -> None:
        make = Maker(example)
        blocks = make.blocks()
        n = len(blocks)
        query, rms_weight, output_rms_weight = make.weights()
        inputs = [*blocks, query, rms_weight, output_rms_weight if example.normalised else None]
        twice = example.listed and example.same_twice

        def given(values):
            own = [*values[:n], values[0]] if twice else values[:n]
            return own if example.listed else own[0]

        def function(*values):
            options = {"output_rms_weight": values[n + 2], "output_rms_eps": example.output_rms_eps}
            found = attn_res(
                given(values),
                values[n],
                values[n + 1],
                rms_eps=example.eps,
                return_weights=example.return_weights,
                **options,
            )
            return (found,) if isinstance(found, Tensor) else tuple(one for one in found if one is not None)

        def exact(*values):
            v = torch.stack(given(values)) if example.listed else values[0]
            score = scores(v, values[n], values[n + 1], example.eps)
            alpha = blurred(torch.exp(blurred(score) - blurred(torch.logsumexp(score, 0))))
            h = blurred(alpha.unsqueeze(-1) * v).sum(0)
            outputs = [h]
            if example.normalised:
                outputs.append(normalise(through(h, example.dtype), values[n + 2], example.output_rms_eps))
            return [*outputs, alpha.detach()] if example.return_weights else outputs

        compare(example, function, exact, inputs, device, constant=int(example.return_weights))

    npu_search(examples(device.name), holds)


def test_phase1_is_its_share_of_every_layer(device, npu_search):
    def holds(example: Example) -> None:
        make = Maker(example)
        blocks = make.blocks()
        n = len(blocks)
        queries, rms_weight, _ = make.weights(example.n_layers)
        if example.norm_per_layer:
            rms_weight = rms_weight.expand(example.n_layers, -1).contiguous()

        def function(*values):
            return attn_res_phase1(values[n], values[:n] if example.listed else values[0], values[n + 1], example.eps)

        def exact(*values):
            v = torch.stack(values[:n]) if example.listed else values[0]
            norms = values[n + 1].expand(example.n_layers, -1)
            score = torch.stack(
                [scores(v, q, w, example.eps) for q, w in zip(values[n], norms, strict=True)], 1
            )  # [N, S, ...]
            maximum = score.amax(0).detach()
            weight = blurred(torch.exp(blurred(score) - blurred(maximum)))
            total = blurred(weight).sum(0)
            o = blurred(weight.unsqueeze(-1) * v.unsqueeze(1)).sum(0) / total.unsqueeze(-1)
            return blurred(o), blurred(blurred(maximum) + blurred(total).log())

        compare(example, function, exact, [*blocks, queries, rms_weight], device)

    npu_search(examples(device.name), holds)


def test_merge_joins_one_more_block(device, npu_search):
    def holds(example: Example) -> None:
        make = Maker(example)
        shape, wide = (*example.leading, example.width), torch.promote_types(example.dtype, torch.float32)
        o, partial, x = make(example.more[0], shape, wide), make(example.more[1], shape, example.dtype), None
        if example.added:
            x = make(example.more[2], shape, example.dtype)
        lse = make(Drawn("normal", example.blocks[0].layout), example.leading, wide)
        query, rms_weight, output_rms_weight = make.weights()
        inputs = [o, lse, partial, x, query, rms_weight, output_rms_weight if example.normalised else None]

        def function(o, lse, partial, x, query, rms_weight, output_rms_weight):
            options = {"layer_output": x, "output_rms_weight": output_rms_weight, "output_rms_eps": example.output_rms_eps}
            found = attn_res_merge(o, lse, partial, query, rms_weight, rms_eps=example.eps, **options)
            outputs = (found.output, found.normalized, found.prefix if x is not None else None)
            return tuple(one for one in outputs if one is not None)

        def exact(o, lse, partial, x, query, rms_weight, output_rms_weight):
            joined = partial if x is None else through(partial + x, example.dtype)
            score = scores(joined, query, rms_weight, example.eps)
            top = torch.maximum(lse, score).detach()
            before, last = torch.exp(lse - top), torch.exp(score - top)
            above = blurred(before.unsqueeze(-1) * o) + blurred(last.unsqueeze(-1) * joined)
            h = blurred(above) / (blurred(before) + blurred(last)).unsqueeze(-1)
            outputs = [h]
            if output_rms_weight is not None:
                outputs.append(normalise(through(h, example.dtype), output_rms_weight, example.output_rms_eps))
            return outputs if x is None else [*outputs, joined]

        compare(example, function, exact, inputs, device)

    npu_search(examples(device.name), holds)
