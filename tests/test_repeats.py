"""Calls of the operators that are repeated give, bit for bit, what they give when everything is decided again."""

import gc

import npu_tiling
import pytest
import torch
import torch.distributed as dist
from npu_attn_res import attn_res, attn_res_bank
from npu_embedding import embedding, embedding_bag
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_distillation_loss, linear_log_probs
from npu_rms_norm import add_rms_norm, gated_rms_norm, qk_rms_norm, rms_norm
from npu_tiling import Launcher, operators
from npu_tiling.launching import listening
from npu_tiling.launching.direct import DirectCall
from npu_tiling.pytorch import repeats
from npu_tiling.pytorch.repetition import Repetition

SIZE = 64
WEIGHTS = [(SIZE,), (SIZE,)]
HEAD = [(16, SIZE), (40, SIZE)]


def heads(qkv, q_weight, k_weight):
    return torch.cat([part.flatten(-2) for part in qk_rms_norm(qkv, q_weight, k_weight, n_heads=2, n_kv_heads=1)[:2]], -1)


CALLS = {  # a call of indices and tensors, and the tensors
    "rms_norm": (lambda ids, *given: rms_norm(*given), [(16, SIZE), (SIZE,)]),
    "rms_norm, in place": (lambda ids, *given: rms_norm(*given, in_place=True), [(16, SIZE), (SIZE,)]),
    "rms_norm, rows with gaps": (lambda ids, x, weight: rms_norm(x[:, ::2], weight), [(8, 2, 3, SIZE), (SIZE,)]),
    "add_rms_norm": (lambda ids, *given: add_rms_norm(*given).y, [(16, SIZE)] * 2 + [(SIZE,)]),
    "gated_rms_norm": (lambda ids, *given: gated_rms_norm(*given), [(16, SIZE)] * 2 + [(SIZE,)]),
    "embedding": (lambda ids, table: embedding(ids, table), [(40, SIZE)]),
    "embedding, columns of a packed table": (lambda ids, table: embedding(ids, table[:, 16:80]), [(40, 96)]),
    "embedding_bag": (lambda ids, table: embedding_bag(ids.view(4, 4), table, mode="sum"), [(40, SIZE)]),
    "attn_res": (lambda ids, v, *weights: attn_res(v, *weights), [(4, 16, SIZE), *WEIGHTS]),
    "attn_res, a list": (lambda ids, q, w, *v: attn_res(list(v), q, w), [*WEIGHTS, *[(16, SIZE)] * 4]),
    "attn_res_bank": (
        lambda ids, v, p, *weights: attn_res_bank(v, 4, p, *weights).output,
        [(16, 5, SIZE), (16, SIZE), *WEIGHTS],
    ),
    "cross entropy": (lambda ids, *head: fused_linear_cross_entropy(*head, ids), HEAD),
    "log_probs": (lambda ids, *head: linear_log_probs(*head, ids), HEAD),
    "distillation": (lambda ids, *given: linear_distillation_loss(*given[:2], ids, teacher=given[2:]), HEAD * 2),
}


@pytest.fixture
def repeats_of_every_place(npu_place, monkeypatch):
    """Kernels on a CPU are launched as on a device, as far as `Repeats` can tell."""
    if npu_place.name in ("npu", "cuda"):
        return
    if npu_place.name == "cpu":
        pytest.skip("on a CPU, where no kernel is emulated, the definition decides nothing that could be saved")
    launch = Launcher.__call__

    known = {}  # constants and options of launchers and keys

    def heard(self, grid, tensors, scalars, constants, options, key):
        known[self, key] = constants, options
        listener, listening.here.listener = listening.here.listener, None
        launch(self, grid, tensors, scalars, constants, options, key)
        listening.here.listener = listener

        def run(grid, _, __, stream, *arguments):
            launch(self, grid, arguments[: len(tensors)], arguments[len(tensors) :], constants, options, key)

        if listener is not None:
            listener.launched(DirectCall(run, lambda index: 0, (), ()), grid, tensors, scalars, ())

    def direct_call(self, key, grid, device, dtypes, scalars):
        def run(grid, _, __, stream, *arguments):
            tensors, (constants, options) = arguments[: len(dtypes)], known[self, key]
            launch(self, grid, tensors, scalars, constants, options, key)

        return (DirectCall(run, lambda index: 0, (), ()), ()) if (self, key) in known else None

    monkeypatch.setattr(Launcher, "direct_call", direct_call)
    monkeypatch.setattr(operators, "is_overridden", lambda: False)
    monkeypatch.setattr(Launcher, "__call__", heard)
    monkeypatch.setattr(repeats, "_index_of", lambda tensor: 0)
    monkeypatch.setattr(repeats, "is_overridden", lambda: False)


