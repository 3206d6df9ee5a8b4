import subprocess
import sys
from collections import namedtuple
from types import SimpleNamespace

import npu_tiling
import pytest
import torch
from npu_tiling import SOCS, Device, UnknownDeviceError, device_for, dry_run, soc, use_device
from npu_tiling import chips as detection


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.setattr(detection, "_found", {})
    monkeypatch.delenv(npu_tiling.SOC_VARIABLE, raising=False)


@pytest.fixture
def npu(monkeypatch):
    """A stand-in for torch_npu; its properties can be set."""
    properties = SimpleNamespace(name="Ascend910B4", total_memory=32 << 30)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(get_device_properties=lambda device: properties), raising=False)
    return properties


NpuDevice = namedtuple("NpuDevice", "type index")  # torch.device("npu") exists only where torch_npu is installed
NPU = NpuDevice("npu", 0)


def test_import_brings_neither_torch_nor_triton():
    code = "import sys, npu_tiling; sys.exit(any(name in sys.modules for name in ('torch', 'triton')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("chip", SOCS.values(), ids=lambda chip: chip.name)
def test_every_chip_has_two_vector_cores_to_a_cube_core(chip):
    assert chip.vector_cores == 2 * chip.cube_cores
    assert chip.ub_bytes % chip.ub_align == 0


def test_buffers_and_cores_of_known_chips():
    assert (soc("Ascend910B4").vector_cores, soc("Ascend910B4").ub_bytes) == (40, 196608)
    assert (soc("Ascend910B1").vector_cores, soc("Ascend910_9382").cube_cores) == (48, 24)
    assert (soc("Ascend950PR_957b").vector_cores, soc("Ascend950PR_957b").ub_bytes) == (56, 253952)


def test_cpu_tensors_have_no_kernels():
    assert device_for(torch.device("cpu")) is None


def test_emulated_override_serves_cpu_tensors_and_ends():
    with use_device(soc("Ascend910B1"), emulated=True):
        assert device_for(torch.device("cpu")).name == "Ascend910B1"
        with use_device(soc("Ascend910_9362"), emulated=True):
            assert device_for(torch.device("cpu")).name == "Ascend910_9362"
        assert device_for(torch.device("cpu")).name == "Ascend910B1"
    assert device_for(torch.device("cpu")) is None


def test_plain_override_is_for_accelerators_alone(npu):
    with use_device(soc("Ascend910B1")):
        assert device_for(torch.device("cpu")) is None
        assert device_for(NPU).name == "Ascend910B1"


def test_override_ends_when_the_block_raises():
    with pytest.raises(ZeroDivisionError), use_device(soc("Ascend910B1"), emulated=True):
        1 / 0  # noqa: B018
    assert device_for(torch.device("cpu")) is None


@pytest.mark.parametrize("block", [use_device, dry_run])
def test_a_chip_is_no_name(block):
    with (
        pytest.raises(TypeError, match=r"'Ascend910B4' must be an npu_tiling\.Device, as npu_tiling\.soc"),
        block("Ascend910B4"),
    ):
        raise AssertionError
    assert device_for(torch.device("cpu")) is None


def test_npu_is_found_by_the_name_it_reports(npu):
    assert device_for(NPU) == soc("Ascend910B4")


def test_reported_core_counts_replace_the_table(npu):
    npu.vector_core_num, npu.cube_core_num = 32, 16
    found = device_for(NPU)
    assert (found.vector_cores, found.cube_cores, found.ub_bytes) == (32, 16, 196608)


def test_each_device_is_asked_for_itself(npu, monkeypatch):
    names = {0: "Ascend910B4", 1: "Ascend910B1"}
    monkeypatch.setattr(torch.npu, "get_device_properties", lambda device: SimpleNamespace(name=names[device.index]))
    assert [device_for(NpuDevice("npu", i)).name for i in (0, 1)] == ["Ascend910B4", "Ascend910B1"]


def test_environment_variable_comes_before_what_is_reported(npu, monkeypatch):
    monkeypatch.setenv(npu_tiling.SOC_VARIABLE, "Ascend910_9382")
    assert device_for(NPU).name == "Ascend910_9382"


@pytest.mark.parametrize("name", ["Ascend310P3", "", "ascend910b4"])
def test_unknown_chip_is_an_error_that_names_the_override(npu, name):
    npu.name = name
    with pytest.raises(UnknownDeviceError, match="NPU_TILING_SOC.*use_device"):
        device_for(NPU)


def test_other_device_types_are_refused():
    with pytest.raises(UnknownDeviceError, match="'meta'"):
        device_for(torch.device("meta"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device")
def test_cuda_device_describes_itself():
    device = device_for(torch.device("cuda", 0))
    assert device.kind == "cuda"
    assert device.vector_cores == torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.parametrize("arch", ["dav-c100", "dav-c410", "", "sm_90"])
def test_an_unknown_family_of_chips_is_refused_by_name(arch):
    with pytest.raises(UnknownDeviceError, match=f"arch of mine is '{arch}' and must be 'dav-c220' or 'dav-c310'"):
        Device("mine", "ascend", arch, vector_cores=40, cube_cores=20, ub_bytes=2**17)
    assert Device("mine", "cuda", "sm_120", vector_cores=40, cube_cores=20, ub_bytes=2**17).arch == "sm_120"
