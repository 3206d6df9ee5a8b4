"""`npu_rms_norm.patch` and each norm class of transformers: it computes what it did, or is left and named here."""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import types
from pathlib import Path

import pytest
import torch
from npu_rms_norm import patch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.0")
FILES = sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))
#: Classes that compute something else, with what it is.
LEFT = {
    "DoryL2Norm": "a sum of squares in place of their mean",
    "HYV4UnweightedRMSNorm": "1 / rms alone",
    "HYV4VLUnweightedRMSNorm": "1 / rms alone",
    "MuseSparkTextInputScaledRMSNorm": "weighted before it is normalised",
    "AXK2GatedRMSNorm": "a norm and a gate computed from it by layers; the norm inside is replaced",
    "VoxtralRealtimeTextAdaRmsNorm": "two linear layers",
    "GradiumPhononTTSTimestepNorm": "statistics in bf16",
}
LEAST = 200  # classes are replaced in 5.23 and later; of 5.24's 226, 219
ROWS_AND_WEIGHT = [
    (torch.float32,) * 2,
    (torch.bfloat16,) * 2,
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]


def classes():
    """Every class whose name or code says that it normalises by a root mean square."""
    for file in FILES:
        text = file.read_text()
        starts = [(match[1], match.start()) for match in re.finditer(r"^class (\w+)\(", text, re.M)]
        for (name, start), end in zip(starts, [*(start for _, start in starts[1:]), None], strict=True):
            code = text[start:end]
            has_formula = "norm" in name.lower() and "pow(2).mean(" in code and not re.search(r"self\.bias|- mean\)", code)
            if re.search("rms_?norm|l2norm", name, re.I) or has_formula:
                yield f"transformers.models.{file.parent.name}.{file.stem}", name


def make(known, width):
    """A norm with random weights; None of a class that is made of other modules."""
    sizes = [
        each
        for each in inspect.signature(known).parameters.values()
        if each.kind is each.POSITIONAL_OR_KEYWORD and (each.default is each.empty or each.name in ("dim", "hidden_size"))
    ]
    if any(each.name == "config" for each in sizes):
        if known.__name__ in LEFT:
            return None
        sizes, width = [None], types.SimpleNamespace(hidden_size=width, eps=1e-6)
    norm = known(*[width] * len(sizes))
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def gated(known):
    return "gate" in inspect.signature(known.forward).parameters


def results(norm, dtypes, width):
    generator = torch.Generator().manual_seed(1)
    norm = copy.deepcopy(norm).to(dtypes[1])
    x, gate = (torch.randn(2, 31, width, generator=generator).to(dtypes[0]).requires_grad_() for _ in range(2))
    given = (x, gate) if gated(type(norm)) else (x,)
    y = norm(*given)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    return y.detach(), [each.grad for each in (*given, *norm.parameters())]


def check(known, width=96):
    """Whether `patch` replaces a class. Raises where the results are not those that it had."""
    norm = make(known, width)
    if norm is None or not patch(patched := copy.deepcopy(norm)).replaced:
        return False
    for dtypes in ROWS_AND_WEIGHT:
        (theirs, wanted), (ours, found) = results(norm, dtypes, width), results(patched, dtypes, width)
        assert ours.dtype == theirs.dtype
        exact = dtypes == (torch.float32,) * 2
        assert (ours != theirs).float().mean() <= (1 if exact else 0.003), f"{known.__name__} {dtypes}"
        eps = torch.finfo(ours.dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=(8 if exact else 2) * eps, atol=eps * 1e-6)
        for one, other in zip(found, wanted, strict=True):
            # theirs rounds each product of its backward, of up to 62 rows
            scale = 0 if other is None else other.abs().max().item()
            torch.testing.assert_close(one, other, rtol=0, atol=scale * (1e-5 if exact else 2**-5))
    return True


SAMPLE = {
    "llama": "LlamaRMSNorm",
    "gemma": "GemmaRMSNorm",
    "olmo2": "Olmo2RMSNorm",
    "llama4": "Llama4TextRMSNorm",
    "gemma3n": "Gemma3nRMSNorm",
    "t5": "T5LayerNorm",
    "deepseek_v4": "DeepseekV4UnweightedRMSNorm",
    "falcon_mamba": "FalconMambaWeightlessRMSNorm",
    "mamba2": "MambaRMSNormGated",
    "kimi_linear": "KimiLinearRMSNormGated",
    "falcon_h1": "FalconH1RMSNormGated",
}


@pytest.mark.parametrize("model", SAMPLE)
def test_a_class_is_known_by_what_it_computes(model):
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    assert check(getattr(module, SAMPLE[model]))


@pytest.mark.nightly
def test_every_norm_class_is_replaced_or_named_here(capsys):
    replaced, left = set(), {}
    for module, name in classes():
        known = getattr(importlib.import_module(module), name)
        (replaced.add if check(known) else left.setdefault)(name)
    with capsys.disabled():
        print(f"\ntransformers {transformers.__version__}: {len(replaced)} norm classes replaced, {len(left)} left")
    assert set(left) <= set(LEFT)
    assert not replaced & set(LEFT)
    assert len(replaced) >= LEAST
