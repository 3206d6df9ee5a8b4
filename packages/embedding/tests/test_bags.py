"""Several ids a result, against their definition in fp64 and PyTorch's own functions."""

import pytest
import torch
from bags import OFFSETS, compare
from lookup import ROWS, leaf, small_table
from npu_embedding import EmbeddingBag, embedding, embedding_bag
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = pytest.mark.usefixtures("npu_poisoned")
OPS = torch.ops.npu_embedding


@pytest.mark.parametrize(
    ("width", "dtype", "options", "weighted"),
    [
        (64, torch.bfloat16, {"mode": "mean"}, False),
        (123, torch.float32, {"mode": "mean", "padding_idx": 1}, False),
        (64, torch.float16, {"mode": "sum"}, True),
        (123, torch.float32, {"mode": "sum", "padding_idx": -ROWS}, True),
        (16411, torch.float32, {"mode": "sum"}, True),
    ],
)
def test_call_forms_of_embedding_bag(device, width, dtype, options, weighted):
    """Bags of equal length, and between offsets, with or without the last one; 32-bit indices and offsets too."""
    indices, weight, samples = small_table(60, width, dtype)
    samples = samples if weighted else None
    compare(device, indices, weight, samples, torch.arange(60) // 5, (3, 4, 5), **options)
    ends = torch.tensor(OFFSETS[:-1])
    bags = torch.searchsorted(ends, torch.arange(60), right=True) - 1
    if width != 16411:
        compare(device, indices, weight, samples, bags, offsets=ends, **options)
    ends = torch.tensor([*OFFSETS[:-1], 60], dtype=torch.int32)
    compare(device, indices.int(), weight, samples, bags, offsets=ends, include_last_offset=True, **options)


def test_positions_after_the_last_bag_count_nowhere(device):
    indices, weight, samples = (each.to(device.torch) for each in small_table(10, 64))
    table, weights = leaf(weight, device.torch), leaf(samples, device.torch)
    ends = torch.tensor([0, 4, 7], device=device.torch)
    out = embedding_bag(indices, table, ends, mode="sum", per_sample_weights=weights, include_last_offset=True)
    got = torch.autograd.grad(out.sum(), (table, weights))
    short = embedding_bag(indices[:7], table, ends[:2], mode="sum", per_sample_weights=weights[:7])
    assert torch.equal(out, short)
    for actual, gradient in zip(got, torch.autograd.grad(short.sum(), (table, weights)), strict=True):
        assert torch.equal(actual, gradient)


def test_positions_before_the_first_bag_count_nowhere(device):
    indices, weight, samples = (each.to(device.torch) for each in small_table(10, 64))
    table, weights = leaf(weight, device.torch), leaf(samples, device.torch)
    run = lambda offsets: embedding_bag(indices, table, offsets.to(device.torch), mode="sum", per_sample_weights=weights)  # noqa: E731
    if device.name == "cpu":
        with pytest.raises(ValueError, match="offsets must begin with 0"):
            run(torch.tensor([3, 7]))
        return
    out, whole = run(torch.tensor([3, 7])), run(torch.tensor([0, 3, 7]))
    assert torch.equal(out, whole[1:])
    found, right = (torch.autograd.grad(each.sum(), (table, weights)) for each in (out, whole[1:]))
    for actual, gradient in zip(found, right, strict=True):
        assert torch.equal(actual, gradient)


def test_ids_that_are_left_out_bring_nothing(device):
    """Neither their weight, nor the scale of any row, whatever they are."""
    weight, samples = small_table(1, 64)[1].to(device.torch), torch.tensor([[1.0, torch.inf], [torch.nan, 2.0]])
    weight, samples = weight.requires_grad_(), samples.to(device.torch).requires_grad_()
    ids = torch.tensor([[1, 3], [3, 2]], device=device.torch)
    out = embedding_bag(ids, weight, mode="sum", per_sample_weights=samples, padding_idx=3)
    assert torch.equal(out, torch.stack((weight[1], 2 * weight[2])))
    dweight, dsamples = torch.autograd.grad(out.sum(), (weight, samples))
    assert dweight.sum(1).tolist() == [0, 64, 128] + [0] * (ROWS - 3)
    assert dsamples[0, 1] == dsamples[1, 0] == 0
    scales = torch.ones(ROWS, device=device.torch)
    scales[0] = scales[3] = torch.inf
    rows = torch.ones(ROWS, 64, dtype=torch.int8, device=device.torch)
    assert embedding_bag(ids, rows, mode="sum", row_scales=scales, padding_idx=3).eq(1).all()


def test_the_mean_of_a_bag_depends_on_no_other_bag(device):
    indices = torch.arange(96).view(32, 3) % (ROWS - 1)
    weight = small_table(1, 64)[1].to(device.torch)
    others = indices.clone()
    others[0, 0] = ROWS - 1  # its bag has one id less
    out, beside = (embedding_bag(each.to(device.torch), weight, padding_idx=ROWS - 1) for each in (indices, others))
    assert torch.equal(out[1:], beside[1:])


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("sum", {"sparse": True}),
        ("sum", {"max_norm": 1.0}),
        ("mean", {"scale_grad_by_freq": True}),
        ("concat", {}),
    ],
)
def test_packed_tables(device, mode, options):
    """Tables one after the other, of which each id of a bag has one."""
    ids = torch.randint(0, 10, (7, 3), generator=torch.Generator().manual_seed(0))
    firsts = torch.tensor([0, 12, 30])
    weight = small_table(1, 32)[1]
    ours, theirs = leaf(weight, device.torch), leaf(weight, "cpu")
    out = embedding_bag(
        ids.to(device.torch), ours, table_offsets=firsts.to(device.torch), mode=mode, padding_idx=13, **options
    )
    if mode == "concat":
        exact = torch.nn.functional.embedding(ids + firsts, theirs, 13, **options).flatten(1)
    elif "scale_grad_by_freq" in options:  # PyTorch's embedding_bag divides rows by the counts of others
        kept = (ids + firsts != 13).unsqueeze(-1)
        exact = (torch.nn.functional.embedding(ids + firsts, theirs, 13, **options) * kept).sum(1)
        exact = exact / kept.sum(1) if mode == "mean" else exact
    else:
        exact = torch.nn.functional.embedding_bag(ids + firsts, theirs, mode=mode, padding_idx=13, **options)
    assert torch.allclose(out.cpu(), exact, rtol=1e-6, atol=1e-6)
    dy = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    (dtheirs,), (dours,) = torch.autograd.grad(exact, theirs, dy), torch.autograd.grad(out, ours, dy.to(device.torch))
    assert dours.is_sparse == ("sparse" in options)
    dense = [each.to_dense().cpu() if each.is_sparse else each.cpu() for each in (dours, dtheirs)]
    assert torch.allclose(*dense, rtol=1e-5, atol=1e-6)


