"""The operators as PyTorch sees them: registration, compilation, transforms, modules."""

import copy
import functools
import io

import depth
import pytest
import torch
import torch._dynamo.testing
from npu_attn_res import AttnRes, BlockAttnRes, attn_res, attn_res_bank, attn_res_merge, attn_res_phase1

OPS = torch.ops.npu_attn_res
WIDTH = 256
NO_PREFIX = (None, None, None)


def tensors(device, *shapes, dtype=torch.float32):
    torch.manual_seed(0)
    return [(0.3 * torch.randn(shape, device=device.torch)).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_without_data_have_shapes_and_gradients(dtype):
    with torch.device("meta"):
        blocks, prefix = torch.empty(2, 4, WIDTH, dtype=dtype, requires_grad=True), torch.empty(2, WIDTH, dtype=dtype)
        module = AttnRes(WIDTH, dtype=dtype)
        found = module([prefix, blocks[:, 0]])
        weights = [torch.empty(WIDTH)] * 3
        of_bank = attn_res_bank(blocks, 3, prefix, *weights, layer_output=prefix)
    assert found.is_meta and found.shape == of_bank.output.shape == (2, WIDTH) and found.dtype == dtype
    (gradient,) = torch.autograd.grad(found.sum() + of_bank.output.sum(), blocks)
    assert gradient.is_meta and gradient.shape == blocks.shape


@pytest.mark.slow
def test_operators_are_registered_properly(device, npu_opcheck):
    blocks, a, b, query, norm, weight = tensors(
        device, (3, 5, WIDTH), (5, WIDTH), (5, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,), dtype=torch.bfloat16
    )
    options = (1e-6, 1e-6, False)
    one = (1e-6, 1e-6, None, False)
    for sources, stacked in (([blocks], True), ([a, b], False)):
        npu_opcheck(OPS.attn_res.default, (sources, stacked, 3 if stacked else 2, *NO_PREFIX, query, norm, weight, *one))
    frozen = (query.detach(), norm.detach(), None)
    npu_opcheck(OPS.attn_res.default, ([a.detach()], False, 1, *NO_PREFIX, *frozen, *one))
    count = torch.tensor(2, device=device.torch)
    npu_opcheck(OPS.attn_res.default, ([blocks], True, 2, None, a, b, query, norm, weight, *one))
    npu_opcheck(OPS.attn_res.default, ([blocks], True, 3, count, a, b, query, norm, weight, *one))
    npu_opcheck(OPS.attn_res.default, ([], False, 0, None, a, None, query, norm, None, *one))
    bank, prefix = blocks.detach(), a.detach()
    npu_opcheck(OPS.attn_res_update.default, ([bank], True, 2, None, prefix, prefix + 1, *frozen, *one, True, True))
    queries = torch.randn(2, WIDTH, device=device.torch, requires_grad=True)
    npu_opcheck(OPS.phase1.default, (queries, [a, b], False, norm, 1e-6, False))
    state = (*tensors(device, (5, WIDTH), (5,)), a)
    npu_opcheck(OPS.merge.default, (*state, b, query, norm, weight, *options))
    npu_opcheck(OPS.merge.default, (*state, None, query, norm, None, *options))


def test_gradients_are_registered_properly(device, npu_opcheck):
    a, b, dh, query, norm = (
        tensor.detach() for tensor in tensors(device, (5, WIDTH), (5, WIDTH), (5, WIDTH), (WIDTH,), (WIDTH,))
    )
    given = ([a, b], False, 2, *NO_PREFIX, query, norm, None, 1e-6, 1e-6, None, True)
    h, _, _, *statistics = OPS.attn_res(*given)
    inputs = (dh, None, None, h, [a, b], False, 2, None, None, query, norm, None, *statistics)
    npu_opcheck(OPS.attn_res_backward.default, (*inputs, [True, False], False, [True, False, False]))
    bank = torch.stack([a, b, a])
    for used, count in ((2, None), (3, torch.tensor(2, device=device.torch))):
        h, _, _, *statistics = OPS.attn_res([bank], True, used, count, dh, None, query, norm, None, 1e-6, 1e-6, None, True)
        inputs = (dh, None, dh, h, [bank], True, used, count, dh, query, norm, None, *statistics)
        npu_opcheck(OPS.attn_res_backward.default, (*inputs, [True], True, [True, False, False]))
    queries = torch.randn(2, WIDTH, device=device.torch)
    o, lse, *saved = OPS.phase1(queries, [a, b], False, norm, 1e-6, True)
    inputs = (o, lse.detach(), queries, [a, b], False, norm, *saved)
    npu_opcheck(OPS.phase1_backward.default, (*inputs, [False, True], [True, False]))
    state = (o[:, 0], lse[0], a)
    _, _, _, *statistics = OPS.merge(*state, None, query, norm, None, 1e-6, 1e-6, True)
    inputs = (dh, None, None, None, *state, query, norm, None, *statistics)
    npu_opcheck(OPS.merge_backward.default, (*inputs, [True, True, False]))


def test_gradients_without_tokens_are_those_the_compiler_is_told(device):
    a, dh = torch.randn(2, 0, WIDTH, device=device.torch)
    query = torch.randn(WIDTH, device=device.torch)
    h, _, _, *statistics = OPS.attn_res([a, a], False, 2, *NO_PREFIX, query, query, None, 1e-6, 1e-6, None, True)
    inputs = (dh, None, None, h, [a, a], False, 2, None, None, query, query, None, *statistics)
    needed = [True, False], False, [True, False, False]
    torch.library.opcheck(OPS.attn_res_backward.default, (*inputs, *needed), test_utils="test_faketensor")


def test_results_lie_as_the_compiler_is_told(device):
    a, b = (torch.randn(WIDTH, 5, device=device.torch).t() for _ in range(2))
    o, query, norm = (torch.randn(shape, device=device.torch) for shape in ((5, WIDTH), (WIDTH,), (WIDTH,)))
    state, options = (o, o[:, 0], a), (1e-6, 1e-6, True)
    check = functools.partial(torch.library.opcheck, test_utils="test_faketensor")
    check(OPS.attn_res.default, ([a, b], False, 2, *NO_PREFIX, query, norm, norm, 1e-6, 1e-6, None, True))
    check(OPS.attn_res.default, ([a], False, 1, None, b, b, query, norm, norm, 1e-6, 1e-6, None, True))
    check(OPS.merge.default, (*state, b, query, norm, norm, *options))
    *_, score, rstd, norm_rstd = OPS.merge(*state, None, query, norm, None, *options)
    statistics = (score, rstd, norm_rstd, [True, True, False])
    check(OPS.merge_backward.default, (b, None, None, None, *state, query, norm, None, *statistics))


@pytest.mark.few(1)
@pytest.mark.parametrize("what", ["one", "phases", "bank"])
def test_compiles_to_one_graph(device, what):
    backend = "inductor" if device.name == "cuda" else "aot_eager"

    def one(blocks, query, norm):
        h, y, *_ = attn_res(list(blocks.unbind()), query, norm, output_rms_weight=norm)
        return torch.sin(h) + y

    def phases(blocks, query, norm):
        state = attn_res_phase1(torch.stack((query, query)), blocks, norm)
        h, _, joined, _ = attn_res_merge(*(found[1] for found in state), blocks[0], query, norm, layer_output=blocks[1])
        return h + torch.sin(joined)

    def bank(blocks, query, norm):
        memory = torch.zeros(6, 4, WIDTH, device=blocks.device)
        first = attn_res_bank(memory, 0, blocks[0], query, norm, append=True)
        running, count = first.output * 2, torch.tensor(1, device=blocks.device)
        found = attn_res_bank(memory, count, running, query, norm, norm, layer_output=blocks[1], append=True, in_place=True)
        return found.normalized + running * blocks[2] + memory[:, 1]

    function = {"one": one, "phases": phases, "bank": bank}[what]
    results = []
    for called in (function, torch.compile(function, backend=backend, fullgraph=True)):
        leaves = tensors(device, (3, 6, WIDTH), (WIDTH,), (WIDTH,))
        y = called(*leaves)
        results.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for eager, traced in zip(*results, strict=True):
        assert torch.allclose(eager, traced, rtol=1e-4, atol=1e-3)


def test_tokens_may_be_dynamic_under_compile(device):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    weights = [tensor.detach() for tensor in tensors(device, (WIDTH,), (WIDTH,))]
    compiled = torch.compile(lambda v: attn_res(v, *weights) * 2, backend=counter, fullgraph=True)
    for tokens in (3, 17, 64):
        blocks = torch.randn(3, tokens, WIDTH, device=device.torch)
        torch._dynamo.mark_dynamic(blocks, 1)
        assert torch.equal(compiled(blocks), attn_res(blocks, *weights) * 2)
    assert counter.frame_count == 1


def test_export(device):
    module = AttnRes(WIDTH, device=device.torch)
    torch.nn.init.normal_(module.query)
    (blocks,) = tensors(device, (3, 5, WIDTH))
    program = torch.export.export(module, (blocks,), dynamic_shapes=({1: torch.export.Dim("tokens")},))
    for given in (blocks, blocks.repeat(1, 2, 1)):
        assert torch.equal(program.module()(given), module(given))


def test_exported_programs_that_return_named_tuples_can_be_saved(device):
    module, file = AttnRes(WIDTH, device=device.torch), io.BytesIO()
    given = tensors(device, (3, 5, WIDTH), (WIDTH,))
    torch.export.save(torch.export.export(module, tuple(given)), file)
    file.seek(0)
    found, expected = torch.export.load(file).module()(*given), module(*given)
    assert type(found) is type(expected)
    assert torch.equal(found.normalized, expected.normalized)


def test_functional_gradient(device):
    leaves = tensors(device, (3, 4, WIDTH), (WIDTH,), (WIDTH,))
    loss = lambda *inputs: attn_res(*inputs).square().sum()  # noqa: E731
    gradients = torch.func.grad(loss, argnums=(0, 1, 2))(*(leaf.detach() for leaf in leaves))
    for functional, expected in zip(gradients, torch.autograd.grad(loss(*leaves), leaves), strict=True):
        assert torch.allclose(functional, expected, rtol=1e-5, atol=1e-5)


def test_second_derivative_is_refused(device):
    leaves = tensors(device, (3, 4, WIDTH), (WIDTH,), (WIDTH,))
    (gradient, *_) = torch.autograd.grad(attn_res(*leaves).square().sum(), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


@pytest.mark.few(1)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_bank_without_gradients_compiles_to_one_graph(device, dynamic):
    """It is written to inside."""
    backend = "inductor" if device.name == "cuda" else "aot_eager"

    def step(bank, prefix, x, query, norm):
        found = attn_res_bank(bank, 1, prefix, query, norm, layer_output=x, append=True, in_place=True)
        return found.output

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (6, 4, 5):
        results = []
        for called in (step, compiled):
            shapes = (rows, 3, WIDTH), (rows, WIDTH), (rows, WIDTH), (WIDTH,), (WIDTH,)
            given = [tensor.detach() for tensor in tensors(device, *shapes)]
            results.append((called(*given), *given[:2]))
        for eager, traced in zip(*results, strict=True):
            assert torch.equal(eager, traced)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(device, reentrant):
    case = depth.make(3, 7, WIDTH, torch.float32)
    expected = depth.run(case, device.torch)
    blocks, *weights = case.leaves(device.torch, False)
    h = torch.utils.checkpoint.checkpoint(attn_res, blocks[0], *weights, None, case.eps, use_reentrant=reentrant)
    h.backward(case.dh.to(device.torch))
    found = (h.detach(), blocks[0].grad, *(weight.grad for weight in weights))
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.equal(actual.cpu(), wanted)


def test_autocast_leaves_dtypes_alone(device):
    blocks, query, norm = tensors(device, (3, 4, WIDTH), (WIDTH,), (WIDTH,))
    expected = attn_res(blocks, query, norm), attn_res(blocks.bfloat16(), query, norm)
    with torch.autocast(device.torch.type, dtype=torch.bfloat16):
        assert torch.equal(attn_res(blocks, query, norm), expected[0])
        assert torch.equal(attn_res(blocks.bfloat16(), query, norm), expected[1])


def test_saves_blocks_weights_and_small_statistics(device):
    saved = []
    pack = lambda tensor: saved.append(tensor) or tensor  # noqa: E731
    blocks, query, norm = tensors(device, (3, 5, WIDTH), (WIDTH,), (WIDTH,), dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attn_res(blocks, query, norm)
    assert sorted(tensor.numel() for tensor in saved) == [5, 3 * 5, 3 * 5, WIDTH, WIDTH, 3 * 5 * WIDTH]
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.no_grad():
        attn_res(blocks, query, norm)
    assert saved == []


def test_inference_mode(device):
    blocks, query, norm = (tensor.detach() for tensor in tensors(device, (3, 4, WIDTH), (WIDTH,), (WIDTH,)))
    with torch.inference_mode():
        h = attn_res(list(blocks), query, norm)
    assert torch.equal(h, attn_res(blocks, query, norm))


def test_module_starts_at_the_mean(device):
    module = AttnRes(WIDTH, rms_eps=1e-5, device=device.torch, dtype=torch.bfloat16)
    assert sorted(module.state_dict()) == ["query", "rms_weight"]
    blocks = torch.randn(3, 4, WIDTH, device=device.torch).bfloat16()
    assert torch.allclose(module(blocks).float(), blocks.float().mean(0), rtol=2**-8, atol=2**-8)
    assert torch.equal(module(list(blocks)), module(blocks))
    h, *_, alpha = module(blocks, return_weights=True)
    assert torch.allclose(alpha, torch.full_like(alpha, 1 / 3))
    assert copy.deepcopy(module).query.dtype == torch.bfloat16
    assert "256, rms_eps=1e-05" in repr(module)
    assert "n_inputs=3, block_size=2" in repr(BlockAttnRes(WIDTH, 3, 2))


@pytest.mark.parametrize("stacked", [True, False])
def test_nothing_waits_for_the_device(device, stacked, npu_no_waits):
    query, norm, *blocks = tensors(device, (WIDTH,), (WIDTH,), *([(3, 6, WIDTH)] if stacked else [(6, WIDTH)] * 3))

    def step():
        h = attn_res(blocks[0] if stacked else blocks, query, norm)
        torch.autograd.grad(h, (*blocks, query), torch.ones_like(h))

    step()  # compiles
    with npu_no_waits():
        step()


def test_the_number_of_blocks_on_the_device_may_change_between_replays(device, npu_capture, npu_no_waits):
    bank = torch.randn(6, 4, WIDTH, device=device.torch)
    prefix, x, query, norm = (one.detach() for one in tensors(device, (6, WIDTH), (6, WIDTH), (WIDTH,), (WIDTH,)))
    count = torch.tensor(2, device=device.torch)

    def step():
        found = attn_res_bank(bank, count, prefix, query, norm, layer_output=x, append=True, return_weights=True)
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


@pytest.mark.parametrize("n_blocks", [3, 40])
def test_graph_capture(device, n_blocks, npu_capture):
    blocks = [torch.randn(6, WIDTH, device=device.torch, requires_grad=True) for _ in range(n_blocks)]
    query, norm = tensors(device, (WIDTH,), (WIDTH,))
    dh = torch.randn(6, WIDTH, device=device.torch)
    step = lambda: (lambda h: (h, *torch.autograd.grad(h, (*blocks, query), dh)))(attn_res(blocks, query, norm))  # noqa: E731
    captured, replay = npu_capture(step)
    with torch.no_grad():
        blocks[0].normal_()
    replay()
    for replayed, eager in zip(captured, step(), strict=True):
        assert torch.equal(replayed, eager)
