"""The operators as PyTorch sees them: registration, compilation, transforms."""

import io

import lookup
import pytest
import torch
import torch._dynamo.testing
from npu_embedding import Embedding, EmbeddingBag, embedding
from npu_embedding.both.tiling import Way

OPS = torch.ops.npu_embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_registered_properly(device, dtype, npu_opcheck):
    weight = torch.randn(10, 64, dtype=dtype, device=device.torch)
    indices = torch.randint(0, 10, (3, 5), device=device.torch)
    dy = torch.randn(3, 5, 64, dtype=dtype, device=device.torch)
    leaf = weight.clone().requires_grad_()
    for arguments in ((leaf, -1, False, False, 0, 10), (weight, 3, True, False, 0, 10), (leaf, 3, False, False, 20, 99)):
        table, *options = arguments
        npu_opcheck(OPS.forward.default, (indices + options[3], table, *options))
    npu_opcheck(OPS.backward.default, (dy, indices, 10, 3, True, False, 0))
    npu_opcheck(OPS.backward.default, (dy, indices, 10, 3, False, True, 0))
    npu_opcheck(OPS.renormalise_.default, (indices, weight, 1.0, 2.0, 0, 10))


def test_results_lie_as_the_compiler_is_told(device, npu_opcheck):
    indices = torch.randint(0, 10, (5, 3), device=device.torch).t()
    dy = torch.randn(5, 3, 64, device=device.torch).transpose(0, 1)
    weight = torch.randn(10, 64, device=device.torch)
    arguments = (indices, weight, -1, False, False, 0, 10)
    npu_opcheck(OPS.forward.default, arguments, test_utils="test_faketensor")
    npu_opcheck(OPS.backward.default, (dy, indices, 10, -1, False, False, 0), test_utils="test_faketensor")


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2, "scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_compiles_to_one_graph(device, options):
    backend = "inductor" if device.name == "cuda" else "aot_eager"

    def layer(indices, weight):
        return torch.sin(embedding(indices, weight, **options)) @ weight.t()

    indices = torch.randint(0, 10, (6, 4), device=device.torch)
    table = torch.randn(10, 64, device=device.torch)
    results = []
    for function in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
        weight = lookup.leaf(table, device.torch)
        y = function(indices, weight)
        results.append((y, *torch.autograd.grad(y, weight, torch.ones_like(y)), weight))
    for eager, traced in zip(*results, strict=True):
        assert torch.allclose(eager, traced, rtol=1e-5, atol=1e-5)


