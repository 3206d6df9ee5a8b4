"""Rules of the chip that final modules keep: blocks of 32 bytes in the Unified Buffer, and numbers of flags."""

import pytest
import sample_kernels
import torch
from npu_offline import FindingsError, emulate
from npu_offline.module.mlir import name_of, parse_attribute, property_of
from xdsl.dialects.builtin import IntegerAttr, MemRefType, i64
from xdsl.rewriter import Rewriter

TOOLCHAINS = ("1.0.0", "1.1.0", "1.2.0")


def cast():
    sample_kernels.cast[(1,)](torch.randn(128).bfloat16(), torch.empty(128), BN=128)


def row_sums():
    sample_kernels.row_sums[(1,)](torch.randn(5, 256), torch.empty(5), 5, BM=8, D=256)


def buffers(module, shape):
    found = [op for op in module.walk() if name_of(op) == "hivm.hir.pointer_cast"]
    return [op for op in found if list(op.results[0].type.get_shape()) == shape]


def move(op, distance):
    """Place a buffer so many bytes on."""
    old = op.operands[0].owner
    new = old.clone()
    new.properties["value"] = IntegerAttr(old.properties["value"].value.data + distance, i64)
    op.parent.insert_op_before(new, op)
    op.operands[0] = new.results[0]


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
@pytest.mark.parametrize("distance", [4, 16])
def test_a_buffer_off_32_bytes_is_found_at_each_instruction_that_takes_it(toolchain, distance):
    def mutate(module):
        for op in buffers(module, [128]):
            move(op, distance)

    with emulate(toolchain=toolchain, checks=True, mutate=mutate), pytest.raises(FindingsError) as caught:
        cast()
    found = [str(finding) for finding in caught.value.findings if finding.kind == "alignment"]
    for word in ("load", "vcast", "store"):
        assert any(word in text and "no multiple of 32" in text for text in found)


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_rows_whose_pitch_the_chip_rounds_up_are_found(toolchain):
    x, y = torch.randn(8, 250), torch.empty(8)

    def mutate(module):
        for op in module.walk():
            kind = op.results[0].type if name_of(op) == "hivm.hir.pointer_cast" else None
            if kind is not None and list(kind.get_shape()) == [8, 256] and "f32" in str(kind):
                narrow = MemRefType(kind.element_type, [8, 251], memory_space=kind.memory_space)
                Rewriter.replace_value_with_new_type(op.results[0], narrow)

    with emulate(toolchain=toolchain, checks=True):
        sample_kernels.narrow_row_sums[(1,)](x, y, 250, BM=8, D=256)
    with emulate(toolchain=toolchain, checks=True, mutate=mutate), pytest.raises(FindingsError) as caught:
        sample_kernels.narrow_row_sums[(1,)](x, y, 250, BM=8, D=256)
    assert any("rows of" in str(finding) and "1004 bytes apart" in str(finding) for finding in caught.value.findings)


def renumbered(number, source, target):
    def mutate(module):
        for op in module.walk():
            pipes = [str(property_of(op, which)) for which in ("set_pipe", "wait_pipe")]
            if name_of(op) in ("hivm.hir.set_flag", "hivm.hir.wait_flag") and source in pipes[0] and target in pipes[1]:
                op.properties["static_event_id"] = parse_attribute(f"#hivm.event<EVENT_ID{number}>")

    return mutate


@pytest.mark.parametrize("toolchain", TOOLCHAINS)
@pytest.mark.parametrize(
    ("number", "says"), [(11, "a core has the flags 0 to 7"), (7, "is reserved for functions"), (6, "")]
)
def test_a_flag_number_that_a_module_may_not_take_is_found(toolchain, number, says):
    mutate = renumbered(number, "PIPE_MTE2", "PIPE_V")
    with emulate(toolchain=toolchain, checks=True, mutate=mutate, keep_going=True) as emulation:
        cast()
    notes = [str(note) for note in emulation.launches[0].notes]
    assert len(notes) == bool(says)
    assert all(f"flag {number} of MTE2 to V" in note and says in note for note in notes)
