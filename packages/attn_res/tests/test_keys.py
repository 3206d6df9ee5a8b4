"""Attention whose values are its keys, wherever it runs, against fp64."""

import math
from types import SimpleNamespace

import npu_offline
import pytest
import torch
from depth import assert_close
from npu_attn_res import attn_res_keys
from npu_offline.toolchain.compilation import front_end_of

pytestmark = pytest.mark.usefixtures("npu_poisoned")
EPS = 1e-6


def tensors(
    device, n_blocks, queries, leading=(2, 5), width=64, *, bank=torch.float32, prefix=torch.float32, query=torch.float32
):
    """A bank, a prefix (None: there is none) and queries, whose scores are of about one."""
    generator = torch.Generator().manual_seed(n_blocks)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    scale = torch.rand(*leading, n_blocks + 1, 1, generator=generator) * 3 + 0.1
    v = randn(*leading, n_blocks + 1, width) * scale
    made = [
        v[..., :n_blocks, :].to(bank),
        None if prefix is None else v[..., n_blocks, :].to(prefix),
        randn(*queries, width).to(query),
    ]
    return [None if each is None else each.to(device.torch).requires_grad_() for each in made]


def formula(bank, prefix, query, scale, eps=EPS):
    """h [Q, ..., D], and alpha [Q, ..., N]."""
    v = bank if prefix is None else torch.cat([bank, prefix.unsqueeze(-2)], -2)
    n = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    alpha = torch.softmax(torch.einsum("qd,...nd->q...n", query.reshape(-1, v.shape[-1]) * scale, n), -1)
    h = torch.einsum("q...n,...nd->q...d", alpha, n)
    return (h if query.dim() > 1 else h[0]), alpha


def check(given, scale=None, output_dtype=None, eps=EPS):
    """Results and gradients within what fp32 sums and one rounding of each result allow."""
    width = given[0].shape[-1]
    scale = width**-0.5 if scale is None else scale
    h = attn_res_keys(*given, eps, scale, output_dtype=output_dtype)
    dh = torch.randn(h.shape, generator=torch.Generator().manual_seed(1)).to(h.device, h.dtype)
    leaves = [each for each in given if each is not None and each.requires_grad]
    gradients = torch.autograd.grad(h, leaves, dh)
    exact = [None if each is None else each.detach().cpu().double().requires_grad_(each.requires_grad) for each in given]
    expected, _ = formula(*exact, scale, eps)
    expected_gradients = torch.autograd.grad(
        expected, [each for each in exact if each is not None and each.requires_grad], dh.cpu().double()
    )
    v = exact[0].detach() if given[1] is None else torch.cat([exact[0], exact[1].unsqueeze(-2)], -2).detach()
    rstd = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    g = exact[2].detach().reshape(-1, width) * scale
    # Sums of products: a score, e and delta; a normalised row has elements of about one.
    score = g.norm(dim=-1).max()
    e = dh.double().cpu().reshape(-1, width).norm(dim=-1).max() * 3
    size = dh.abs().max().item() + 2 * e * g.abs().max()
    sizes = {"h": torch.ones(()) * 4, "sources": rstd * (size + 2 * e * (1 + score) / math.sqrt(width)) * 4}
    assert_close(h.detach().cpu(), expected.detach(), length=width, scale=sizes["h"], amplified=score)
    for leaf, found, want in zip(leaves, gradients, expected_gradients, strict=True):
        assert found.dtype == leaf.dtype and found.shape == leaf.shape
        if not found.numel():
            continue
        if leaf is given[0]:
            of = sizes["sources"][..., : leaf.shape[-2], :]
        elif leaf is given[1]:
            of = sizes["sources"][..., -1, :]
        else:
            of = 2 * e * scale * math.sqrt(v[..., 0].numel()) * torch.ones(())
        assert_close(found.detach().cpu(), want, length=width, scale=of, amplified=2 * score)
    return h


@pytest.mark.few(6)
@pytest.mark.parametrize("queries", [(), (1,), (3,), (4,)], ids=str)
@pytest.mark.parametrize("n_blocks", [0, 1, 3, 8])
def test_each_number_of_queries_over_each_number_of_blocks(device, n_blocks, queries):
    h = check(tensors(device, n_blocks, queries))
    assert h.shape == (*queries, 2, 5, 64)


@pytest.mark.parametrize("queries", [(), (3,)], ids=str)
def test_blocks_alone(device, queries):
    check(tensors(device, 3, queries, prefix=None))


