"""Attention over a bank of blocks and a prefix, wherever it runs, against fp64."""

import depth
import pytest
import torch
from npu_attn_res import attn_res, attn_res_bank

pytestmark = pytest.mark.usefixtures("npu_poisoned")
WIDTH = 256


def tensors(device, tokens=7, capacity=5, n_blocks=3, width=WIDTH, bank=torch.bfloat16, prefix=torch.bfloat16):
    """A bank whose slots behind its blocks are NaN, a prefix, a layer's output, query, rms_weight, output_rms_weight."""
    case = depth.make(capacity, tokens, width, bank)
    generator = torch.Generator().manual_seed(1)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    made = case.blocks.movedim(0, -2).contiguous()
    made[..., n_blocks:, :] = float("nan")
    rows = [randn(*case.dh.shape).to(prefix) for _ in range(2)]
    weights = [case.query.to(prefix), case.rms_weight.to(prefix), (1 + 0.3 * randn(width)).to(prefix)]
    return [tensor.to(device.torch) for tensor in (made, *rows, *weights)]


def exact(bank, n_blocks, prefix, x, query, rms_weight, output_rms_weight, upstream, scale=1.0, stored=None):
    """h, RMSNorm(h), and the gradients of all arguments, in fp64; `stored`: h and the prefix that are used, as rounded."""
    given = (bank[..., :n_blocks, :], prefix, x, query, rms_weight, output_rms_weight)
    leaves = [one.detach().cpu().double().requires_grad_() for one in given]
    blocks, prefix, x, query, rms_weight, output_rms_weight = leaves
    joined = prefix + x
    if stored is not None:
        joined = joined + (stored[1].detach().cpu().double() - joined).detach()
    h, _ = depth.formula(torch.stack([*blocks.unbind(-2), joined]), query * scale, rms_weight, 1e-6)
    rounded = h if stored is None else h + (stored[0].detach().cpu().double() - h).detach()
    y = rounded * torch.rsqrt(rounded.square().mean(-1, keepdim=True) + 1e-6) * output_rms_weight
    upstream = [one.cpu().double() for one in upstream]
    return [h.detach(), y.detach()], torch.autograd.grad((h, y, joined), leaves, upstream, materialize_grads=True)


def upstream_of(results):
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in results]
    return [one.to(results[0].device) for one in made]


def check(given, n_blocks, *, counted=False, scale=1.0, fp32=5e-4, **options):
    """Results and gradients of a call against fp64."""
    given = [one.detach().requires_grad_() for one in given]
    bank, prefix, x, *weights = given
    count = torch.tensor(n_blocks, device=bank.device) if counted else n_blocks
    found = attn_res_bank(bank, count, prefix, *weights, scale=scale, layer_output=x, **options)
    results = [found.output, found.normalized, found.prefix]
    upstream = upstream_of(results)
    gradients = torch.autograd.grad(results, given, upstream, materialize_grads=True)
    wanted, wanted_gradients = exact(bank, n_blocks, prefix, x, *weights, upstream, scale, (found.output, found.prefix))
    depth.near(found.output.detach().cpu(), wanted[0], fp32=fp32)
    depth.near(found.normalized.detach().cpu(), wanted[1], fp32=fp32)
    assert not gradients[0][..., n_blocks:, :].any()
    for one, other, of in zip((gradients[0][..., :n_blocks, :], *gradients[1:]), wanted_gradients, given, strict=True):
        assert one.dtype == of.dtype
        depth.near(one.cpu(), other, fp32=fp32)
    return found


@pytest.mark.parametrize("counted", [False, True], ids=["int", "on the device"])
@pytest.mark.parametrize("n_blocks", [0, 1, 3, 5])
def test_only_blocks_that_count_are_read(device, n_blocks, counted):
    check(tensors(device, n_blocks=n_blocks, bank=torch.float32, prefix=torch.float32), n_blocks, counted=counted)


@pytest.mark.parametrize(("width", "tokens"), [(123, 37), (1000, 1), (4096, 5), (7168, 3)])
def test_every_width(device, width, tokens):
    check(tensors(device, tokens, capacity=3, n_blocks=2, width=width), 2)


