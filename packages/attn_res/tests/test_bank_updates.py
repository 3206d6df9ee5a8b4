"""A bank and a prefix that a call writes to: what is appended, what is added in place, and their gradients."""

import functools
from itertools import product

import banks
import depth
import pytest
import torch
from npu_attn_res import attn_res_bank
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("npu_poisoned")


@pytest.mark.few(2)
@pytest.mark.parametrize("counted", [False, True], ids=["int", "on the device"])
@pytest.mark.parametrize("x", [False, True], ids=["alone", "with a layer's output"])
def test_the_prefix_becomes_a_block(device, counted, x):
    bank, prefix, output, *weights = banks.tensors(device, bank=torch.float32)
    before, layer_output = bank.clone(), output if x else None
    n_blocks = torch.tensor(3, device=bank.device, dtype=torch.int32) if counted else 3
    found = attn_res_bank(bank, n_blocks, prefix, *weights, layer_output=layer_output, append=True)
    expected = attn_res_bank(before, 3, prefix, *weights, layer_output=layer_output)  # on a CPU, sums in another order
    depth.near(found.output.cpu(), expected.output.cpu().double())
    assert torch.equal(bank[:, 3], found.prefix.float())
    assert torch.equal(bank[:, :3], before[:, :3])
    assert bank[:, 4].isnan().all()


def test_nothing_is_written_where_a_bank_turns_out_to_be_full(device):
    bank, prefix, _, *weights = banks.tensors(device, n_blocks=5)
    wide = torch.cat([bank, torch.zeros_like(bank)], 1)
    attn_res_bank(wide[:, :5], torch.tensor(5, device=bank.device), prefix, *weights, append=True)
    assert torch.equal(wide[:, :5], bank)
    assert not wide[:, 5:].any()


def test_the_prefix_is_updated_in_place(device):
    bank, prefix, x, *weights = banks.tensors(device)
    wide = torch.cat([prefix, prefix], -1)
    given, before = wide[:, : banks.WIDTH], prefix.clone()
    version = wide._version
    found = attn_res_bank(bank, 3, given, *weights, layer_output=x, in_place=True)
    expected = attn_res_bank(bank, 3, before, *weights, layer_output=x)
    assert found.prefix is given and torch.equal(given, expected.prefix)
    assert torch.equal(found.output, expected.output)
    assert torch.equal(wide[:, banks.WIDTH :], before)
    assert wide._version > version


def test_blocks_that_do_not_count_may_require_gradients_beside_a_prefix_that_is_updated(device):
    bank, prefix, x, *weights = banks.tensors(device, bank=torch.float32)
    expected = attn_res_bank([], 0, prefix, *weights, layer_output=x)
    blocks = [block.contiguous().requires_grad_() for block in bank[:, :3].unbind(1)]
    found = attn_res_bank(blocks, 0, prefix, *weights, layer_output=x, in_place=True)
    assert found.prefix is prefix and torch.equal(prefix, expected.prefix)
    assert torch.equal(found.output, expected.output) and not found.output.requires_grad


@pytest.mark.few(1)
@pytest.mark.parametrize("counted", [False, True], ids=["int", "on the device"])
def test_gradients_of_layers_that_fill_one_bank(device, counted):
    """Each layer's blocks stay where they are while later ones are written behind them."""
    _, prefix, x, query, rms_weight, _ = banks.tensors(device, 5, bank=torch.float32, prefix=torch.float32)
    leaves = [one.detach().requires_grad_() for one in (prefix, x, query, rms_weight)]
    upstream = banks.upstream_of([prefix])[0]

    def number(i):
        return torch.tensor(i, device=prefix.device) if counted else i

    def banked(prefix, x, query, rms_weight):
        bank = torch.full((5, 3, banks.WIDTH), float("nan"), device=prefix.device)
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


@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
def test_a_block_may_score_much_higher_than_the_prefix(device, in_place):
    """Kernels for Ascend then compute some tiles twice, from a prefix that has the layer's output already."""
    bank, prefix, x, query, rms_weight, weight = banks.tensors(device, 90, bank=torch.float32, prefix=torch.float32)
    direction = query * rms_weight
    bank[5, 1] = direction / direction.norm() * banks.WIDTH**0.5
    query = query * (200 / (direction.norm() * banks.WIDTH**0.5))
    h, y = banks.exact(bank, 3, prefix, x, query, rms_weight, weight, banks.upstream_of([prefix] * 3))[0]
    given = prefix.clone()
    found = attn_res_bank(bank, 3, given, query, rms_weight, weight, layer_output=x, in_place=in_place)
    assert torch.equal(found.prefix, prefix + x)
    depth.near(found.output.cpu(), h, fp32=2e-3)
    depth.near(found.normalized.cpu(), y, fp32=2e-3)


def leaves_of(device, dtype=torch.float32, **options):
    return [one.requires_grad_() for one in banks.tensors(device, bank=dtype, prefix=dtype, **options)]