def test_index_outside_the_table(device):
    indices = torch.tensor([[3, 2], [1, 40], [-1, 2], [0, 2**40]]).to(device.torch)
    weight = small_table(1, 64)[1].to(device.torch)
    if device.name == "cpu":
        with pytest.raises(IndexError, match="is 40 and must be from 0 to 39"):
            embedding_bag(indices, weight)
        return
    assert embedding_bag(indices, weight).isnan().all(1).tolist() == [False, True, True, True]


_BAD_TABLES = (  # of each mode and option
    [torch.tensor([[1, 19], [2, 20]])],
    r"^indices\[1, 1\] is 20, row 40 with table_offsets\[1\], and must be from 0 to 39\.$",
)
BAD_ROWS = {  # arguments after the table of 40 rows, and what is said of the index
    "places count ids that are left out": (
        [torch.tensor([[1, 1], [1, 40]])],
        {"padding_idx": 1},
        r"^indices\[1, 1\] is 40 and must be from 0 to 39\.$",
    ),
    "packed tables": (_BAD_TABLES[0], {"table_offsets": [0, 20]}, _BAD_TABLES[1]),
    "packed tables, max_norm": (_BAD_TABLES[0], {"table_offsets": [0, 20], "max_norm": 1.0}, _BAD_TABLES[1]),
    "packed tables, concat": (_BAD_TABLES[0], {"table_offsets": [0, 20], "mode": "concat"}, _BAD_TABLES[1]),
    "max_norm": (
        [torch.tensor([[1, 1], [1, 40]])],
        {"max_norm": 1.0},
        r"^indices\[1, 1\] is 40 and must be from 0 to 39\.$",
    ),
    "three dimensions": (
        [torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 40]]])],
        {},
        r"^indices\[1, 1, 1\] is 40 and must be from 0 to 39\.$",
    ),
    "between offsets": (
        [torch.tensor([1, -1, 2])],
        {"offsets": torch.tensor([0, 2])},
        r"^indices\[1\] is -1 and must be from 0 to 39\.$",
    ),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_an_index_outside_the_table_is_named_by_its_place(what):
    (indices,), options, message = BAD_ROWS[what]
    with pytest.raises(IndexError, match=message):
        embedding_bag(indices, small_table(1, 64)[1], **options)