@pytest.mark.few(2)
@pytest.mark.parametrize(("width", "tokens"), [(1, 3), (123, 37), (1000, 1), (4608, 5)])
@pytest.mark.parametrize("queries", [(), (3,)], ids=str)
def test_every_width(device, width, tokens, queries):
    check(tensors(device, 2, queries, (tokens,), width))


@pytest.mark.uncollected("asked of CUDA's kernels alone", lambda place: place != "cuda")
@pytest.mark.parametrize(("n_blocks", "queries", "width"), [(8, 3, 4608), (8, 1, 2500), (33, 2, 700), (3, 4, 96)])
def test_a_program_that_takes_many_tokens_sums_all_of_them(device, n_blocks, queries, width):
    check(tensors(device, n_blocks, (queries,), (5000,), width, bank=torch.bfloat16))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("bank", "prefix", "query", "output"),
    [
        (torch.bfloat16, torch.float32, torch.float32, torch.float32),  # before the MLPs of a model in bf16
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.float32, None),
        (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_every_tensor_may_have_its_own_dtype(device, bank, prefix, query, output):
    given = tensors(device, 3, (3,), width=136, bank=bank, prefix=prefix, query=query)
    assert check(given, output_dtype=output).dtype == (output or prefix)


@pytest.mark.parametrize("shape", [(2, 3), (), (0,), (0, 4), (1, 1)], ids=str)
def test_any_leading_shape(device, shape):
    given = tensors(device, 2, (3,), shape)
    if given[1].numel():
        check(given)
        return
    h = attn_res_keys(*given)
    assert h.shape == (3, *shape, 64)
    h.sum().backward()
    assert not given[2].grad.any()


def test_part_of_a_bank_is_read_where_it_lies(device):
    """As transformers' looped model takes blocks of an earlier pass; and blocks that lie behind one another."""
    memory = torch.randn(2, 5, 6, 64, generator=torch.Generator().manual_seed(0)).to(device.torch)
    _, prefix, query = tensors(device, 2, (3,))
    for bank in (memory[..., 2:4, :], memory.permute(2, 0, 1, 3)[:2].movedim(0, -2), memory.transpose(0, 1)[:2, :, :3]):
        leading = bank.shape[:-2]
        check([bank.detach().requires_grad_(), torch.ones(*leading, 64, device=device.torch, requires_grad=True), query])


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2)], ids=str)
def test_what_needs_no_gradient_gets_none(device, frozen):
    given = tensors(device, 3, (3,))
    for i in frozen:
        given[i].requires_grad_(False)
    check(given)
    assert all(given[i].grad is None for i in frozen)


def test_more_blocks_than_kernels_take(device):
    check(tensors(device, 70, (3,), (2,)))


def test_a_row_of_zeros_is_a_source_too(device):
    given = tensors(device, 2, ())
    with torch.no_grad():
        given[0][0, 1, 0] = 0
    check(given)
    h = attn_res_keys(*given, 0.0)
    others = torch.ones(2, 5, dtype=torch.bool)
    others[0, 1] = False  # 0 / 0
    assert h.isfinite().all(-1).cpu()[others].all()


def test_scores_in_the_hundreds(device):
    bank, prefix, query = tensors(device, 3, (3,), width=256)
    h, alpha = formula(*[each.detach().cpu().double() for each in (bank, prefix, query)], 30.0)
    assert alpha.amax(-1).median() > 0.99
    assert torch.allclose(attn_res_keys(bank, prefix, query, EPS, 30.0).detach().cpu().double(), h, rtol=1e-3, atol=1e-3)


def test_compiles_in_one_graph(device):
    given = tensors(device, 3, (3,))
    compiled = torch.compile(lambda *each: attn_res_keys(*each, scale=0.125), backend="aot_eager", fullgraph=True)
    found, expected = (call(*given).square().sum() for call in (compiled, lambda *each: attn_res_keys(*each, scale=0.125)))
    assert torch.equal(found, expected)
    for one, other in zip(torch.autograd.grad(found, given), torch.autograd.grad(expected, given), strict=True):
        assert torch.equal(one, other)


def test_the_operator_says_what_it_returns(device, npu_opcheck):
    given = [each.detach() for each in tensors(device, 3, (3,))]
    npu_opcheck(torch.ops.npu_attn_res.keys, (*given, EPS, torch.float32, True))


