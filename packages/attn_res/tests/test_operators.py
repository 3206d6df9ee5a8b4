"""Attention Residuals as PyTorch sees them: the questions of testing/operators, and what is this package's alone."""

import copy
from functools import partial

import depth
import pytest
import torch
from npu_attn_res import AttnRes, BlockAttnRes, attn_res, attn_res_bank, attn_res_keys, attn_res_merge, attn_res_phase1
from torch.utils.flop_counter import FlopCounterMode

from testing import ranks
from testing.operators import *  # noqa: F403
from testing.operators import Case, Input, only_at

OPS = torch.ops.npu_attn_res
SHARDED_AT = ranks.PLACES  # sharding_worker.py
WIDTH = 256
EPS = 1e-2
MODULE = AttnRes(8, rms_eps=EPS)
WEIGHTS = ((8,), (8,))


def normalise(x, weight, eps=EPS):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def formula(blocks, query, norm, scale=1.0):
    alpha = torch.softmax(scale * normalise(blocks, norm) @ query, 0)
    return (alpha.unsqueeze(-1) * blocks).sum(0)


def listed(blocks, *weights, **options):
    return attn_res(list(blocks.unbind()), *weights, rms_eps=EPS, **options)


def normalised(blocks, query, norm, weight):
    h = formula(blocks, query, norm, -0.7)
    return h, normalise(h, weight)


def phases(blocks, query, norm):
    o, lse = attn_res_phase1(torch.stack([query, 2 * query]), list(blocks[:-1].unbind()), norm, EPS)
    return attn_res_merge(o[0], lse[0], blocks[-1], query, norm, rms_eps=EPS).output


def two_layers(blocks, queries, norm):
    return attn_res_phase1(queries, blocks, norm, EPS, 0.6)


def phase1_formula(blocks, queries, norm):
    scores = 0.6 * torch.einsum("ntd,sd->nts", normalise(blocks, 1.0), norm * queries)
    return torch.einsum("nts,ntd->std", torch.softmax(scores, 0), blocks), torch.logsumexp(scores, 0).t()


def merged(o, lse, prefix, x, query, norm, weight):
    return attn_res_merge(o, lse, prefix, query, norm, weight, EPS, layer_output=x, output_rms_eps=1e-3)


def merged_alone(o, lse, prefix, query, norm, weight):
    return attn_res_merge(o, lse, prefix, query, norm, weight, EPS, output_rms_eps=1e-3)[:2]


def merged_formula(o, lse, prefix, x, query, norm, weight):
    joined = prefix + x
    score = normalise(joined, norm) @ query
    lse_all = torch.logaddexp(lse, score)
    h = torch.exp(lse - lse_all).unsqueeze(-1) * o + torch.exp(score - lse_all).unsqueeze(-1) * joined
    return h, normalise(h, weight, 1e-3), joined


def merged_alone_formula(o, lse, prefix, *weights):
    return merged_formula(o, lse, prefix, 0.0, *weights)[:2]


def banked(bank, prefix, x, query, norm, weight, n_blocks=2, **options):
    return attn_res_bank(bank, n_blocks, prefix, query, norm, weight, EPS, layer_output=x, **options)


def banked_formula(bank, prefix, x, query, norm, weight, n_blocks=2):
    joined = prefix + x
    h = formula(torch.stack([*bank[:, :n_blocks].unbind(1), joined]), query, norm)
    return h, normalise(h, weight), joined


def counted(bank, prefix, x, query, norm, weight, count):
    return banked(bank, prefix, x, query, norm, weight, count, return_weights=True)


def written(bank, prefix, x, query, norm, weight):
    """A bank and a prefix of its own, which are written to."""
    bank, prefix = bank.clone(), prefix.clone(memory_format=torch.contiguous_format)
    return banked(bank, prefix, x, query, norm, weight, append=True, in_place=True)[:3]


def keys_formula(bank, prefix, queries):
    keys = normalise(torch.cat([bank, prefix.unsqueeze(-2)], -2), 1.0, 1e-6)
    alpha = torch.softmax(torch.einsum("...nd,qd->q...n", keys, queries), -1)
    return torch.einsum("q...n,...nd->q...d", alpha, keys)


def module(blocks, query, norm):
    return torch.func.functional_call(MODULE, {"query": query, "rms_weight": norm}, (blocks,))


def stacked(n):
    return (2, n, 8), *WEIGHTS


def of_bank(n):
    return (n, 3, 8), (n, 8), (n, 8), *WEIGHTS, (8,)