def test_a_mode_without_kernel_is_refused_where_the_module_is_made():
    with pytest.raises(NotImplementedError, match="mode is 'max' and must be 'sum', 'mean' or 'concat'"):
        EmbeddingBag(5, 8, mode="max")
    with pytest.raises(ValueError, match="mode is 'avg' and must be one of 'sum', 'mean'"):
        EmbeddingBag(5, 8, mode="avg")


@pytest.mark.parametrize(("shape", "options"), [((0, 3), {}), ((4, 0), {}), ((4, 0), {"table_offsets": []})])
def test_no_indices(device, shape, options):
    weight = torch.ones(5, 64, device=device.torch, requires_grad=True)
    out = embedding_bag(torch.empty(shape, dtype=torch.int64, device=device.torch), weight, **options)
    assert torch.equal(out, torch.zeros_like(out)) and out.shape == (shape[0], 64)
    out.sum().backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_columns_of_a_packed_table_are_read_in_place(device, monkeypatch):
    """A layer's columns of [V, layers * D]: no copy of the table, and a gradient of the layer's size."""
    whole = torch.randn(ROWS, 4 * 64, device=device.torch)
    layer = whole[:, 64:128].detach().requires_grad_()
    ids = torch.tensor([[3, 1], [3, 9]], device=device.torch)
    contiguous = torch.Tensor.contiguous
    copied = lambda self: pytest.fail("a copy") if len(self) == ROWS else contiguous(self)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "contiguous", copied)
    out = embedding(ids, layer), embedding(ids, layer, multiplier=2.0), embedding_bag(ids, layer, mode="sum")
    assert torch.equal(out[0], layer[ids]) and torch.equal(out[1], 2 * layer[ids])
    (gradient,) = torch.autograd.grad(out[0].sum() + out[2].sum(), layer)
    assert gradient.shape == (ROWS, 64)
    assert gradient[:, 0].tolist() == [2.0 * (ids == row).sum().item() for row in range(ROWS)]


def test_same_bits_every_time(device):
    indices, weight, samples = small_table(300, 64)
    run = lambda: compare(device, indices, weight, samples, torch.arange(300) // 3, (100, 3), mode="sum")  # noqa: E731
    assert torch.equal(run(), run())


def test_operators_are_registered_properly(device, npu_opcheck):
    indices, weight, samples = (each.to(device.torch) for each in small_table(12, 64))
    ends = torch.tensor([0, 5, 5], device=device.torch)
    options = (3, False, 1.0, None, torch.float32, -1, True, False, False, 0, ROWS)
    npu_opcheck(
        OPS.bags.default, (indices, ends, None, leaf(samples, device.torch), leaf(weight, device.torch), None, *options)
    )
    dy = torch.randn(3, 64, device=device.torch)
    npu_opcheck(OPS.spread.default, (dy, indices, ends, None, samples, weight, True, 3, False, 1.0, None, -1, 0))


def test_compiles_to_one_graph(device):
    indices, weight, _ = (each.to(device.torch) for each in small_table(12, 64))
    layer = lambda w: torch.sin(embedding_bag(indices.view(4, 3), w) + embedding(indices[:4], w, multiplier=3.0)).sum()  # noqa: E731
    gradients = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        table = leaf(weight, device.torch)
        gradients.append(torch.autograd.grad(function(table), table)[0])
    assert torch.allclose(*gradients, rtol=1e-6, atol=1e-6)


FORMS = {  # of n: indices, and offsets
    "ids of each": lambda n: (torch.arange(3 * n).view(n, 3) % ROWS, None),
    "offsets": lambda n: (torch.arange(3 * n) % ROWS, 3 * torch.arange(n)),
    "offsets, and the end": lambda n: (torch.arange(3 * n) % ROWS, 3 * torch.arange(n + 1)),
}
TRACERS = {
    "compile": lambda f, given: torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True),
    "make_fx": lambda f, given: make_fx(f, tracing_mode="symbolic")(*given),
    "export": lambda f, given: exported(f, given, strict=False),
    "strict export": lambda f, given: exported(f, given, strict=True),
}


def exported(function, given, strict):
    class Layer(torch.nn.Module):
        def forward(self, indices, offsets, weight):
            return function(indices, offsets, weight)

    sizes = tuple(None if each is None else {0: torch.export.Dim.DYNAMIC} for each in given[:2])
    return torch.export.export(Layer(), given, dynamic_shapes=(*sizes, None), strict=strict).module()


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("form", FORMS)
def test_number_of_bags_may_change(device, form, tracer):
    weight, last = small_table(1, 64)[1], form == "offsets, and the end"
    given = lambda n: tuple(None if each is None else each.to(device.torch) for each in (*FORMS[form](n), weight))  # noqa: E731
    call = lambda indices, offsets, table: embedding_bag(indices, table, offsets, include_last_offset=last)  # noqa: E731
    torch.compiler.reset()
    traced = TRACERS[tracer](call, given(4))
    for n in (4, 7, 5):
        assert torch.equal(traced(*given(n)), call(*given(n)))