def test_rows_wider_than_the_chip(device):
    for counted in (False, True):
        check(tensors(device, 3, capacity=3, n_blocks=2, width=20000), 2, counted=counted)


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
    given = tensors(device, bank=bank, prefix=prefix, width=136)
    found = check(given, 3, output_dtype=output)
    assert found.output.dtype == found.normalized.dtype == (output or prefix)
    assert found.prefix.dtype == prefix


def test_a_layers_output_may_have_another_dtype_than_the_prefix(device):
    bank, prefix, x, *weights = tensors(device, prefix=torch.float32)
    check([bank, prefix, x.bfloat16(), *weights], 3)


@pytest.mark.parametrize("shape", [(2, 3), (), (0,), (0, 4)])
def test_any_leading_shape(device, shape):
    bank, prefix, x, *weights = tensors(device, shape, bank=torch.float32, prefix=torch.float32)
    if prefix.numel():
        check([bank, prefix, x, *weights], 3)
    found = attn_res_bank(bank, 3, prefix, *weights, layer_output=x, return_weights=True)
    assert found.output.shape == found.normalized.shape == found.prefix.shape == (*shape, WIDTH)
    assert found.weights.shape == (*shape, 4)


STRIDED = {
    "slice of a wider bank": lambda t: torch.cat([t, t], -1)[..., :WIDTH],
    "every second slot": lambda t: t.repeat_interleave(2, 1)[:, ::2] if t.dim() > 2 else t,
    "every second token": lambda t: torch.stack([t, t], 1).flatten(0, 1)[::2],
    "columns not side by side": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "slots outside": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 2 else t,
}


@pytest.mark.parametrize("view", STRIDED)
def test_any_strides(device, view):
    bank, prefix, x, *weights = tensors(device, bank=torch.float32, prefix=torch.float32)
    expected = attn_res_bank(bank, 3, prefix, *weights, layer_output=x)
    strided = [STRIDED[view](tensor) for tensor in (bank, prefix, x)]
    assert torch.equal(strided[0].nan_to_num(), bank.nan_to_num())
    found = attn_res_bank(strided[0], 3, strided[1], *weights, layer_output=strided[2])
    for one, other in zip(found[:3], expected[:3], strict=True):
        depth.near(one.cpu(), other.cpu().double())
    check([*strided, *weights], 3)


@pytest.mark.parametrize("n_blocks", [0, 1, 3])
def test_a_list_and_a_bank_are_the_same(device, n_blocks):
    bank, prefix, _, *weights = tensors(device)
    blocks = [block.contiguous() for block in bank[:, :n_blocks].unbind(1)]
    listed = attn_res_bank(blocks, None, prefix, *weights, return_weights=True)
    banked = attn_res_bank(bank, n_blocks, prefix, *weights, return_weights=True)
    for one, other in zip(listed, banked, strict=True):
        assert torch.equal(one, other)


def test_it_is_attn_res_of_the_blocks_and_the_prefix(device):
    bank, prefix, _, query, rms_weight, _ = tensors(device, bank=torch.float32, prefix=torch.float32)
    found = attn_res_bank(bank, 3, prefix, query, rms_weight, return_weights=True)
    h, *_, alpha = attn_res([*bank[:, :3].unbind(1), prefix], query, rms_weight, return_weights=True)
    depth.near(found.output.cpu(), h.cpu().double())
    assert torch.allclose(found.weights, alpha.t(), rtol=1e-5, atol=1e-6)
    counted = attn_res_bank(bank, torch.tensor([3], device=bank.device), prefix, query, rms_weight, return_weights=True)
    depth.near(counted.output.cpu(), found.output.cpu().double())
    assert torch.allclose(counted.weights[:, [0, 1, 2, 5]], found.weights, rtol=1e-5, atol=1e-6)
    assert not counted.weights[:, 3:5].any()


@pytest.mark.parametrize("scale", [0.125, -2.0])
def test_scores_are_scaled(device, scale):
    check(tensors(device, bank=torch.float32, prefix=torch.float32), 3, scale=scale)


