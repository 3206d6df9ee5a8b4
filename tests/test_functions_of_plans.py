"""A call that runs the function of its plan gives, bit for bit, what the steps of the plan give."""

import sys

import npu_tiling
import pytest
import torch
from npu_attn_res import attn_res, attn_res_bank
from npu_embedding import embedding, embedding_bag
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_distillation_loss, linear_log_probs
from npu_rms_norm import add_rms_norm, gated_rms_norm, qk_rms_norm, rms_norm
from npu_tiling import Launcher, operators
from npu_tiling.direct import DirectCall
from npu_tiling.operators import Operator

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
def repeated(npu_place, monkeypatch):
    """A list with an entry for each call that ran a function. An emulated kernel is called directly, as on a device."""
    if npu_place.name == "cpu":
        pytest.skip("on a CPU, where no kernel is emulated, there are no plans")
    seen, compile_plan = [], operators.compile_plan

    def counted(plan, *rest):
        run = compile_plan(plan, *rest)
        return run and (lambda *arguments: seen.append(plan) or run(*arguments))

    monkeypatch.setattr(operators, "compile_plan", counted)
    for module in [each for name, each in sys.modules.items() if name.startswith("npu_")]:
        for each in vars(module).values():
            if type(each) is Operator:
                monkeypatch.setattr(each, "_functions", {})
                monkeypatch.setattr(each, "_plans", {})
    if npu_place.name == "emulated":
        known, launch = {}, Launcher.__call__

        def noting(self, grid, tensors, scalars, constants, options, key):
            known[self, key] = constants, options
            launch(self, grid, tensors, scalars, constants, options, key)

        def direct_call(self, key, grid, device, dtypes, scalars):
            def run(grid, _, __, stream, *arguments):
                launch(self, grid, arguments[: len(dtypes)], arguments[len(dtypes) :], *known[self, key], key)

            return (DirectCall(run, lambda index: 0, (), ()), ()) if (self, key) in known else None

        monkeypatch.setattr(Launcher, "__call__", noting)
        monkeypatch.setattr(Launcher, "direct_call", direct_call)
        monkeypatch.setattr(operators, "is_overridden", lambda: False)
    return seen


def of(call, ids, tensors, gradient):
    """Results without gradients, with them, and the gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with torch.no_grad():
        alone = call(ids, *leaves).clone()
    y = call(ids, *leaves)
    # The gradient of y is written over where a call may.
    return alone, y.detach(), *torch.autograd.grad(y, leaves, gradient(y).clone(), allow_unused=True)


def test_rows_are_scaled_down_by_a_function(npu_place, repeated):
    def scaled(ids, table):
        return embedding(ids, 1 * table, max_norm=1.0)

    compare(scaled, [(40, SIZE)], npu_place.torch, repeated, at_least=5)  # rows scaled and looked up twice, and a gradient


@pytest.mark.uncollected("plain PyTorch has no plans", lambda place: place == "cpu")
@pytest.mark.few(5)
@pytest.mark.parametrize("name", CALLS)
def test_a_function_gives_what_the_steps_give(name, npu_place, repeated):
    call, shapes = CALLS[name]
    compare(call, shapes, npu_place.torch, repeated, at_least=2)


def compare(call, shapes, device, repeated, *, at_least):
    """Calls until functions run, `at_least` so many of them at the end."""
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
