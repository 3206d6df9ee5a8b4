"""`npu-offline releases`: the defaults of another triton-ascend, compiled by the real compilers."""

import re

import pytest
import triton.backends.ascend.compiler as of_triton_ascend
from npu_offline import CompilationError, ToolchainMissingError
from npu_offline.cli import main
from npu_offline.commands import releases
from npu_offline.toolchain import compilation
from npu_tiling import doctor
from sample_kernels import rms_norm

SIGNATURE = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16", "n_rows": "i32", "eps": "fp32"}


def a_launch():
    return compilation.as_record(rms_norm, SIGNATURE, {"D": 512, "BM": 8}, None)


@pytest.mark.parametrize("soc", releases.SOCS)
def test_a_kernel_is_the_same_with_3_2_1(soc):
    assert releases.changed(a_launch(), releases.RELEASES["3.2.1"], soc, "1.2.0") == ""


def test_an_option_that_changes_the_module_is_seen():
    single = releases.Release({"multibuffer": False}, (), ())
    assert releases.changed(a_launch(), single, "Ascend910B4", "1.2.0") == "another final module"


def test_flags_of_the_compiler_for_the_950_are_given_to_it_alone():
    unknown = releases.Release({}, ("--no-such-flag",), ())
    assert releases.changed(a_launch(), unknown, "Ascend910B4", "1.2.0") == ""
    with pytest.raises(CompilationError, match="no-such-flag"):
        releases.changed(a_launch(), unknown, "Ascend950PR_957b", "1.2.0")


def test_the_attribute_that_does_not_count_is_in_the_module(monkeypatch):
    """Where it counts, the release changes the module."""
    monkeypatch.setattr(releases, "_MIX_MODE", re.compile("nothing of the kind"))
    launch = a_launch()
    assert releases.changed(launch, releases.RELEASES["3.2.1"], "Ascend910B4", "1.2.0") == "another final module"


def test_another_release_in_the_environment_is_refused(monkeypatch):
    """The passes that are driven are of one release."""
    monkeypatch.setattr(doctor, "version", {"triton-ascend": "3.6.0"}.get)
    with pytest.raises(
        ToolchainMissingError, match=r"triton-ascend 3\.2\.0, not of 3\.6\.0\. Cure: pip install .*==3\.2\.0"
    ):
        compilation.compile_kernel(a_launch())


def test_options_are_of_3_2_0_and_have_other_values_there():
    for release in releases.RELEASES.values():
        defaults = {name: field.default for name, field in of_triton_ascend.NPUOptions.__dataclass_fields__.items()}
        assert set(release.options) <= set(defaults)


def test_command_counts_tiles_and_says_what_was_not_run(capsys, tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef copy(x_ptr, y_ptr, BN: tl.constexpr):\n"
        "    o = tl.arange(0, BN)\n    tl.store(y_ptr + o, tl.load(x_ptr + o))\n"
    )
    arguments = ["x_ptr=fp32:64", "y_ptr=fp32:64", "BN=64", "--grid", "1", "--soc", "Ascend910B4"]
    assert main(["releases", f"{file}::copy", *arguments]) == 0
    said = capsys.readouterr().out
    assert "1 tiles, 0 changed by 3.2.1" in said
    assert "not run: auto_blockify_size" in said