@pytest.fixture
def repeated(repeats_of_every_place, monkeypatch):
    """A list with an entry for each call of an operator that was repeated."""
    seen = []
    call, compile_plan = Repetition.__call__, operators.compile_plan
    monkeypatch.setattr(Repetition, "__call__", lambda self, tensors: seen.append(self) or call(self, tensors))

    def counted(plan, tensors, lengths):
        run = compile_plan(plan, tensors, lengths)
        return run and (lambda *arguments: seen.append(plan) or run(*arguments))

    monkeypatch.setattr(operators, "compile_plan", counted)
    for each in gc.get_objects():
        if type(each) is operators.Operator:
            monkeypatch.setattr(each, "_functions", {})
            monkeypatch.setattr(each, "_plans", {})
    return seen


def of(call, ids, tensors, gradient):
    """Results without gradients, with them, and the gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with torch.no_grad():
        alone = call(ids, *leaves).clone()
    y = call(ids, *leaves)
    # The gradient of y is written over where a call may.
    return alone, y.detach(), *torch.autograd.grad(y, leaves, gradient(y).clone(), allow_unused=True)


@pytest.fixture
def group(npu_place, tmp_path):
    """Of one rank, whose collectives are called all the same."""
    if npu_place.name == "npu":
        pytest.skip("the stand-in of CANN has no collectives")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl" if npu_place.name == "cuda" else "gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_collectives_are_repeated(npu_place, repeated, group, monkeypatch):
    called = []
    all_reduce = dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda *given, **named: called.append(given) or all_reduce(*given, **named))

    def split(ids, *head):
        return fused_linear_cross_entropy(*head, ids, process_group=group)

    compare(split, HEAD, npu_place.torch, repeated, at_least=2)
    assert len(called) == 2 * 7  # dx, of every call, decided or repeated


def test_rows_are_scaled_down_by_a_repeated_call(npu_place, repeated):
    def scaled(ids, table):
        return embedding(ids, 1 * table, max_norm=1.0)

    compare(scaled, [(40, SIZE)], npu_place.torch, repeated, at_least=5)  # rows scaled and looked up twice, and a gradient


@pytest.mark.uncollected("plain PyTorch decides nothing that could be saved", lambda place: place == "cpu")
@pytest.mark.few(5)
@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_call_gives_what_a_decided_one_gives(name, npu_place, repeated):
    call, shapes = CALLS[name]
    compare(call, shapes, npu_place.torch, repeated, at_least=2)


def compare(call, shapes, device, repeated, *, at_least):
    """Calls until calls are repeated, `at_least` so many of an operator at the end."""
    for number in range(7):
        torch.manual_seed(number)
        ids = torch.randint(0, 40, (16,), device=device)
        tensors = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
        before = len(repeated)
        found = of(call, ids, tensors, torch.sin)
        again = len(repeated) - before
        with npu_tiling.watch_launches():
            expected = of(call, ids, tensors, torch.sin)
        assert len(repeated) - before == again
        for one, other in zip(found, expected, strict=True):
            assert one is other is None or torch.equal(one, other)
    assert again >= at_least
