"""What is in memory at a time: no tensor of tokens by vocabulary, nothing that nobody needs, chunks as planned."""

import losses
import pytest
import torch
from npu_fused_linear_cross_entropy import fused_linear_cross_entropy, linear_log_probs
from npu_fused_linear_cross_entropy.call import Options
from npu_fused_linear_cross_entropy.decide import MIB, Demand, pitch, split
from npu_fused_linear_cross_entropy.explain import explain
from npu_fused_linear_cross_entropy.operator import FORWARD
from npu_tiling import Device, plans, soc
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

B4 = soc("Ascend910B4")
H200 = Device("H200", "cuda", "sm_90", 132, 132, 232448, max_grid=2**31 - 1)
TOKENS, WIDTH, VOCABULARY = 256, 32, 2048


def demand(tokens, width, vocabulary, logit_bytes, dweight_bytes, dx, kept_bytes):
    return Demand(
        tokens=tokens,
        width=width,
        vocabulary=vocabulary,
        logit_bytes=logit_bytes,
        dweight_bytes=dweight_bytes,
        dx=dx,
        kept_bytes=kept_bytes,
    )


class Largest(TorchDispatchMode):
    """The bytes of the largest memory that any operation gave back, and how many operations gave what shape."""

    def __init__(self):
        super().__init__()
        self.bytes, self.shapes = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
                self.shapes.append(tuple(leaf.shape))
        return result


MODES = {
    "mean": {},
    "none": {"reduction": "none"},
    "entropy": {"return_entropy": True},
    "every option": {"label_smoothing": 0.1, "softcap": 5.0, "lse_square_scale": 0.1, "return_token_accuracy": True},
    "fp32 sums": {"accum_dtype": torch.float32},
}