def test_number_of_indices_may_be_dynamic_under_compile(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    weight = torch.randn(10, 64, device=device.torch)
    compiled = torch.compile(lambda indices: embedding(indices, weight) * 2, backend=counter, fullgraph=True)
    for n in (3, 17, 256):
        indices = torch.randint(0, 10, (n,), device=device.torch)
        torch._dynamo.mark_dynamic(indices, 0)
        assert torch.equal(compiled(indices), embedding(indices, weight) * 2)
    assert counter.frame_count == 1


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_exported_programs_can_be_saved(device, kind, max_norm):
    model = kind(10, 64, padding_idx=1, max_norm=max_norm, device=device.torch)
    indices = torch.randint(0, 10, (4, 2), device=device.torch)
    program, file = torch.export.export(model, (indices,)), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for made in (program, torch.export.load(file)):
        torch.testing.assert_close(made.module()(indices), model(indices))  # what max_norm scaled is scaled again


def test_functional_gradient(device):
    indices = torch.randint(0, 10, (3, 5), device=device.torch)
    weight = torch.randn(10, 64, device=device.torch)
    loss = lambda w: embedding(indices, w, padding_idx=2).square().sum()  # noqa: E731
    leaf = weight.clone().requires_grad_()
    assert torch.equal(torch.func.grad(loss)(weight), torch.autograd.grad(loss(leaf), leaf)[0])


@pytest.mark.uncollected("PyTorch has no gradient of a sparse sum there", lambda place, sparse: sparse and place == "npu")
@pytest.mark.parametrize("sparse", [False, True])
def test_second_derivative_is_refused(device, sparse):
    weight = torch.randn(10, 64, device=device.torch, requires_grad=True)
    out = embedding(torch.tensor([1, 2], device=device.torch), weight, sparse=sparse)
    (gradient,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        (torch.sparse.sum(gradient) if sparse else gradient.sum()).backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(device, reentrant):
    case = lookup.make(30, 10, 64)
    expected = lookup.run(case, device.torch)
    indices, weight = case.indices.to(device.torch), lookup.leaf(case.weight, device.torch)
    out = torch.utils.checkpoint.checkpoint(lambda w: embedding(indices, w), weight, use_reentrant=reentrant)
    out.backward(case.dy.to(device.torch))
    assert torch.equal(out.detach().cpu(), expected[0])
    assert torch.equal(weight.grad.cpu(), expected[1])


def test_autocast_leaves_dtypes_alone(device):
    indices = torch.tensor([1, 2], device=device.torch)
    weight = torch.randn(10, 64, device=device.torch, requires_grad=True)
    with torch.autocast(device.torch.type, dtype=torch.bfloat16):
        out = embedding(indices, weight)
    assert out.dtype == torch.float32
    assert torch.autograd.grad(out.sum(), weight)[0].dtype == torch.float32


def test_saves_the_indices_and_nothing_else(device):
    saved = []
    pack = lambda tensor: saved.append(tensor) or tensor  # noqa: E731
    indices = torch.randint(0, 10, (3, 5), device=device.torch)
    weight = torch.randn(10, 64, device=device.torch, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        embedding(indices, weight, padding_idx=0, scale_grad_by_freq=True)
    assert [tensor.data_ptr() for tensor in saved] == [indices.data_ptr()]


def test_inference_mode(device):
    case = lookup.make(30, 10, 64)
    with torch.inference_mode():
        out = embedding(case.indices.to(device.torch), case.weight.to(device.torch))
    assert torch.equal(out.cpu(), case.weight[case.indices])


def test_nothing_waits_for_the_device(device, npu_no_waits):
    case = lookup.make(300, 40, 64, kind="zipf", padding_idx=1)
    indices, dy = case.indices.to(device.torch), case.dy.to(device.torch)
    weight = lookup.leaf(case.weight, device.torch)
    for options in ({}, {"sparse": True}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        embedding(indices, weight, 1, **options).backward(dy)  # compiles
        with npu_no_waits():
            embedding(indices, weight, 1, **options).backward(dy)
        weight.grad = None


@pytest.mark.parametrize("way", [Way.SEARCHED, Way.RANKED, Way.SORTED])
@pytest.mark.parametrize("width", [64, 100, 4096])
def test_graph_capture(device, width, way, monkeypatch, npu_capture):
    if device.name == "cuda":
        lookup.take(way, monkeypatch.setattr)
    elif way is not Way.RANKED:
        pytest.skip("the other places sort in one way")
    indices, other = torch.randint(0, 500, (2, 300), device=device.torch)
    weight = torch.randn(500, width, device=device.torch, requires_grad=True)
    dy = torch.randn(300, width, device=device.torch)
    step = lambda: (lambda y: (y, *torch.autograd.grad(y, weight, dy)))(embedding(indices, weight))  # noqa: E731
    captured, replay = npu_capture(step)
    indices.copy_(other)
    replay()
    for replayed, eager in zip(captured, step(), strict=True):
        assert torch.equal(replayed, eager)


@pytest.mark.uncollected("the other places sort in one way", lambda place: place != "cuda")
@pytest.mark.parametrize("kind", lookup.KINDS)
def test_both_sorts_end_in_the_same_gradient(device, kind, monkeypatch):
    """On CUDA our kernels sort a few thousand indices, and torch.sort sorts more."""
    case = lookup.make(5000, 5000, 768, torch.bfloat16, kind, padding_idx=3)
    ranked = lookup.run(case, device.torch)
    lookup.check(case, ranked)
    lookup.take(Way.SORTED, monkeypatch.setattr)
    assert torch.equal(lookup.run(case, device.torch)[1], ranked[1])
