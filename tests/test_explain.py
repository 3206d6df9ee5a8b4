"""What the operators' explanations say of fallbacks, partial sums and reasons, held to what dry runs launch."""

import importlib
import warnings
from collections import Counter

import npu_tiling
import pytest
import torch
from npu_tiling import explaining as explanation
from npu_tiling.launch import Kernels
from npu_tiling.plans import run_plan

from tools import launches
from tools.workspace import read_packages

B4, H200 = "Ascend910B4", "H200"
CALLS = [
    ("npu_rms_norm", {"tokens": 4096, "width": 4096}),
    ("npu_rms_norm", {"tokens": 64, "width": 40000, "gate": True, "activation": "sigmoid"}),
    ("npu_embedding", {"tokens": 40000, "vocabulary": 50257, "width": 768, "dtype": "fp32", "padding_idx": 3}),
    ("npu_embedding", {"tokens": 100000, "vocabulary": 300, "width": 64, "sparse": True, "multiplier": 8.0}),
    (
        "npu_embedding",
        {"tokens": 96, "vocabulary": 300, "width": 30000, "bag": 4, "mode": "sum", "per_sample_weights": True},
    ),
    ("npu_attn_res", {"tokens": 64, "width": 5120, "blocks": 12, "prefix": True, "append": True}),
    ("npu_attn_res", {"tokens": 64, "width": 6144, "blocks": 3, "listed": True, "normalised": True}),
    ("npu_attn_res", {"tokens": 64, "width": 20000, "blocks": 3}),
    ("npu_attn_res", {"tokens": 64, "width": 2048, "blocks": 3, "layers": 4}),
    ("npu_attn_res", {"tokens": 64, "width": 9600, "merge": True}),
    ("npu_fused_linear_cross_entropy", {"tokens": 4096, "width": 4096, "vocabulary": 128256, "memory_budget": 2 * 10**8}),
    ("npu_fused_linear_cross_entropy", {"tokens": 8192, "width": 512, "vocabulary": 32000, "softcap": 30.0}),
    ("npu_fused_linear_cross_entropy", {"tokens": 512, "width": 64, "vocabulary": 1000, "reduction": "none"}),
]
OVERFLOW = "ub overflow, requires 16 bits while 8 bits available"


def explained(package, options, chip):
    return importlib.import_module(package).explain(**options, chip=chip, backward=True)


def identity(launch):
    return launch.direction, launch.kernel, str({**launch.blocks, **launch.flags, **launch.options})


@pytest.fixture
def planned(monkeypatch):
    """The calls that were explained."""
    calls, real = [], explanation.explained
    monkeypatch.setattr(explanation, "explained", lambda made: calls.extend(made) or real(made))
    return calls


def on_meta(slots):
    return [slot and torch.empty_strided(slot.shape, slot.strides, dtype=slot.dtype, device="meta") for slot in slots]


@pytest.mark.parametrize("chip", [B4, H200])
@pytest.mark.parametrize(("package", "options"), CALLS)
def test_a_launch_falls_back_to_what_runs_where_its_tile_overflows(package, options, chip, planned, monkeypatch):
    """Each launch is refused once, with the compiler's words."""
    found = explained(package, options, chip)
    launches = iter(found.launches)
    for call in planned:
        refused = {}
        for launch, said in zip(call.launches, launches, strict=False):
            refused.setdefault((launch.kernel, launch.decision.key), (launch.decision, said))
        before = Counter(identity(said) for _, said in refused.values())
        for (kernel, key), (_, said) in refused.items():

            def refusing(self, module, name, decision, *arguments, kernel=kernel, key=key):
                if (name, decision.key) == (kernel, key):
                    raise RuntimeError(OVERFLOW)

            monkeypatch.setattr("npu_tiling.launch.replaced", {})
            monkeypatch.setattr(Kernels, "launch", refusing)
            arguments = on_meta(call.plan.arguments)
            if not said.fallback:
                with pytest.raises(npu_tiling.TileTooLargeError, match="not even its smallest tile"):
                    run_plan(call.plan, arguments, call.replan)
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                _, after = run_plan(call.plan, arguments, call.replan)
            steps = explanation.explained([call._replace(plan=after)])
            made = [step for step in steps if isinstance(step, explanation.ExplainedLaunch)]
            new = [each for each in made if identity(each) in Counter(map(identity, made)) - before]
            for each in said.fallback:
                found = [launch for launch in new if launch.kernel == each.kernel]
                assert bool(found) == (each.kernel != "PyTorch's operators")
                assert not found or any(each.changes.items() <= launch.parameters.items() for launch in found)


@pytest.mark.parametrize("chip", [B4, H200])
@pytest.mark.parametrize(("package", "options"), CALLS)
def test_every_launch_says_why_and_every_name_what_it_is(package, options, chip):
    found = explained(package, options, chip)
    for launch in found.launches:
        assert launch.summary and launch.why and launch.decided_at.partition("/")[0] in (package, "npu_tiling"), (
            launch.kernel
        )
        assert {*launch.blocks, *launch.flags} <= found.names.keys()
        assert "Way." not in str(launch)
    assert "names:" in found.text


def adders(package, chip, **options):
    launches = explained(package, options, chip).launches
    return {launch.kernel: launch.partials_added_by.partition(" (")[0] for launch in launches if launch.partials_added_by}


def test_partial_sums_are_added_by_these():
    """Kernels that write partial sums, by chip: a kernel adds them, or PyTorch's sum."""
    rows = {"tokens": 4096, "width": 4096}
    assert adders("npu_rms_norm", B4, **rows) == {"backward_kernel": "sum_partials_kernel"}
    columns = {"attn_res_products_kernel": "PyTorch's sum", "attn_res_gradient_kernel": "PyTorch's sum"}
    assert adders("npu_attn_res", B4, tokens=64, width=20000, blocks=3) == columns
    assert adders("npu_attn_res", H200, tokens=64, width=5120, blocks=12, normalised=True) == {
        "attn_res_norm_backward_kernel": "sum_partials_kernel",
        "attn_res_backward_shared_kernel": "attn_res_add_partials_kernel",
    }
    bags = {"tokens": 96, "vocabulary": 300, "width": 30000, "bag": 4, "mode": "sum", "per_sample_weights": True}
    wide = adders("npu_embedding", B4, **bags)
    assert wide == {"spread_bags_kernel": "PyTorch's sum", "sum_rows_kernel": "add_partials_kernel"}
    assert adders("npu_embedding", H200, tokens=4096, vocabulary=3000, width=64) == {
        "sum_sorted_kernel": "add_partials_kernel"
    }
    product = ("cross_entropy_product_kernel", "cross_entropy_product_again_kernel")
    loss = adders("npu_fused_linear_cross_entropy", H200, tokens=8192, width=4096, vocabulary=128256)
    assert loss == {
        **dict.fromkeys(product, "cross_entropy_product_sums_kernel"),
        "cross_entropy_targets_kernel": "cross_entropy_factors_kernel",
        "cross_entropy_losses_kernel": "cross_entropy_sums_kernel",
    }


@pytest.mark.slow  # dry runs of every call of an operator
@pytest.mark.parametrize("package", [package for package in read_packages().values() if package.is_operator])
def test_names_are_those_of_all_calls(package):
    chips = launches.TYPICAL_CHIPS.values()
    made = [launch for chip in chips for _, each in launches.of_package(package.key, chip) for launch in each]
    used = {name for launch in made for name in launch.decision.constants}
    assert importlib.import_module(f"{package.module}.explain").NAMES.keys() == used