@pytest.mark.parametrize("change", [{}, {"tokens": 3}], ids=["again", "fewer tokens"])
def test_a_token_has_the_same_bits_whatever_the_others(device, change):
    given = tensors(device, 3, (), (40,), bank=torch.bfloat16, prefix=torch.bfloat16)
    whole = attn_res_keys(*given)
    part = attn_res_keys(given[0][: change.get("tokens")], given[1][: change.get("tokens")], given[2])
    assert torch.equal(part, whole[: len(part)])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bank": torch.ones(64)}, ValueError, "bank has shape"),
        ({"bank": torch.ones(2, 5, 0, 64), "prefix": None}, ValueError, "N at least 1"),
        ({"query": torch.ones(3, 32)}, ValueError, "query has shape"),
        ({"query": torch.ones(2, 3, 64)}, ValueError, "query has shape"),
        ({"prefix": torch.ones(2, 4, 64)}, ValueError, "prefix has shape"),
        ({"rms_eps": -1.0}, ValueError, "rms_eps"),
        ({"scale": "large"}, TypeError, "scale"),
        ({"output_dtype": torch.int32}, TypeError, "output_dtype"),
        ({"prefix": [1.0]}, TypeError, "prefix"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(change, error, message):
    given = {"bank": torch.ones(2, 5, 3, 64), "prefix": torch.ones(2, 5, 64), "query": torch.ones(64), **change}
    with pytest.raises(error, match=message):
        attn_res_keys(**given)


def launched(soc, n_blocks, queries, tokens=64, width=4608):
    with npu_offline.record(soc) as records:
        given = [
            torch.empty(tokens, n_blocks, width, dtype=torch.bfloat16, requires_grad=True),
            torch.empty(tokens, width, requires_grad=True),
            torch.empty(queries, width, requires_grad=True),
        ]
        h = attn_res_keys(*given, output_dtype=torch.float32)
        h.backward(torch.empty_like(h))
    return records


REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
compilers = pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON)


@pytest.mark.compilers
@compilers
@pytest.mark.parametrize("queries", [1, 3])
def test_one_launch_reads_the_sources_for_all_queries(queries):
    names = [record.name for record in launched("Ascend910B4", 4, queries)]
    assert names == ["attn_res_keys_kernel", "attn_res_keys_backward_kernel", "sum_partials_kernel"]


@pytest.mark.compilers
@compilers
@pytest.mark.parametrize("queries", [1, 3])
def test_sources_and_gradients_come_from_memory_once(queries):
    """Distinct bytes are near the least. A second sweep over a token's rows finds them in the cache."""
    tokens, n_blocks, width = 24, 4, 256
    place = SimpleNamespace(torch=torch.device("cpu"))
    given = tensors(place, n_blocks, (queries,), (tokens,), width, bank=torch.bfloat16)
    with npu_offline.emulate("Ascend910B4", ledgers=True) as emulation:
        h = attn_res_keys(*given, output_dtype=torch.float32)
        h.backward(torch.ones_like(h))
    forward, backward, added = emulation.launches
    row = tokens * width
    sources, rows = (2 * n_blocks + 4) * row, 4 * queries * row
    once = [sum(each.useful_read + each.useful_written for each in one.ledgers.values()) for one in (forward, backward)]
    through = [sum(each.read + each.written for each in one.arguments.values()) for one in (forward, backward)]
    statistics, weights = 8 * queries * (n_blocks + 1) * tokens, 4 * queries * width
    partials = weights * tokens // 8
    assert once == [sources + rows + statistics + weights, 2 * sources + rows + statistics + weights + partials]
    again = tokens * weights  # the queries, for each token
    assert through[0] == once[0] + sources + again - weights
    assert through[1] == once[1] + sources + rows + again - weights
    assert added.arguments["p_partials"].read == partials


@pytest.mark.compilers
@compilers
def test_more_queries_are_little_more_code():
    """A backward takes them in turns: a compiler took over 15 minutes for the gradients of three, code in a row."""
    of_two, of_eight = (front_end_of(launched("Ascend910B4", 4, each)[1])[1].count("\n") for each in (2, 8))
    assert of_eight <= 1.5 * of_two


@pytest.mark.compilers
@compilers
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
@pytest.mark.parametrize("soc", ["Ascend910B4", "Ascend950PR_957b"])
@pytest.mark.parametrize(
    ("n_blocks", "queries"),
    [(1, 4), (8, 3), *(pytest.param(*each, marks=pytest.mark.nightly) for each in ((1, 1), (8, 1), (12, 4), (2, 8)))],
)
@pytest.mark.uncollected(
    "the toolchain has no such target", lambda soc, toolchain: not npu_offline.supported(soc, toolchain)
)
def test_tiles_fit_and_are_double_buffered(n_blocks, queries, soc, toolchain):
    for record in launched(soc, n_blocks, queries):
        report = npu_offline.compile_kernel(record, soc=soc, toolchain=toolchain)
        assert report.fits, report.message
        assert report.double_buffered is not False