@pytest.mark.parametrize("last", [False, True])
def test_module_is_a_drop_in(last):
    options = {"mode": "sum", "padding_idx": 2, "include_last_offset": last}
    theirs, ours = torch.nn.EmbeddingBag(ROWS, 8, **options), EmbeddingBag(ROWS, 8, **options)
    ours.load_state_dict(theirs.state_dict())
    ids, offsets, weights = torch.arange(9), torch.tensor([0, 4, 9]), torch.rand(9)
    assert torch.allclose(ours(ids, offsets, weights), theirs(ids, offsets, weights), atol=1e-6)
    assert torch.allclose(ours(ids.view(3, 3)), theirs(ids.view(3, 3)), atol=1e-6)


IDS, TABLE, SCALES = torch.tensor([[1, 2]]), torch.randn(10, 4), torch.ones(10)
WRONG = {
    "mode is 'max' and must be 'sum', 'mean' or 'concat': take": (NotImplementedError, {"mode": "max"}),
    "mode is 'min' and must be one of": (ValueError, {"mode": "min"}),
    "indices has at|indices has shape": (ValueError, {"indices": IDS[0]}),
    r"indices has shape \(1, 2\) and must have one dimension where offsets": (ValueError, {"offsets": torch.tensor([0])}),
    "offsets must begin with 0, not descend": (ValueError, {"indices": IDS[0], "offsets": torch.tensor([1])}),
    "offsets is empty and must begin with 0": (ValueError, {"indices": IDS[0], "offsets": torch.zeros(0).long()}),
    "offsets is torch.float32": (TypeError, {"indices": IDS[0], "offsets": torch.ones(1)}),
    "include_last_offset is True and must be False": (ValueError, {"include_last_offset": True}),
    "mode is 'mean' and must be 'sum' where per_sample_weights": (ValueError, {"per_sample_weights": torch.ones(1, 2)}),
    r"per_sample_weights has shape \(2,\)": (ValueError, {"per_sample_weights": torch.ones(2), "mode": "sum"}),
    r"table_offsets has shape \(1,\) and must have shape \(2,\)": (ValueError, {"table_offsets": [0]}),
    "table_offsets is a float": (TypeError, {"table_offsets": 1.0}),
    r"table_offsets\[0\] is 9223372036854775808 and must be from 0": (ValueError, {"table_offsets": [2**63, 1]}),
    "table_offsets is torch.sparse_coo": (TypeError, {"table_offsets": torch.ones(2).long().to_sparse()}),
    "offsets is torch.sparse_coo": (TypeError, {"indices": IDS[0], "offsets": torch.zeros(1).long().to_sparse()}),
    "weight is torch.float32 and must be torch.int8 or": (TypeError, {"row_scales": SCALES}),
    "row_scales has shape": (ValueError, {"weight": TABLE.char(), "row_scales": SCALES[:3]}),
    "weight requires grad and must not: a table with row_scales": (
        ValueError,
        {"weight": TABLE.to(torch.float8_e4m3fn).requires_grad_(), "row_scales": SCALES},
    ),
    "max_norm is 1.0 and must be None where row_scales": (
        ValueError,
        {"weight": TABLE.char(), "row_scales": SCALES, "max_norm": 1.0},
    ),
    "dtype is torch.bfloat16 and must be left out": (ValueError, {"dtype": torch.bfloat16}),
    "weight is torch.int8 on cpu and must be": (TypeError, {"weight": TABLE.char()}),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message):
    kind, wrong = WRONG[message]
    with pytest.raises(kind, match=message):
        embedding_bag(**{"indices": IDS, "weight": TABLE, **wrong})


def test_means_of_an_fp64_table_are_fp64():
    table = torch.randn(20, 16, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 20, (5, 3))
    mean, right = embedding_bag(ids, table, mode="mean"), table[ids].sum(1) / 3
    dy = torch.randn(5, 16, dtype=torch.float64)
    torch.testing.assert_close(mean, right, rtol=0, atol=1e-14)
    torch.testing.assert_close(*(torch.autograd.grad(each, table, dy)[0] for each in (mean, right)), rtol=0, atol=1e-14)