@pytest.mark.parametrize("counted", [False, True], ids=["int", "on the device"])
@pytest.mark.parametrize("x", [False, True], ids=["alone", "with a layer's output"])
def test_the_prefix_becomes_a_block(device, counted, x):
    bank, prefix, output, *weights = tensors(device, bank=torch.float32)
    before, layer_output = bank.clone(), output if x else None
    n_blocks = torch.tensor(3, device=bank.device, dtype=torch.int32) if counted else 3
    found = attn_res_bank(bank, n_blocks, prefix, *weights, layer_output=layer_output, append=True)
    expected = attn_res_bank(before, 3, prefix, *weights, layer_output=layer_output)  # on a CPU, sums in another order
    depth.near(found.output.cpu(), expected.output.cpu().double())
    assert torch.equal(bank[:, 3], found.prefix.float())
    assert torch.equal(bank[:, :3], before[:, :3])
    assert bank[:, 4].isnan().all()


def test_nothing_is_written_where_a_bank_turns_out_to_be_full(device):
    bank, prefix, _, *weights = tensors(device, n_blocks=5)
    wide = torch.cat([bank, torch.zeros_like(bank)], 1)
    attn_res_bank(wide[:, :5], torch.tensor(5, device=bank.device), prefix, *weights, append=True)
    assert torch.equal(wide[:, :5], bank)
    assert not wide[:, 5:].any()


def test_the_prefix_is_updated_in_place(device):
    bank, prefix, x, *weights = tensors(device)
    wide = torch.cat([prefix, prefix], -1)
    given, before = wide[:, :WIDTH], prefix.clone()
    version = wide._version
    found = attn_res_bank(bank, 3, given, *weights, layer_output=x, in_place=True)
    expected = attn_res_bank(bank, 3, before, *weights, layer_output=x)
    assert found.prefix is given and torch.equal(given, expected.prefix)
    assert torch.equal(found.output, expected.output)
    assert torch.equal(wide[:, WIDTH:], before)
    assert wide._version > version


@pytest.mark.parametrize("counted", [False, True], ids=["int", "on the device"])
def test_gradients_of_layers_that_fill_one_bank(device, counted):
    """Each layer's blocks stay where they are while later ones are written behind them."""
    _, prefix, x, query, rms_weight, _ = tensors(device, 5, bank=torch.float32, prefix=torch.float32)
    leaves = [one.detach().requires_grad_() for one in (prefix, x, query, rms_weight)]
    upstream = upstream_of([prefix])[0]

    def number(i):
        return torch.tensor(i, device=prefix.device) if counted else i

    def banked(prefix, x, query, rms_weight):
        bank = torch.full((5, 3, WIDTH), float("nan"), device=prefix.device)
        first = attn_res_bank(bank, number(0), prefix, query, rms_weight, append=True)
        second = attn_res_bank(bank, number(1), first.output * x, query, rms_weight, layer_output=x)
        third = attn_res_bank(bank, number(1), second.prefix, query, rms_weight, layer_output=second.output, append=True)
        return attn_res_bank(bank, number(2), third.output + x, query, rms_weight).output

    def plain(prefix, x, query, rms_weight):
        mix = lambda *v: depth.formula(torch.stack(v), query, rms_weight, 1e-6)[0]  # noqa: E731
        first = mix(prefix)
        joined = first * x + x
        second = mix(prefix, joined)
        block = joined + second
        return mix(prefix, block, mix(prefix, block) + x)

    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    wanted = plain(*wide)
    found = banked(*leaves)
    depth.near(found.detach().cpu(), wanted.detach(), fp32=1e-4)
    gradients = torch.autograd.grad(wanted, wide, upstream.cpu().double())
    for one, other in zip(torch.autograd.grad(found, leaves, upstream), gradients, strict=True):
        depth.near(one.cpu(), other, fp32=1e-3)


@pytest.mark.parametrize("what", ["bank", "prefix", "x", "weights"])
def test_frozen_arguments_get_no_gradient(device, what):
    given = tensors(device, bank=torch.float32, prefix=torch.float32)
    names = ("bank", "prefix", "x", "weights", "weights", "weights")
    leaves = [one.requires_grad_(name != what) for one, name in zip(given, names, strict=True)]
    bank, prefix, x, *weights = leaves
    found = attn_res_bank(bank, 3, prefix, *weights, layer_output=x)
    upstream = upstream_of(found[:3])
    torch.autograd.backward(found[:3], upstream)
    _, wanted = exact(bank, 3, prefix, x, *weights, upstream)
    for leaf, other in zip(leaves, wanted, strict=True):
        assert (leaf.grad is None) == (not leaf.requires_grad)
        if leaf.grad is not None:
            depth.near((leaf.grad[:, :3] if leaf is bank else leaf.grad).cpu(), other, fp32=3e-4)