@pytest.mark.uncollected(
    "the same memory, and kernels to compile", lambda place, what, grad: place == "emulated" and (what != "mean" or not grad)
)
@pytest.mark.uncollected(
    "the forward of these is that of the mean", lambda what, grad: not grad and what not in ("mean", "entropy")
)
@pytest.mark.uncollected(
    "chunks do not depend on these", lambda what, how: what in ("every option", "fp32 sums") and "memory_budget" in how
)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", [{"chunk_tokens": 16}, {"memory_budget": 32 * VOCABULARY * 4}, {"memory_budget": 1}])
@pytest.mark.parametrize("what", MODES)
def test_logits_of_all_tokens_are_never_there(device, what, how, grad):
    """In what the operators do inside, where no dispatch mode sees from outside."""
    case = losses.make(TOKENS, WIDTH, VOCABULARY)
    options = Options(**{**MODES[what], **how}, vocab_size=VOCABULARY)
    inputs = [tensor.to(device.torch) for tensor in (case.x, case.weight, case.target)]
    arguments = (*inputs, None, None, None, None, None)
    forward, backward = FORWARD.forward.run, FORWARD.gradient.plain.run
    needs, nothing = (True, True, False), (False, False, False)
    with Largest() as largest, torch.no_grad():
        if not grad:
            forward(*arguments, *options, False, *nothing)
        elif options.reduction == "none" or options.return_entropy:
            *_, entropy, statistics, _, _, _, _ = forward(*arguments, *options, True, *nothing)
            seed = torch.ones(TOKENS if options.reduction == "none" else (), device=device.torch)
            dentropy = torch.ones_like(entropy) if options.return_entropy else None
            backward(seed, dentropy, statistics, *arguments, *options, *needs)
        else:
            forward(*arguments, *options, False, *needs)
    assert largest.shapes
    # nothing of [tokens, V] in even the narrowest dtype; the largest tensor may be the weight, or it widened
    assert largest.bytes <= max(VOCABULARY * WIDTH * 4, TOKENS * VOCABULARY * 2 // 4)
    assert (TOKENS, VOCABULARY) not in largest.shapes


def test_nothing_is_allocated_for_what_is_not_trained(device, monkeypatch):
    allocated = []
    real = plans.empty_strided
    monkeypatch.setattr(
        plans, "empty_strided", lambda shape, *others: allocated.append(tuple(shape)) or real(shape, *others)
    )
    case = losses.make(TOKENS, WIDTH, 123)
    for reduction in ("mean", "none"):
        for trained in ((), ("x",), ("weight",), ("x", "weight")):
            leaves = {name: getattr(case, name).detach().to(device.torch) for name in ("x", "weight")}
            for name in trained:
                leaves[name] = losses.leaf(leaves[name], device.torch)
            allocated.clear()
            loss = fused_linear_cross_entropy(*leaves.values(), case.target.to(device.torch), reduction=reduction)
            if reduction == "none":
                assert not {(TOKENS, WIDTH), (123, WIDTH)} & set(allocated)  # they wait for the backward
            if trained:
                loss.sum().backward()
            assert ((TOKENS, WIDTH) in allocated) == ("x" in trained)
            assert ((123, WIDTH) in allocated) == ("weight" in trained)


def test_what_is_saved_for_the_backward(device):
    saved = []
    case = losses.make(TOKENS, WIDTH, 123)
    x, weight = losses.leaf(case.x, device.torch), losses.leaf(case.weight, device.torch)
    target = case.target.to(device.torch)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        fused_linear_cross_entropy(x, weight, target)
        assert sorted(saved) == [(0,), (123, WIDTH), (TOKENS, WIDTH)]  # the gradients themselves, and no other data
        saved.clear()
        linear_log_probs(x, weight, target)
        assert sorted(saved) == [(3, TOKENS), (123, WIDTH), (TOKENS,), (TOKENS, WIDTH)]


LLAMA = demand(4096, 4096, 128256, 4, 2, True, 0)


def covers(parts, total):
    ends = [0]
    for part in parts:
        assert part.start == ends[-1] < part.stop
        ends.append(part.stop)
    return ends[-1] == total


@pytest.mark.parametrize("chip", [None, B4, H200], ids=["cpu", "B4", "H200"])
@pytest.mark.parametrize("tokens", [0, 1, 3, 1000, 4096, 16384, 100_000])
@pytest.mark.parametrize("vocabulary", [2, 123, 1000, 50257, 256000])
@pytest.mark.parametrize("kept_bytes", [0, 2])
def test_chunks_cover_everything_within_the_budget(tokens, vocabulary, chip, kept_bytes):
    for budget in (None, 2**20, 2**25, 2**30):
        for chunk_tokens in (None, 100):
            wanted = demand(tokens, 4096, vocabulary, 4, 2, True, kept_bytes)
            found = split(wanted, chunk_tokens, budget, chip)
            assert covers(found.tokens, tokens)
            assert covers(found.columns, vocabulary)
            most_tokens, most_columns = found.longest
            if chunk_tokens:
                assert most_tokens <= chunk_tokens
            elif budget and most_tokens > 128:  # the smallest chunk there is may take more
                sums = 4 * len(found.columns) if found.kept else 4 * 4096
                sums = 0 if len(found.columns) == 1 else sums
                assert most_tokens * (pitch(most_columns) * 4 + sums) <= budget


def test_chunks_do_not_come_from_the_ratio_of_vocabulary_and_width():
    for width in (64, 4096):
        assert split(demand(4096, width, 128256, 4, 2, True, 0), None, None, H200) == split(LLAMA, None, None, H200)


def test_default_chunks_of_a_llama():
    """Within 600 MiB: a thousand tokens, as few chunks as can be, of nearly equal length."""
    for kept_bytes, counts in ((0, (4, 16)), (2, (1, 16))):
        for tokens, count in zip((4096, 16384), counts, strict=True):
            found = split(demand(tokens, 4096, 128256, 4, 2, True, kept_bytes), None, None, H200)
            assert [part.stop - part.start for part in found.tokens] == [tokens // count] * count
            assert bool(found.kept) == (len(found.columns) > 1) == (count == 1)
        assert len(split(demand(500, 4096, 128256, 4, 2, True, kept_bytes), None, None, H200).columns) == 1


def test_memory_of_a_llama_on_ascend_is_within_what_was_promised():
    """2.6 GiB with inputs and gradients, 4.6 GiB with fp32 sums of dW: by counting, at most."""
    width, vocabulary = 4096, 128256
    for tokens in (4096, 8192, 16384):
        for sums, promised in ((2, 2.6), (4, 4.6)):
            found = split(demand(tokens, width, vocabulary, 4, sums, True, 2), None, None, B4)
            most_tokens, most_columns = found.longest
            logits = most_tokens * (pitch(most_columns) * 4 + len(found.columns) * 4)
            matrices = 2 * (vocabulary + tokens) * width * 2 + (vocabulary * width * 4 if sums == 4 else 0)
            assert logits + matrices + 100 * tokens <= promised * 2**30


def test_a_small_budget_is_met_by_chunks_of_columns():
    """31 MiB for 4096 tokens, where a row of logits has 0.5, and the sums of a row of dx .016."""
    for dweight_bytes in (2, 0):
        found = split(demand(4096, 4096, 128256, 4, dweight_bytes, True, 0), None, 31 * MIB, H200)
        tokens, columns = found.longest
        assert 512 <= columns < 128256
        assert len({part.stop - part.start for part in found.columns}) == 2  # lengths to compile kernels for
        assert tokens * (columns + 4096) * 4 <= 31 * MIB


@pytest.mark.uncollected("peak memory is CUDA's to tell", lambda place: place != "cuda")
@pytest.mark.parametrize("budget", [None, 32 * MIB])
@pytest.mark.parametrize(("tokens", "width", "vocabulary"), [(4096, 4096, 128256), (32768, 1024, 151936)])
def test_explain_tells_the_peak_memory(device, tokens, width, vocabulary, budget):
    x = torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=torch.bfloat16, device="cuda").div_(64).requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,), device="cuda")
    for _ in range(2):  # the first call loads libraries
        x.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fused_linear_cross_entropy(x, weight, target, memory_budget=budget).backward()
        peak = (torch.cuda.max_memory_allocated() - before) / MIB
    sizes = {"tokens": tokens, "width": width, "vocabulary": vocabulary, "memory_budget": budget}
    said = explain(**sizes, backward=True).peak / MIB
    assert said <= peak <= said + 2