def of_frozen_bank(n):
    return Input((n, 3, 8)), *of_bank(n)[1:]


def untrained_bank(n):
    return [Input(shape) for shape in of_bank(n)]


def of_state(n):
    return wide(n, 8), wide(n), (n, 8), (n, 8), *WEIGHTS, (8,)


def wide(*shape):
    return Input(shape, trained=True, dtype=torch.float32)


# Of what is written to: test_transforms.py has vmap.
WRITES = frozenset({"test_vmap_gives_what_each_call_does", "test_forward_mode_is_that_of_the_definition"})
# Compiled autograd cannot take None for the gradient of memory that was written to, and a trace has that write twice.
RECORDED_WRITES = WRITES | {"test_a_backward_is_compiled_by_itself", "test_a_trace_has_the_operator_and_its_gradient"}
STATELESS = frozenset({"test_a_trace_has_the_operator_and_its_gradient"})  # torch.func.functional_call is not traced
# Of results with statistics of blocks that do not count, which are memory without a value on a GPU.
COMPARED = frozenset({"test_operators_are_registered_properly"})
UNBINDS = frozenset({"test_a_tensor_that_is_not_dense_is_refused"})  # or clones, before the call
CASES = (
    Case("attn_res", partial(attn_res, rms_eps=EPS), stacked, formula, saved=(3, 6, 6, 8, 8, 48)),
    Case("a list", listed, lambda n: ((5, n, 8), *WEIGHTS), formula, without=UNBINDS),
    Case("one block", listed, lambda n: ((1, n, 8), *WEIGHTS), formula, option=True),
    Case("normalised", lambda *w: attn_res(*w, EPS, -0.7)[:2], lambda n: (*stacked(n), (8,)), normalised, option=True),
    Case("alpha", partial(listed, return_weights=True), stacked, option=True),
    Case("phase 1", two_layers, lambda n: ((2, n, 8), (2, 8), (8,)), phase1_formula),
    Case("phase 1, norms", two_layers, lambda n: ((2, n, 8), (2, 8), (2, 8)), phase1_formula, option=True),
    Case("merge", merged, of_state, merged_formula),
    Case("merge alone", merged_alone, lambda n: (*of_state(n)[:3], *WEIGHTS, (8,)), merged_alone_formula, option=True),
    Case("two phases", phases, lambda n: ((3, n, 8), *WEIGHTS), formula, option=True),
    Case("bank", banked, of_bank, banked_formula),
    Case("blocks counted on the device", counted, lambda n: (*of_bank(n), torch.tensor(2)), without=COMPARED),
    Case("no blocks", partial(banked, n_blocks=0), of_frozen_bank, partial(banked_formula, n_blocks=0), option=True),
    Case("written", written, of_frozen_bank, banked_formula, without=RECORDED_WRITES | UNBINDS),
    Case("written without gradients", written, untrained_bank, without=UNBINDS),
    Case("keys", attn_res_keys, lambda n: ((n, 3, 8), (n, 8), (2, 8)), keys_formula),
    Case("module", module, stacked, formula, without=STATELESS),
)


def _batches():
    cases = ((64, torch.bfloat16, 4, False), (100, torch.float32, 9, True), (1000, torch.float16, 4, False))
    for width, dtype, n_blocks, is_list in (*cases, (4096, torch.bfloat16, 9, True), (20000, torch.float32, 4, False)):
        inputs = lambda n, b=n_blocks, w=width: ((b, n, w), Input((w,), of=lambda q: q * len(q) ** -0.5), (w,), (w,))  # noqa: E731
        function = partial(listed if is_list else attn_res, return_weights=True)
        yield Case(f"{width}", function, inputs, dtype=dtype, tokens=67)


BATCHES = tuple(_batches())


def as_products(sources, queries, norm):
    """h of queries [Q, D] as products of matrices, which the counter counts."""
    alpha = torch.softmax(torch.einsum("ntd,qd->ntq", normalise(sources, norm), queries), 0)
    return torch.einsum("ntq,ntd->qtd", alpha, sources)


def joined(blocks, prefix):
    return torch.cat((blocks, prefix.unsqueeze(0)))


def in_phases(b, p, q, w):
    o, lse = attn_res_phase1(q, list(b), w)
    return torch.stack([attn_res_merge(o[i], lse[i], p, each, w).output for i, each in enumerate(q)])


