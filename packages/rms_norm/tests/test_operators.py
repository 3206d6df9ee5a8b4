"""The operators as PyTorch sees them: registration, compilation, transforms, modules."""

import copy
import functools
import io

import formula
import pytest
import torch
import torch._dynamo.testing
from npu_rms_norm import GemmaRMSNorm, LlamaRMSNorm, Olmo2RMSNorm, Qwen3RMSNorm, RMSNorm, add_rms_norm, rms_norm

OPS = torch.ops.npu_rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_are_registered_properly(device, dtype, npu_opcheck):
    make = lambda *shape: torch.randn(*shape, dtype=dtype, device=device.torch)  # noqa: E731
    x, residual, weight = make(3, 5, 64), make(3, 5, 64), make(64)
    leaf = lambda tensor: tensor.clone().requires_grad_()  # noqa: E731
    for given in ((leaf(x), leaf(weight)), (leaf(x), None), (x, weight)):
        npu_opcheck(OPS.rms_norm.default, formula.forward_arguments(*given, dtype=torch.float32, return_fp32=True))
    added = formula.forward_arguments(leaf(x), leaf(weight), residual=leaf(residual), casting_mode="gemma", dtype=dtype)
    npu_opcheck(OPS.rms_norm.default, added)
    rstd = torch.rand(3, 5, device=device.torch)
    options = (0.0, "llama", "silu", True, dtype)
    for dsum in (None, residual):
        given = (x, dsum, residual, None, weight, None, rstd, *options)
        npu_opcheck(OPS.rms_norm_backward.default, (*given, True, False, True, False))
    npu_opcheck(OPS.rms_norm_backward_.default, (x, None, residual, None, weight, None, rstd, *options, True, False))


def test_results_lie_as_the_compiler_is_told(device):
    make = lambda: torch.randn(5, 3, 64, device=device.torch).transpose(0, 1)  # noqa: E731
    x, residual, weight = make(), make(), torch.ones(64, device=device.torch)
    check = functools.partial(torch.library.opcheck, test_utils="test_faketensor")
    wanted = {"dtype": torch.float32, "return_fp32": True, "save_rstd": True}
    check(OPS.rms_norm.default, formula.forward_arguments(x, weight, **wanted))
    check(OPS.rms_norm.default, formula.forward_arguments(x, weight, residual=residual, **wanted))
    rstd = torch.rand(3, 5, device=device.torch)
    given = (x, residual, residual.contiguous(), None, weight, None, rstd)
    options = (0.0, "llama", "silu", True, torch.float32)
    check(OPS.rms_norm_backward.default, (*given, *options, True, False, True, False))


@pytest.mark.parametrize("in_place", [False, True])
def test_compiles_to_one_graph(device, in_place):
    backend = "inductor" if device.name == "cuda" else "aot_eager"

    def layer(x, residual, weight):
        y, total = add_rms_norm(x, residual, weight)
        return rms_norm(torch.sin(y), weight, offset=1.0, in_place=in_place) + total

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    results = []
    for function in (layer, compiled):
        torch.manual_seed(0)
        leaves = [torch.randn(shape, device=device.torch).requires_grad_() for shape in ((6, 64), (6, 64), (64,))]
        y = function(*leaves)
        results.append((y, *torch.autograd.grad(y, leaves, torch.randn(6, 64, device=device.torch))))
    for eager, traced in zip(*results, strict=True):
        assert torch.allclose(eager, traced, rtol=1e-5, atol=1e-6)


def test_rows_may_be_dynamic_under_compile(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: rms_norm(x) * 2, backend=counter, fullgraph=True)
    for rows in (3, 17, 256):
        x = torch.randn(rows, 64, device=device.torch)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), rms_norm(x) * 2)
    assert counter.frame_count == 1


def test_export(device):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = LlamaRMSNorm(64, device=device.torch)

        def forward(self, x):
            return self.norm(x)

    x = torch.randn(4, 64, device=device.torch)
    program = torch.export.export(Model(), (x,))
    assert torch.equal(program.module()(x), rms_norm(x, torch.ones(64, device=device.torch)))


def test_exported_programs_that_return_named_tuples_can_be_saved(device):
    x, residual = torch.randn(4, 64, device=device.torch), torch.randn(4, 64, device=device.torch)
    module, file = RMSNorm(64, device=device.torch), io.BytesIO()
    torch.export.save(torch.export.export(module, (x, residual)), file)
    file.seek(0)
    found, expected = torch.export.load(file).module()(x, residual), module(x, residual)
    assert type(found) is type(expected)
    assert torch.equal(found.residual, expected.residual)