@pytest.mark.parametrize("counted", [False, True], ids=["int", "on the device"])
@pytest.mark.parametrize("layout", ["own", "views"])
def test_writes_are_differentiated_as_copies_are(device, counted, layout):
    """A bank and a prefix that were made by other operations, and what reads them after they were written to."""
    leaves, results = leaves_of(device), []
    leaves[0].data.nan_to_num_()
    n_blocks = torch.tensor(3, device=leaves[0].device) if counted else 3
    for in_place in (True, False):
        bank, prefix, x, *weights = leaves
        bank, prefix = bank * 2, prefix + 1
        if layout == "views":
            bank = torch.cat([bank, bank], 1)[:, :5]
            prefix = torch.stack([prefix, prefix])[1]
        if in_place:
            given = prefix
            found = attn_res_bank(bank, n_blocks, prefix, *weights, layer_output=x, append=True, in_place=True)
            assert found.prefix is given and not found.prefix.is_leaf
        else:
            found = attn_res_bank(bank, n_blocks, prefix, *weights, layer_output=x)
            bank = torch.cat([bank[:, :3], found.prefix.unsqueeze(1), bank[:, 4:]], 1)
        last = attn_res_bank(bank, 4, found.output, *weights, layer_output=found.prefix)
        made = [*found[:3], *last[:3], bank]
        gradients = torch.autograd.grad(made, leaves, banks.upstream_of(made))
        results.append([*made, *gradients])
    for one, other in zip(*results, strict=True):
        depth.near(one.detach().cpu(), other.detach().cpu().double())


@pytest.mark.parametrize("counted", [False, True], ids=["int", "on the device"])
def test_gradcheck_of_writes(counted):
    torch.manual_seed(0)
    given = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 4, 5), (3, 5), (3, 5), 5, 5, 5)]

    def results(bank, prefix, x, *weights):
        bank, prefix, count = bank * 1, prefix * 1, torch.tensor(2) if counted else 2
        found = attn_res_bank(bank, count, prefix, *weights, layer_output=x, append=True, in_place=True)
        return found.output, found.normalized, prefix, bank

    assert torch.autograd.gradcheck(results, given)


def test_a_full_bank_is_not_differentiated_where_nothing_was_written(device):
    bank, prefix, x, *weights = leaves = leaves_of(device, n_blocks=5)
    written = bank * 1
    count = torch.tensor([5], device=bank.device)
    found = attn_res_bank(written, count, prefix, *weights, layer_output=x, append=True)
    assert torch.equal(written, bank)
    made = [written, found.prefix]
    upstream = banks.upstream_of(made)
    gradients = torch.autograd.grad(made, leaves, upstream, allow_unused=True)
    for one, other in zip(gradients[:3], (upstream[0], upstream[1], upstream[1]), strict=True):
        assert torch.equal(one, other)


def test_a_prefix_that_a_backward_needs_must_stay(device):
    bank, prefix, x, *weights = leaves_of(device)
    running = prefix + 1
    first = attn_res_bank(bank, 3, running, *weights, layer_output=x, in_place=True)
    second = attn_res_bank(bank, 3, running, *weights, layer_output=x, in_place=True)
    second.output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="prefix was written to again after in_place=True and must keep its values"):
        first.output.sum().backward()


CHANGES = ["a block", "all", "a view"]


APPENDS = {"an earlier append": (slice(None), slice(None), 1), "of other rows": (slice(1, None), slice(None), 1)}
APPENDS["of later blocks"] = (slice(None), slice(1, None), 0)


@pytest.mark.parametrize(
    ("changed", "counted"),
    [*product(CHANGES, [False, True]), *product(APPENDS, [False])],
    ids=lambda value: f"{value}",
)
def test_blocks_that_a_backward_needs_must_stay(device, changed, counted):
    """As any tensor that autograd keeps, though appends behind them are no error. `counted`: n_blocks is on the device."""
    bank, prefix, x, *weights = leaves_of(device)
    memory = bank.detach().nan_to_num()
    two, three = (torch.tensor(n, device=bank.device) if counted else n for n in (2, 3))
    first = attn_res_bank(memory, two, prefix, *weights, layer_output=x, append=True)
    second = attn_res_bank(memory, three, first.prefix, *weights, append=True)
    second.output.sum().backward(retain_graph=True)
    first.output.sum().backward(retain_graph=True)
    with torch.no_grad():
        if changed in APPENDS:
            rows, blocks, n_blocks = APPENDS[changed]
            attn_res_bank(memory[rows, blocks], n_blocks, prefix[rows], *weights, append=True)
        else:
            {"a block": memory[:, 0], "all": memory, "a view": memory.view(-1)[:1]}[changed].add_(1)
    for found in (second, first):
        with pytest.raises(RuntimeError, match="modified by an inplace operation: a bank"):
            found.output.sum().backward(retain_graph=True)


def test_banks_in_one_memory_are_appended_to_apart(device):
    """Autograd counts the writes to all of them together."""
    bank, prefix, _, *weights = leaves_of(device)
    both = torch.stack([bank.detach().nan_to_num()] * 2)
    found = attn_res_bank(both[0], 3, prefix, *weights)
    attn_res_bank(both[1], 0, prefix, *weights, append=True)
    of_rows = attn_res_bank(both[1, 1:], 2, prefix[1:], *weights)
    attn_res_bank(both[1, :1], 1, prefix[:1], *weights, append=True)
    (found.output.sum() + of_rows.output.sum()).backward()


def test_checkpointed_layers_may_append_to_a_bank_that_is_no_argument(device):
    """PyTorch keeps a checkpoint's arguments and refuses those that were written to since."""
    bank, prefix, x, *weights = leaves_of(device)
    results = []
    for around in (lambda layer, *given: layer(*given), functools.partial(checkpoint, use_reentrant=False)):
        memory = torch.zeros_like(bank)

        def layer(i, prefix, x, memory=memory):
            found = attn_res_bank(memory, i, prefix, *weights, layer_output=x, append=True)
            return found.normalized, found.prefix

        normalized, running = around(layer, 0, prefix, x)
        normalized, running = around(layer, 1, torch.tanh(normalized), running)
        normalized, running = around(layer, 2, torch.tanh(normalized), running)
        made = [normalized, running]
        results.append(torch.autograd.grad(made, [prefix, x, *weights], banks.upstream_of(made)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
