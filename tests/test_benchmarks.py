"""The operators' benchmark scripts: their sweeps, what they count, and providers that only an NPU has."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import npu_bench
import pytest
import torch
from npu_bench.checks import default_tolerance, expect, verify
from npu_bench.runner import make_inputs
from npu_bench.scripts import load

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(ROOT.glob("packages/*/benchmarks/*.py"))
CPU = torch.device("cpu")
MODES = ("forward", "backward", "no-grad-forward")


@pytest.fixture(params=SCRIPTS, ids=lambda script: script.stem)
def benchmark(request):
    return load(request.param)


def test_every_operator_has_a_benchmark():
    assert {script.stem for script in SCRIPTS} == {folder.name for folder in (ROOT / "packages").iterdir()}


LABELLED = ("model", "few", "shapes")  # sweeps over shapes that lie on no axis
AXES = {"tokens", "hidden", "vocabulary", "blocks"}


def test_sweeps_go_over_tokens_hidden_sizes_and_models(benchmark):
    assert {"tokens", "hidden", "model"} <= set(benchmark.sweeps)
    for name, sweep in benchmark.sweeps.items():
        positions = [case.position for case in sweep.cases]
        if name in LABELLED:
            assert all(isinstance(position, str) for position in positions)
        if name in AXES:  # two decades, in order
            assert positions == sorted(positions)
            assert positions[-1] >= 100 * positions[0]


def test_work_grows_along_every_axis(benchmark):
    for name, sweep in benchmark.sweeps.items():
        if name in LABELLED:
            continue
        for mode in MODES:
            counted = [benchmark.bytes_moved(case, mode) + benchmark.operations(case, mode) for case in sweep.cases]
            assert counted == sorted(counted)
            assert counted[0] > 0


@pytest.mark.parametrize(
    ("script", "sizes"),
    [
        ("rms_norm", {"shape": (4, 64), "storage": (4, 64)}),
        ("embedding", {"n": 8, "rows": 16, "width": 32, "dtype": torch.bfloat16, "kind": "zipf"}),
        ("attn_res", {"tokens": 4, "blocks": 3, "width": 64, "listed": True}),
        ("attn_res", {"tokens": 4, "blocks": 3, "width": 64, "listed": False, "bank": True}),
        ("fused_linear_cross_entropy", {"tokens": 8, "width": 16, "vocabulary": 32}),
    ],
)
def test_vendors_operators_are_providers_on_an_npu(script, sizes, monkeypatch):
    """With a stand-in for torch_npu, whose operators have the signatures of its documentation."""
    vendor = ModuleType("torch_npu")
    vendor.npu_rms_norm = lambda x, gamma, epsilon=1e-6: (torch.nn.functional.rms_norm(x, gamma.shape, gamma, epsilon), None)
    vendor.npu_cross_entropy_loss = lambda logits, target: (
        torch.nn.functional.cross_entropy(logits, target),
        None,
        None,
        None,
    )
    monkeypatch.setitem(sys.modules, "torch_npu", vendor)
    benchmark = load(ROOT / "packages" / script / "benchmarks" / f"{script}.py")
    case = npu_bench.Case("tiny", sizes)
    inputs = make_inputs(benchmark, case, CPU)
    expected, seeds = expect(benchmark.reference, inputs, torch.float64)
    npu = SimpleNamespace(type="npu")
    for name in {"ours", "torch", "torch_npu"} & set(benchmark.providers):  # torch's embedding on an NPU is the vendor's
        verdict = verify(benchmark.providers[name](case, npu), inputs, seeds, expected, 2**-5)
        assert verdict.right, (name, verdict.reason)
    if "torch_npu" in benchmark.providers:
        del vendor.npu_rms_norm, vendor.npu_cross_entropy_loss
        vendor.__version__ = "2.1"
        with pytest.raises(npu_bench.UnavailableError, match=r"torch_npu 2\.1 has no npu_"):
            benchmark.providers["torch_npu"](case, npu)
        with pytest.raises(npu_bench.UnavailableError):
            benchmark.providers["torch_npu"](case, CPU)


EMBEDDING = ROOT / "packages" / "embedding" / "benchmarks" / "embedding_benchmark"
BAGS = load(EMBEDDING / "bags.py")
OPTION_BYTES = {"weighted": 4, "dequantised": 2}  # for an index


@pytest.mark.parametrize("case", BAGS.cases, ids=lambda case: case.name)
def test_bags_are_right_and_their_bytes_count(case):
    tiny = npu_bench.Case(case.name, {**case.parameters, "bags": 7, "rows": 50, "width": 32})
    inputs = make_inputs(BAGS, tiny, CPU)
    expected, seeds = expect(BAGS.reference, inputs, torch.float64)
    for name, provider in BAGS.providers.items():
        verdict = verify(provider(tiny, CPU), inputs, seeds, expected, default_tolerance(inputs))
        assert verdict.right, (name, verdict.reason)
    n, weight = inputs["indices"].numel(), inputs["weight"]
    bytes_of_one = weight.shape[1] * weight.element_size() + inputs["indices"].element_size()
    result = provider(tiny, CPU)(*inputs.values())
    if case["kind"] != "mean":  # whose bags have lengths from a seed
        offsets = inputs["offsets"].nbytes if "offsets" in inputs else 0
        moved = n * (bytes_of_one + OPTION_BYTES.get(case["kind"], 0)) + result.nbytes + offsets
        assert BAGS.bytes_moved(tiny, "forward") == moved


def test_ngrams_are_right_and_their_bytes_count():
    benchmark = load(EMBEDDING / "ngram.py")
    for case in benchmark.cases:
        tiny = npu_bench.Case(case.name, {**case.parameters, "tokens": 60, "rows": 50, "width": 32})
        inputs = make_inputs(benchmark, tiny, CPU)
        inputs["ids"][::9] = 2  # where a text ends
        expected, seeds = expect(benchmark.reference, inputs, torch.float64)
        for name, provider in benchmark.providers.items():
            verdict = verify(provider(tiny, CPU), inputs, seeds, expected, default_tolerance(inputs))
            assert verdict.right, (name, verdict.reason)
        result = provider(tiny, CPU)(*inputs.values())
        assert benchmark.bytes_moved(tiny, "forward") == 2 * result.nbytes + inputs["ids"].nbytes
        assert benchmark.bytes_moved(tiny, "backward") == result.nbytes + inputs["table"].nbytes + inputs["ids"].nbytes


def test_heads_of_models_are_cases_from_1024_tokens_to_65536():
    script = ROOT / "packages" / "fused_linear_cross_entropy" / "benchmarks" / "fused_linear_cross_entropy.py"
    names = {case.name for case in load(script).sweeps["heads"].cases}
    assert {"1024x4096x128256", "16384x2880x201088", "65536x7168x129280", "32768x1024x151936"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small_block", "small_model"])
def test_block_with_our_operators_is_one_graph_and_right(name):
    benchmark = load(ROOT / "tools" / "bench_block.py")
    case = next(case for case in benchmark.cases if case.name == name)
    inputs = make_inputs(benchmark, case, CPU)
    expected, seeds = expect(benchmark.reference, inputs, torch.float64)
    forward = benchmark.providers["ours"](case, CPU)
    torch._dynamo.reset()
    compiled = torch.compile(forward, fullgraph=True, dynamic=False, backend="aot_eager")
    for provider in (benchmark.providers["plain"](case, CPU), compiled):
        verdict = verify(provider, inputs, seeds, expected, benchmark.tolerance(case))
        assert verdict.right, verdict.reason


def test_a_model_with_our_operators_is_right():
    benchmark = load(ROOT / "tools" / "bench_model.py")
    case = next(case for case in benchmark.cases if case.name == "small")
    inputs = make_inputs(benchmark, case, CPU)
    expected, seeds = expect(benchmark.reference, inputs, torch.float64)
    for name in ("ours", "plain"):
        verdict = verify(benchmark.providers[name](case, CPU), inputs, seeds, expected, 2**-3)
        assert verdict.right, (name, verdict.reason)


MEASURED = ("block", "host_npu")  # in tools/results; the others are predicted
HISTORIES = sorted(
    [
        *ROOT.glob("packages/*/benchmarks/results/**/*.json"),
        *(ROOT / "tools" / "results" / f"{name}.json" for name in MEASURED),
    ]
)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda path: str(path.relative_to(ROOT)))
def test_records_name_a_commit_or_say_that_none_has_what_was_measured(history):
    for record in json.loads(history.read_text()):
        assert re.fullmatch(r"\d+\.\d+\.\d+\+(g[0-9a-f]{7,}(\.dirty)?|unversioned)(\.\w+)*", record["version"])
