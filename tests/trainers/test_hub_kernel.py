"""The kernel repository for the Hub, as the package `kernels` loads it and puts its layers into a model."""

import ast
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

from tools.hub_kernel import build, files

ALLOWED = {"torch", "triton"}  # triton is imported when a kernel is launched


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """With a variant for CPUs, which is tested here and not published."""
    folder = tmp_path_factory.mktemp("hub")
    build(folder, ("npu", "cuda", "cpu"))
    return folder


@pytest.fixture
def kernels():
    try:
        version("kernels")  # files of kernels that other tests make have that name too
    except PackageNotFoundError:
        pytest.skip("the package kernels is not installed")
    return pytest.importorskip("kernels")


@pytest.mark.slow
def test_nothing_but_torch_and_the_standard_library_is_imported():
    for path, text in files("npu").items():
        if path == "metadata.json":
            continue
        checked_by_types = [
            part
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for part in ast.walk(node)
        ]
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            tops = {name.partition(".")[0] for name in names}
            known = {ast.unparse(part) for part in checked_by_types if isinstance(part, ast.ImportFrom)}
            assert tops <= ALLOWED | set(sys.stdlib_module_names) or ast.unparse(node) in known, (path, ast.unparse(node))


@pytest.mark.parametrize("backend", ["cpu", "cann", "cuda"])
def test_variant_of_a_backend_is_loaded(kernels, repository, backend, monkeypatch):
    from kernels import backends
    from packaging.version import Version

    known = {"cann": backends.CANN(version=Version("8.5")), "cuda": backends.CUDA(version=Version("12.8"))}
    monkeypatch.setattr(backends, "_backend", lambda: known.get(backend) or backends.CPU())
    module = kernels.get_local_kernel(repository, backend=backend)
    variant = "npu" if backend == "cann" else backend
    assert f"torch-{variant}" in module.__file__
    x = torch.randn(3, 8)
    torch.testing.assert_close(module.rms_norm(x, eps=1e-5), torch.nn.functional.rms_norm(x, (8,), eps=1e-5))


def test_layers_of_the_repository_replace_a_models_norms(kernels, repository, monkeypatch):
    """On a CPU, also where torch is a build for something else."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import npu_rms_norm  # its operators are registered too
    from kernels import LocalLayerRepository, Mode, backends, kernelize, use_kernel_mapping

    monkeypatch.setattr(backends, "_backend", backends.CPU)
    assert npu_rms_norm.rms_norm(torch.ones(2, 4)).shape == (2, 4)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, num_hidden_layers=2, vocab_size=64)).train()
    ids = torch.randint(64, (2, 16))
    expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    layer = LocalLayerRepository(repository, layer_name="RMSNorm")
    with use_kernel_mapping({"RMSNorm": {"cpu": {Mode.TRAINING: layer}}}):
        kernelize(model, mode=Mode.TRAINING, device="cpu")
    norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    assert len(norms) == 9
    assert {norm.forward.__func__.__module__.partition(".")[0][:18] for norm in norms} == {"_npu_rms_norm_cpu_"}
    loss = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
