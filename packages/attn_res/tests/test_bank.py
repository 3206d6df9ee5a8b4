"""Attention over a bank of blocks and a prefix, wherever it runs, against fp64."""

import banks
import depth
import numpy as np
import pytest
import torch
from npu_attn_res import attn_res, attn_res_bank

pytestmark = pytest.mark.usefixtures("npu_poisoned")


@pytest.mark.parametrize("counted", [False, True], ids=["int", "on the device"])
@pytest.mark.parametrize("n_blocks", [0, 1, 3, 5])
def test_only_blocks_that_count_are_read(device, n_blocks, counted):
    banks.check(
        banks.tensors(device, n_blocks=n_blocks, bank=torch.float32, prefix=torch.float32), n_blocks, counted=counted
    )


@pytest.mark.few(2)
@pytest.mark.parametrize(("width", "tokens"), [(123, 37), (1000, 1), (4096, 5), (7168, 3)])
def test_every_width(device, width, tokens):
    banks.check(banks.tensors(device, tokens, capacity=3, n_blocks=2, width=width), 2)


def test_rows_wider_than_the_chip(device):
    for counted in (False, True):
        banks.check(banks.tensors(device, 3, capacity=3, n_blocks=2, width=20000), 2, counted=counted)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("bank", "prefix", "output"),
    [
        (torch.float32, torch.bfloat16, None),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.float32),
    ],
    ids=str,
)
def test_every_tensor_may_have_its_own_dtype(device, bank, prefix, output):
    """Rows of a whole number of aligned pieces in one dtype, and not in the other."""
    given = banks.tensors(device, bank=bank, prefix=prefix, width=136)
    found = banks.check(given, 3, output_dtype=output)
    assert found.output.dtype == found.normalized.dtype == (output or prefix)
    assert found.prefix.dtype == prefix


def test_a_layers_output_may_have_another_dtype_than_the_prefix(device):
    bank, prefix, x, *weights = banks.tensors(device, prefix=torch.float32)
    banks.check([bank, prefix, x.bfloat16(), *weights], 3)


@pytest.mark.parametrize("shape", [(2, 3), (), (0,), (0, 4)])
def test_any_leading_shape(device, shape):
    bank, prefix, x, *weights = banks.tensors(device, shape, bank=torch.float32, prefix=torch.float32)
    if prefix.numel():
        banks.check([bank, prefix, x, *weights], 3)
    found = attn_res_bank(bank, 3, prefix, *weights, layer_output=x, return_weights=True)
    assert found.output.shape == found.normalized.shape == found.prefix.shape == (*shape, banks.WIDTH)
    assert found.weights.shape == (4, *shape)


STRIDED = {
    "slice of a wider bank": lambda t: torch.cat([t, t], -1)[..., : banks.WIDTH],
    "every second slot": lambda t: t.repeat_interleave(2, 1)[:, ::2] if t.dim() > 2 else t,
    "every second token": lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2],
    "columns not side by side": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "slots outside": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else t,
}


@pytest.mark.parametrize("view", STRIDED)
def test_any_strides(device, view):
    bank, prefix, x, *weights = banks.tensors(device, bank=torch.float32, prefix=torch.float32)
    expected = attn_res_bank(bank, 3, prefix, *weights, layer_output=x)
    strided = [STRIDED[view](tensor) for tensor in (bank, prefix, x)]
    assert torch.equal(strided[0].nan_to_num(), bank.nan_to_num())
    found = attn_res_bank(strided[0], 3, strided[1], *weights, layer_output=strided[2])
    for one, other in zip(found[:3], expected[:3], strict=True):
        depth.near(one.cpu(), other.cpu().double())
    banks.check([*strided, *weights], 3)


@pytest.mark.parametrize("n_blocks", [0, 1, 3])
def test_a_list_and_a_bank_are_the_same(device, n_blocks):
    bank, prefix, _, *weights = banks.tensors(device)
    blocks = [block.contiguous() for block in bank[:, :n_blocks].unbind(1)]
    listed = attn_res_bank(blocks, None, prefix, *weights, return_weights=True)
    banked = attn_res_bank(bank, n_blocks, prefix, *weights, return_weights=True)
    first = attn_res_bank([*bank.unbind(1)], np.int64(n_blocks), prefix, *weights, return_weights=True)
    for one, other, another in zip(listed, banked, first, strict=True):
        assert torch.equal(one, other) and torch.equal(one, another)


@pytest.mark.parametrize("count", [0, 2, 3])
@pytest.mark.parametrize("width", [banks.WIDTH, 123])
def test_listed_blocks_behind_a_number_on_the_device_get_zeros(device, count, width):
    bank, prefix, _, *weights = banks.tensors(device, width=width)
    gradients = []
    for n_blocks in (count, torch.tensor(count, device=bank.device)):
        blocks = [block.contiguous().requires_grad_() for block in bank.unbind(1)]
        found = attn_res_bank(blocks, n_blocks, prefix.detach().requires_grad_(), *weights)
        given = torch.autograd.grad(found.output.sum(), blocks, materialize_grads=True, allow_unused=True)
        gradients.append(given)
        assert not any(each.any() for each in given[count:])
    for one, other in zip(*gradients, strict=True):
        depth.near(one.cpu(), other.cpu().double())