def test_functional_gradient(device):
    x, weight = torch.randn(3, 64, device=device.torch), torch.randn(64, device=device.torch)
    loss = lambda x, w: rms_norm(x, w).square().sum()  # noqa: E731
    gradients = torch.func.grad(loss, argnums=(0, 1))(x, weight)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    for functional, expected in zip(gradients, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert torch.allclose(functional, expected, rtol=1e-5, atol=1e-6)


def test_functional_gradient_that_is_pulled_back_after_the_call(device):
    x, weight, dy = (torch.randn(*shape, device=device.torch) for shape in ((3, 64), (64,), (3, 64)))
    _, pull = torch.func.vjp(rms_norm, x, weight)
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    for functional, expected in zip(pull(dy), torch.autograd.grad(rms_norm(*leaves), leaves, dy), strict=True):
        assert torch.equal(functional, expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_second_derivative_is_refused(device, in_place):
    x = torch.randn(3, 64, device=device.torch, requires_grad=True)
    (gradient,) = torch.autograd.grad(rms_norm(x, in_place=in_place).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(device, reentrant):
    case = formula.make(7, 64, torch.float32)
    expected = formula.run(case, rms_norm, device.torch)

    def checkpointed(x, weight, **options):
        return torch.utils.checkpoint.checkpoint(lambda x, w: rms_norm(x, w, **options), x, weight, use_reentrant=reentrant)

    leaves = formula.leaf(case.x, device.torch), formula.leaf(case.weight, device.torch)
    y = checkpointed(*leaves, **case.options)
    y.backward(formula.copy(case.dy, device.torch))
    for actual, wanted in zip((y.detach(), leaves[0].grad, leaves[1].grad), expected, strict=True):
        assert torch.equal(actual.cpu(), wanted)


def test_autocast_leaves_dtypes_alone(device):
    x, weight = torch.randn(3, 64, device=device.torch), torch.randn(64, device=device.torch)
    expected = rms_norm(x, weight), rms_norm(x.bfloat16(), weight)
    with torch.autocast(device.torch.type, dtype=torch.bfloat16):
        assert torch.equal(rms_norm(x, weight), expected[0])
        y = rms_norm(x.bfloat16(), weight)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected[1])


def test_saves_what_the_backward_reads_and_nothing_else(device):
    saved = []
    pack = lambda tensor: saved.append(tensor) or tensor  # noqa: E731
    x = torch.randn(5, 64, device=device.torch, requires_grad=True)
    weight = torch.ones(64, device=device.torch, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rms_norm(x, weight)
    assert sorted(tensor.numel() for tensor in saved) == [5, 64, 5 * 64]
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.no_grad():
        rms_norm(x, weight)
    assert saved == []


def test_inference_mode(device):
    x = torch.randn(5, 64, device=device.torch)
    with torch.inference_mode():
        y = rms_norm(x)
    assert torch.equal(y, rms_norm(x))


def test_module_is_a_drop_in(device):
    ours = RMSNorm(64, eps=1e-5, device=device.torch, dtype=torch.bfloat16)
    theirs = torch.nn.RMSNorm(64, eps=1e-5, device=device.torch, dtype=torch.bfloat16)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == ["weight"]
    x = torch.randn(5, 64, device=device.torch, dtype=torch.bfloat16)
    assert torch.allclose(ours(x), theirs(x), rtol=2**-6)
    plain = RMSNorm(64, elementwise_affine=False)
    assert list(plain.parameters()) == []
    assert copy.deepcopy(ours).weight.dtype == torch.bfloat16
    assert "64, eps=1e-05" in repr(ours)


@pytest.mark.parametrize(
    ("module", "offset", "mode"),
    [(LlamaRMSNorm, 0.0, "llama"), (Qwen3RMSNorm, 0.0, "llama"), (GemmaRMSNorm, 1.0, "gemma"), (Olmo2RMSNorm, 0.0, "gemma")],
)
def test_presets_start_at_one_and_compute_their_model(device, module, offset, mode):
    norm = module(64, eps=1e-5, device=device.torch)
    x, residual = torch.randn(2, 5, 64, device=device.torch)
    assert torch.equal(norm(x), rms_norm(x, eps=1e-5))
    torch.nn.init.normal_(norm.weight)
    options = {"eps": 1e-5, "offset": offset, "casting_mode": mode}
    assert torch.equal(norm(x), rms_norm(x, norm.weight, **options))
    for actual, expected in zip(norm(x, residual), add_rms_norm(x, residual, norm.weight, **options), strict=True):
        assert torch.equal(actual, expected)


def test_nothing_waits_for_the_device(device, npu_no_waits):
    make = lambda *shape: torch.randn(*shape, device=device.torch).requires_grad_()  # noqa: E731
    x, residual, weight = make(9, 512), make(9, 512), make(512)

    def step():
        y, total = add_rms_norm(x, residual, weight)
        z = rms_norm(y * 2, weight, in_place=True)
        torch.autograd.grad(z + total, (x, residual, weight), torch.ones_like(z))

    step()  # compiles
    with npu_no_waits():
        step()


@pytest.mark.parametrize("shape", [(4, 512), (3, 100), (2, 20000)])
def test_graph_capture(device, shape, npu_capture):
    x = torch.randn(shape, device=device.torch, requires_grad=True)
    weight = torch.randn(shape[-1], device=device.torch, requires_grad=True)
    dy = torch.randn(shape, device=device.torch)
    step = lambda: (lambda y: (y, *torch.autograd.grad(y, (x, weight), dy)))(rms_norm(x, weight))  # noqa: E731
    captured, replay = npu_capture(step)
    with torch.no_grad():
        x.normal_()
    replay()
    for replayed, eager in zip(captured, step(), strict=True):
        assert torch.equal(replayed, eager)
