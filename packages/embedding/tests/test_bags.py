"""Several ids a result, against their definition in fp64 and PyTorch's own functions."""

import pytest
import torch
from bags import OFFSETS, compare
from lookup import ROWS, leaf, small_table
from npu_embedding import EmbeddingBag, embedding, embedding_bag
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx

pytestmark = pytest.mark.usefixtures("npu_poisoned")
OPS = torch.ops.npu_embedding


@pytest.mark.few(3)
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


LENGTHS = [0, 63, 64, 65, 5, 0, 127, 128, 129, 0, 1, 700, 64, 192, 0, 3]  # of bags; CUDA's parts have 64 ids


@pytest.mark.parametrize(
    ("dtype", "options", "weighted"),
    [
        (torch.float32, {"mode": "sum", "padding_idx": 1}, True),
        (torch.bfloat16, {"mode": "mean", "padding_idx": 1}, False),
        (torch.float32, {"mode": "mean", "include_last_offset": True}, False),
    ],
)
def test_a_long_bag_depends_on_no_other_bag(device, dtype, options, weighted):
    lengths = torch.tensor(LENGTHS)
    ends = lengths.cumsum(0)
    last = [] if "include_last_offset" not in options else [int(ends[-1])]
    offsets = torch.tensor([*(ends - lengths).tolist(), *last])
    indices, weight, samples = small_table(int(ends[-1]), 300, dtype)
    samples = samples if weighted else None
    bags = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)
    out = compare(device, indices, weight, samples, bags, offsets=offsets, **options)
    ids, table = indices.to(device.torch), weight.to(device.torch)
    for i, (length, stop) in enumerate(zip(LENGTHS, ends.tolist(), strict=True)):
        own = slice(stop - length, stop)
        begin = torch.tensor([0, *([length] if last else [])], device=device.torch)
        weights = None if samples is None else samples[own].to(device.torch)
        alone = embedding_bag(ids[own], table, begin, per_sample_weights=weights, **options)
        assert torch.equal(alone[0], out[i]), length


def test_long_bags_of_equal_lengths(device):
    indices, weight, _ = small_table(900, 64)
    compare(device, indices, weight, None, torch.arange(900) // 300, (3, 300), mode="mean", padding_idx=1)


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


@pytest.mark.parametrize("ends", [None, [0, 2]])
@pytest.mark.parametrize("infinite", [torch.inf, torch.nan])
def test_the_weight_of_an_id_that_is_left_out_gets_no_gradient(device, infinite, ends):
    """Whatever dy is. On accelerators the same of an id outside the table."""
    weight, ids = small_table(1, 64)[1].abs().to(device.torch), torch.tensor([1, 3, 3, 2], device=device.torch)
    if device.name != "cpu":
        ids[1] = ROWS
    samples = torch.ones(4, device=device.torch, requires_grad=True)
    offsets, shape = (None, (2, 2)) if ends is None else (torch.tensor(ends, device=device.torch), (4,))
    given = samples.view(shape)
    out = embedding_bag(ids.view(shape), weight, offsets, mode="sum", per_sample_weights=given, padding_idx=3)
    (gradient,) = torch.autograd.grad(out, samples, torch.full_like(out, infinite))
    assert torch.equal(gradient.cpu().nan_to_num(7, 7), torch.tensor([7.0, 0, 0, 7]))


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
if hasattr(symbolic_shapes, "guard_or_true"):  # which not all releases have
    TRACERS["compile, of sizes that are data"] = lambda f, given: of_sizes_that_are_data(f)


def of_sizes_that_are_data(function):
    run = torch.compile(function, backend="aot_eager", fullgraph=True)

    def marked(*given):
        for each in given[:2]:
            if each is not None:
                torch._dynamo.decorators.mark_unbacked(each, 0)
        return run(*given)

    return marked


def exported(function, given, strict):
    class Layer(torch.nn.Module):
        def forward(self, indices, offsets, weight):
            return function(indices, offsets, weight)

    sizes = tuple(None if each is None else {0: torch.export.Dim.DYNAMIC} for each in given[:2])
    return torch.export.export(Layer(), given, dynamic_shapes=(*sizes, None), strict=strict).module()


@pytest.mark.few(2)
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
    theirs.include_last_offset = False  # PyTorch 2.7 leaves out the last bag of equal ones
    assert torch.allclose(ours(ids.view(3, 3)), theirs(ids.view(3, 3)), atol=1e-6)


def test_means_of_an_fp64_table_are_fp64():
    table = torch.randn(20, 16, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 20, (5, 3))
    mean, right = embedding_bag(ids, table, mode="mean"), table[ids].sum(1) / 3
    dy = torch.randn(5, 16, dtype=torch.float64)
    torch.testing.assert_close(mean, right, rtol=0, atol=1e-14)
    torch.testing.assert_close(*(torch.autograd.grad(each, table, dy)[0] for each in (mean, right)), rtol=0, atol=1e-14)


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_gradient_in_bf16_is_rounded_once(device, offsets, weighted):
    """What a bag brings to a row, dy over 3 or times a weight, is no bf16; 40 bags name a row here."""
    indices = torch.randint(0, 3, (40, 3), device=device.torch)
    ends = torch.arange(0, 120, 3, device=device.torch) if offsets else None
    dy = torch.randn(40, 32, device=device.torch).bfloat16()
    samples = torch.rand(40, 3, device=device.torch).bfloat16() if weighted else None
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        weight = torch.zeros(3, 32, dtype=dtype, device=device.torch if dtype == torch.bfloat16 else "cpu").requires_grad_()
        given = [None if each is None else each.to(weight.device) for each in (indices, ends, samples)]
        ids, weights = (each if each is None or ends is None else each.flatten() for each in (given[0], given[2]))
        weights = None if weights is None else weights.to(dtype)
        function = embedding_bag if dtype == torch.bfloat16 else torch.nn.functional.embedding_bag
        out = function(ids, weight, given[1], mode="sum" if weighted else "mean", per_sample_weights=weights)
        gradients.append(torch.autograd.grad(out, weight, dy.to(out.device, dtype))[0].double().cpu())
    ours, exact = gradients
    assert ((ours - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()  # half a bf16, and sums in fp32
