"""Defects planted in final modules: the checks find each, or it is shown to change nothing."""

import dataclasses
from pathlib import Path

import npu_offline
import pytest
from mutants import FLAGS, REMOVED, short
from npu_offline.check import launches_of, load_calls, load_sample
from npu_offline.module.mlir import name_of, property_of
from orders import trace_of
from planted_calls import CALLS, call_of
from planting import SOC, changes, planted, run, sites

REASON = "needs triton-ascend and the three toolchains (npu-offline fetch)"
pytestmark = [
    pytest.mark.compilers,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(len(npu_offline.installed()) < 3, reason=REASON),
]
PACKAGES = sorted(path.parents[1] for path in Path(__file__).parents[1].glob("packages/*/tests/ascend_calls.py"))
TOOLCHAINS = ("1.0.0", "1.1.0", "1.2.0")
SAMPLE = {  # of calls, by toolchain: every package with one, every call with some
    "1.0.0": ("rms_norm", "attn_res, merge"),
    "1.1.0": ("wide embedding", "loss", "exp of matmul"),
    "1.2.0": ("attn_res", "matmul of exp"),
}
EACH = 10  # defects of a kernel in the sample, of different kinds


def _fates(name, toolchain, most):
    return [
        (mutant, fate, site)
        for site in sites(call_of(name), toolchain)
        for mutant, fate in planted(site, most, seed=0)
    ]  # fmt: skip


def _check(fates):
    missed = [
        f"{site.kernel}: {mutant.kind} at {mutant.positions}: {fate}" for mutant, fate, site in fates if "missed" in fate
    ]
    assert not missed
    assert any(fate.startswith("found") for _, fate, _ in fates)


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize(("toolchain", "name"), [(version, name) for version, names in SAMPLE.items() for name in names])
def test_defects_of_a_sample_are_found_or_change_nothing(toolchain, name):
    _check(_fates(name, toolchain, EACH))


@pytest.mark.nightly
@pytest.mark.parametrize("toolchain", TOOLCHAINS)
@pytest.mark.parametrize("name", CALLS)
def test_every_defect_is_found_or_changes_nothing(toolchain, name):
    _check(_fates(name, toolchain, None))


@pytest.mark.nightly
@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_defects_are_planted_in_every_kernel(package):
    labels = load_sample(package, "KERNELS")
    kernels = {launch.name for launch in launches_of([call for call in load_calls(package) if call[0] in labels], SOC)}
    assert kernels <= {launch.name for launch in launches_of([(name, call_of(name)) for name in CALLS], SOC)}


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_what_shows_that_nothing_changes_sees_a_lost_order_by_itself(toolchain):
    site = sites(call_of("rms_norm"), toolchain)[0]
    error, _ = run(site)
    assert error is None
    assert changes(site) == set()
    run(site, [(position, REMOVED) for position, op in enumerate(site.module.walk()) if _is_flag_of_loads(op)])
    assert "no order" in changes(site)

    without = dataclasses.replace(site, module=site.module.clone())
    for op in list(without.module.walk()):
        if _is_flag_of_loads(op):
            op.detach()
    run(without)
    assert trace_of(without.library.libraries[0]) == trace_of(site.library.libraries[0])


def _is_flag_of_loads(op):
    return short(op) in FLAGS and "PIPE_MTE2" in str(property_of(op, "set_pipe"))


def test_what_shows_that_nothing_changes_sees_another_source_of_bytes_by_itself():
    site = sites(call_of("rms_norm"), "1.2.0")[0]
    casts = {
        position: op.operands[0].owner
        for position, op in enumerate(site.module.walk())
        if name_of(op) == "hivm.hir.pointer_cast" and "xbf16" in str(op.results[0].type)
    }
    address, *_ = (property_of(constant, "value").value.data for constant in casts.values())
    run(site, [(position, address + 1) for position in casts])
    assert changes(site) & {"bytes of other instructions", "no order"}