@pytest.mark.parametrize("append", [False, True], ids=["", "appended"])
@pytest.mark.parametrize(
    ("count", "meant"), [(-1, 0), (2**31 - 1, 5), (6, 5), (2**31, 5), (2**32 + 2, 5), (-(2**32) + 1, 0)]
)
def test_a_number_on_the_device_that_is_none_of_the_banks_reads_and_writes_nothing_outside(device, count, meant, append):
    bank, prefix, x, *weights = banks.tensors(device, n_blocks=5, bank=torch.float32, prefix=torch.float32)
    outside = float("nan")
    results = []
    for number in (count, meant):
        memory = torch.full((7, 9, banks.WIDTH), outside, device=bank.device)
        memory[:, 2:7] = bank
        leaves = [one.detach().requires_grad_() for one in (prefix, x, *weights)]
        given = torch.tensor(number, device=bank.device)
        found = attn_res_bank(memory[:, 2:7], given, *leaves[:1], *leaves[2:], layer_output=leaves[1], append=append)
        gradients = torch.autograd.grad(found[:3], leaves, banks.upstream_of(found[:3]))
        assert memory[:, :2].isnan().all() and memory[:, 7:].isnan().all()
        results.append([memory[:, 2:7].detach(), *found[:3], *gradients])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_it_is_attn_res_of_the_blocks_and_the_prefix(device):
    bank, prefix, _, query, rms_weight, _ = banks.tensors(device, bank=torch.float32, prefix=torch.float32)
    found = attn_res_bank(bank, 3, prefix, query, rms_weight, return_weights=True)
    h, *_, alpha = attn_res([*bank[:, :3].unbind(1), prefix], query, rms_weight, return_weights=True)
    depth.near(found.output.cpu(), h.cpu().double())
    assert torch.allclose(found.weights, alpha, rtol=1e-5, atol=1e-6)
    counted = attn_res_bank(bank, torch.tensor([3], device=bank.device), prefix, query, rms_weight, return_weights=True)
    depth.near(counted.output.cpu(), found.output.cpu().double())
    assert torch.allclose(counted.weights[[0, 1, 2, 5]], found.weights, rtol=1e-5, atol=1e-6)
    assert not counted.weights[3:5].any()


@pytest.mark.parametrize("scale", [0.125, -2.0])
def test_scores_are_scaled(device, scale):
    banks.check(banks.tensors(device, bank=torch.float32, prefix=torch.float32), 3, scale=scale)


@pytest.mark.parametrize("what", ["bank", "prefix", "x", "weights"])
def test_frozen_arguments_get_no_gradient(device, what):
    given = banks.tensors(device, bank=torch.float32, prefix=torch.float32)
    names = ("bank", "prefix", "x", "weights", "weights", "weights")
    leaves = [one.requires_grad_(name != what) for one, name in zip(given, names, strict=True)]
    bank, prefix, x, *weights = leaves
    found = attn_res_bank(bank, 3, prefix, *weights, layer_output=x)
    upstream = banks.upstream_of(found[:3])
    torch.autograd.backward(found[:3], upstream)
    _, wanted = banks.exact(bank, 3, prefix, x, *weights, upstream)
    for leaf, other in zip(leaves, wanted, strict=True):
        assert (leaf.grad is None) == (not leaf.requires_grad)
        if leaf.grad is not None:
            depth.near((leaf.grad[:, :3] if leaf is bank else leaf.grad).cpu(), other, fp32=3e-4)


@pytest.mark.parametrize("result", [0, 1, 2])
def test_one_result_alone_may_be_differentiated(device, result):
    given = [one.requires_grad_() for one in banks.tensors(device, bank=torch.float32, prefix=torch.float32)]
    bank, prefix, x, *weights = given
    found = attn_res_bank(bank, 3, prefix, *weights, layer_output=x)[:3]
    upstream = [torch.zeros_like(one) if i != result else one for i, one in enumerate(banks.upstream_of(found))]
    gradients = torch.autograd.grad(found[result], given, upstream[result], allow_unused=True)
    _, wanted = banks.exact(bank, 3, prefix, x, *weights, upstream)
    for i, (one, other) in enumerate(zip(gradients, wanted, strict=True)):
        if one is None:
            assert not other.any()
        else:
            depth.near((one[:, :3] if i == 0 else one).cpu(), other, fp32=3e-4)


def test_gradcheck():
    torch.manual_seed(0)
    bank, prefix, x, *weights = (
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4, 5), (3, 5), (3, 5), 5, 5, 5)
    )

    def results(bank, prefix, x, *weights):
        return attn_res_bank(bank, 2, prefix, *weights, scale=0.7, layer_output=x)[:3]

    assert torch.autograd.gradcheck(results, (bank, prefix, x, *weights))


def test_activation_checkpointing(device):
    given = [one.requires_grad_() for one in banks.tensors(device, bank=torch.float32, prefix=torch.float32)]

    def layer(bank, prefix, x, *weights):
        found = attn_res_bank(bank, 3, prefix, *weights, layer_output=x)
        return found.normalized + found.prefix

    upstream = banks.upstream_of([given[1]])[0]
    plain = torch.autograd.grad(layer(*given), given, upstream)
    again = torch.utils.checkpoint.checkpoint(layer, *given, use_reentrant=False)
    for one, other in zip(torch.autograd.grad(again, given, upstream), plain, strict=True):
        assert torch.equal(one, other)