@pytest.mark.parametrize("result", [0, 1, 2])
def test_one_result_alone_may_be_differentiated(device, result):
    given = [one.requires_grad_() for one in tensors(device, bank=torch.float32, prefix=torch.float32)]
    bank, prefix, x, *weights = given
    found = attn_res_bank(bank, 3, prefix, *weights, layer_output=x)[:3]
    upstream = [torch.zeros_like(one) if i != result else one for i, one in enumerate(upstream_of(found))]
    gradients = torch.autograd.grad(found[result], given, upstream[result], allow_unused=True)
    _, wanted = exact(bank, 3, prefix, x, *weights, upstream)
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
    given = [one.requires_grad_() for one in tensors(device, bank=torch.float32, prefix=torch.float32)]

    def layer(bank, prefix, x, *weights):
        found = attn_res_bank(bank, 3, prefix, *weights, layer_output=x)
        return found.normalized + found.prefix

    upstream = upstream_of([given[1]])[0]
    plain = torch.autograd.grad(layer(*given), given, upstream)
    again = torch.utils.checkpoint.checkpoint(layer, *given, use_reentrant=False)
    for one, other in zip(torch.autograd.grad(again, given, upstream), plain, strict=True):
        assert torch.equal(one, other)


BAD = {
    "n_blocks is 6": (lambda a: a | {"n_blocks": 6}, ValueError),
    "n_blocks is -1": (lambda a: a | {"n_blocks": -1}, ValueError),
    "n_blocks is torch.float32": (lambda a: a | {"n_blocks": torch.tensor(3.0)}, TypeError),
    r"n_blocks has shape \(2,\)": (lambda a: a | {"n_blocks": torch.tensor([1, 2])}, ValueError),
    "bank has shape": (lambda a: a | {"bank": a["bank"][:3]}, ValueError),
    "bank is a int": (lambda a: a | {"bank": 3}, TypeError),
    r"bank\[1\] has shape": (lambda a: a | {"bank": [a["prefix"], a["prefix"][:3]], "n_blocks": None}, ValueError),
    "append is True .* full": (lambda a: a | {"n_blocks": 5, "append": True}, ValueError),
    "append is True .* list": (lambda a: a | {"bank": [], "n_blocks": None, "append": True}, ValueError),
    "in_place is True": (lambda a: a | {"query": a["query"].requires_grad_(), "in_place": True}, ValueError),
    "prefix has strides": (lambda a: a | {"prefix": a["prefix"].t().contiguous().t(), "in_place": True}, ValueError),
    "layer_output has shape": (lambda a: a | {"layer_output": a["prefix"][:3]}, ValueError),
    "query has shape": (lambda a: a | {"query": a["query"][:3]}, ValueError),
    "output_dtype is torch.int8": (lambda a: a | {"output_dtype": torch.int8}, TypeError),
    "scale is nan": (lambda a: a | {"scale": float("nan")}, ValueError),
    "rms_eps is -1": (lambda a: a | {"rms_eps": -1}, ValueError),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(device, message):
    bank, prefix, x, query, rms_weight, _ = tensors(device)
    given = {"bank": bank, "n_blocks": 3, "prefix": prefix, "query": query, "rms_weight": rms_weight, "layer_output": x}
    change, kind = BAD[message]
    with pytest.raises(kind, match=message):
        attn_res_bank(**change(given))


@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
def test_a_block_may_score_much_higher_than_the_prefix(device, in_place):
    """Kernels for Ascend then compute some tiles twice, from a prefix that has the layer's output already."""
    bank, prefix, x, query, rms_weight, weight = tensors(device, 90, bank=torch.float32, prefix=torch.float32)
    direction = query * rms_weight
    bank[5, 1] = direction / direction.norm() * WIDTH**0.5
    query = query * (200 / (direction.norm() * WIDTH**0.5))
    h, y = exact(bank, 3, prefix, x, query, rms_weight, weight, upstream_of([prefix] * 3))[0]
    given = prefix.clone()
    found = attn_res_bank(bank, 3, given, query, rms_weight, weight, layer_output=x, in_place=in_place)
    assert torch.equal(found.prefix, prefix + x)
    depth.near(found.output.cpu(), h, fp32=2e-3)
    depth.near(found.normalized.cpu(), y, fp32=2e-3)
