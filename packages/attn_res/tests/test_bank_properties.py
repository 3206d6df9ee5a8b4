"""Whatever a caller may hand over beside a bank, in whatever way: attention over its blocks and the prefix in fp64."""

import attention_examples as attention
import pytest
import torch
from npu_attn_res import attn_res_bank

from testing.properties import Search

pytestmark = pytest.mark.usefixtures("npu_poisoned")


def test_a_bank_is_attention_over_its_blocks_and_the_prefix(device, npu_search: Search):
    """An example's `n_blocks` is the capacity; the prefix has the weights' dtype, the layer's output the bank's."""

    def holds(example: attention.Example) -> None:
        make = attention.Maker(example)
        rows, capacity = (*example.leading, example.width), example.n_blocks
        used = example.seed % (capacity + 1)
        appends, counted = example.norm_per_layer and used < capacity, example.same_twice
        prefix_dtype = example.weight_dtype
        bank = make(example.blocks[0], (*example.leading, capacity, example.width), example.dtype)
        prefix, x = make(example.more[0], rows, prefix_dtype), None
        if example.added:
            x = make(example.more[1], rows, example.dtype)
        query, rms_weight, output_rms_weight = make.weights()
        inputs = [bank, prefix, x, query, rms_weight, output_rms_weight if example.normalised else None]

        def function(bank, prefix, x, *weights):
            if appends:  # to memory of its own, of wider rows
                bank = torch.nn.functional.pad(bank, (0, 1))[..., : example.width]
            count = torch.tensor(used, device=bank.device) if counted else used
            found = attn_res_bank(
                bank,
                count,
                prefix,
                *weights,
                rms_eps=example.eps,
                output_rms_eps=example.output_rms_eps,
                layer_output=x,
                append=appends,
                return_weights=example.return_weights,
            )
            alpha = found.weights if found.weights is None or not counted else _those(found.weights, used)
            given = (found.output, found.normalized, None if x is None else found.prefix, bank if appends else None, alpha)
            return tuple(one for one in given if one is not None)

        def exact(bank, prefix, x, query, rms_weight, output_rms_weight):
            joined = prefix if x is None else attention.through(prefix + x, prefix_dtype)
            v = torch.stack([*bank[..., :used, :].unbind(-2), joined])
            score = attention.scores(v, query, rms_weight, example.eps)
            alpha = attention.blurred(torch.exp(attention.blurred(score) - attention.blurred(torch.logsumexp(score, 0))))
            h = attention.blurred(alpha.unsqueeze(-1) * v).sum(0)
            outputs = [h]
            if output_rms_weight is not None:
                stored = attention.through(h, prefix_dtype)
                outputs.append(attention.normalise(stored, output_rms_weight, example.output_rms_eps))
            if x is not None:
                outputs.append(joined)
            if appends:
                block = attention.through(joined, example.dtype).unsqueeze(-2)
                outputs.append(torch.cat([bank[..., :used, :], block, bank[..., used + 1 :, :]], -2))
            return [*outputs, alpha.detach()] if example.return_weights else outputs

        attention.compare(example, function, exact, inputs, device, constant=int(example.return_weights), row_roundings=2)

    npu_search(attention.examples(device.name), holds)


def _those(weights, used):
    """Of the blocks that count, and of the prefix, which comes last; the others' are zero."""
    assert not weights[used:-1].any()
    return torch.cat([weights[:used], weights[-1:]])