# Of blocks b [3, 5, 8], a prefix p [5, 8], queries q [2, 8] and a weight w [8]. Of the last two the gradients are less.
PRODUCTS = {
    "attn_res": (lambda b, p, q, w: attn_res(b, q[0], w), lambda b, p, q, w: as_products(b, q[:1], w)),
    "a list": (lambda b, p, q, w: listed(b, q[0], w), lambda b, p, q, w: as_products(b, q[:1], w)),
    "bank": (
        lambda b, p, q, w: attn_res_bank(b.movedim(0, 1), 2, p, q[0], w).output,
        lambda b, p, q, w: as_products(joined(b[:2], p), q[:1], w),
    ),
    "written": (
        lambda b, p, q, w: attn_res_bank(b.movedim(0, 1).clone(), 2, p, q[0], w, append=True).output,
        lambda b, p, q, w: as_products(joined(b[:2], p), q[:1], w),
    ),
    "phases": (in_phases, lambda b, p, q, w: as_products(joined(b, p), q, w)),
    "keys": (
        lambda b, p, q, w: attn_res_keys(b.movedim(0, 1), p, q * w),
        lambda b, p, q, w: as_products(normalise(joined(b, p), 1.0), q, w),
    ),
    "frozen weights": (
        lambda b, p, q, w: attn_res(b, q[0].detach(), w.detach()),
        lambda b, p, q, w: as_products(b, q[:1].detach(), w.detach()),
    ),
    "frozen blocks": (
        lambda b, p, q, w: attn_res(list(b.detach()), q[0], w.detach()),
        lambda b, p, q, w: as_products(b.detach(), q[:1], w.detach()),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_are_those_of_products_of_matrices(name):
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 5, 8), (5, 8), (2, 8), (8,))
    given = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    counts = []
    for function in PRODUCTS[name]:
        with FlopCounterMode(display=False) as counter:
            function(*given).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


@pytest.mark.filterwarnings("ignore:.*batching rule")
def test_module_starts_at_the_mean(npu_place):
    module = AttnRes(WIDTH, rms_eps=1e-5, device=npu_place.torch, dtype=torch.bfloat16)
    assert sorted(module.state_dict()) == ["query", "rms_weight"]
    blocks = depth.make(3, 4, WIDTH, torch.bfloat16).blocks.to(npu_place.torch)
    assert torch.allclose(module(blocks).float(), blocks.float().mean(0), rtol=2**-8, atol=2**-8)
    assert torch.equal(module(list(blocks)), module(blocks))
    h, *_, alpha = module(blocks, return_weights=True)
    assert torch.allclose(alpha, torch.full_like(alpha, 1 / 3))
    assert copy.deepcopy(module).query.dtype == torch.bfloat16
    assert "256, rms_eps=1e-05" in repr(module)
    assert "n_inputs=3, block_size=2" in repr(BlockAttnRes(WIDTH, 3, 2))


@only_at("cuda", "npu")
def test_the_number_of_blocks_on_the_device_may_change_between_replays(npu_place, npu_capture, npu_no_waits):
    case = depth.make(4, 6, WIDTH, torch.float32)
    given = case.blocks.movedim(0, 1).contiguous(), case.dh, case.query, case.rms_weight
    bank, prefix, query, norm = (one.to(npu_place.torch) for one in given)
    count = torch.tensor(2, device=npu_place.torch)

    def step():
        found = attn_res_bank(bank, count, prefix, query, norm, layer_output=prefix, append=True, return_weights=True)
        return found.output, found.weights

    step()
    with npu_no_waits():
        step()
    captured, replay = npu_capture(step)
    for n_blocks in (3, 0):
        count.fill_(n_blocks)
        replay()
        kept = [one.clone() for one in captured]
        for replayed, eager in zip(kept, step(), strict=True):
            assert torch.equal(replayed, eager)


@only_at("cuda", "npu")
def test_graph_capture_of_many_blocks(npu_place, npu_capture):
    case = depth.make(40, 6, WIDTH, torch.float32)
    blocks, *weights = case.leaves(npu_place.torch, True)
    dh = case.dh.to(npu_place.torch)
    step = lambda: (lambda h: (h, *torch.autograd.grad(h, (*blocks, *weights), dh)))(attn_res(blocks, *weights))  # noqa: E731
    captured, replay = npu_capture(step)
    with torch.no_grad():
        blocks[0].copy_(dh)
    replay()
    for replayed, eager in zip(captured, step(), strict=True):
        assert torch.equal(replayed, eager)
