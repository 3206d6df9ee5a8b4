"""Every number of the time model that is not of one instruction, with its source, chip and software.

The comparison with published times leaves out the points that a number was chosen after: `Constant.fitted`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SOURCES = {
    "target table": "the compilers' table of targets, `dlti.target_system_spec` of a final module",
    "chip file": "Huawei's configuration file Ascend910B1.ini: bytes per cycle and core",
    "pto-isa": "hw-native-sys/pto-isa, include/pto/costmodel (a2a3, arch_config.hpp), September 2026: measured on a 910B1",
    "pypto": "hicann/pypto, backend_handler.h, 2026: fitted by its authors to sweeps on devices",
    "tilesim": "shane-kshongmo/vTriton at c54407b, configs/ascend_910b.json: the table of tilesim, vec_cycle_910B1.csv",
    "vTriton calibration": "shane-kshongmo/vTriton at c54407b, perfbound/calibration: single-pipe kernels under msprof",
    "vTriton profiles": "shane-kshongmo/vTriton at c54407b, op_summary files: a task's duration less its cores' time. 40"
    " programs leave 2.3 to 2.7 us (medians of 5 files, 2130 launches), one leaves .5 to .6 (14 files, 630): less than here",
    "vTriton kernels": "shane-kshongmo/vTriton at c54407b, tests/perfbound/fixtures; torch_npu copies 134 MB in 217 us",
    "vTriton loop": "shane-kshongmo/vTriton at c54407b, hw_runs/seeded_serial: a loop of two vector operations by pipe",
    "asc-devkit": "hicann/asc-devkit, README of the example data_copy: msprof times of DMA loops",
    "950 file": "hicann/pypto, configuration files 950PR_957x.ini and its three siblings",
    "950 roofline": "a5-roofline-and-levers.md of PyPTO's kernels, July 2026",
    "GE": "hicann/ge, the graph compiler's linear models and its table perf_param_v2.cpp",
    "Ascend C manual": "hicann/asc-devkit, summary of single and dual issue of instructions on registers",
    "embedding kernel": "linkedin/Liger-Kernel#1028: an element moved takes 204 cycles, a read and a write",
    "comparison": "tools/compare: published times beside predictions; of those that no number was chosen after",
    "inferred": "not measured; the constant's text says why",
}
"""What a constant may name as its source."""


@dataclass(frozen=True)
class Constant:
    """A number.

    Attributes:
        value: in the unit.
        unit: s, B/s, B/cycle, cycles, B, or "" for a ratio.
        meaning: what it is the number of.
        source: a key of `SOURCES`.
        chip: what it was measured on, or is stated for.
        stack: the software it was measured with; "none" for what is stated of the chip alone, "not stated" otherwise.
        fitted: the beginnings of labels of published points that it was chosen after; empty where none.
        pipe: the pipe whose published time it was chosen after.
    """

    value: float
    unit: str
    meaning: str
    source: str
    chip: str
    stack: str
    fitted: tuple[str, ...] = ()
    pipe: str = ""


_B1, _B3, _B4, _A2, _PR, _DT = "Ascend910B1", "Ascend910B3", "Ascend910B4", "Ascend910B and A3", "Ascend950PR", "Ascend950DT"
_NONE, _UNSTATED, _9 = "none", "not stated", "CANN 9.0"
_ONE_ROW = ("vTriton rmsnorm", "vTriton layernorm")

RANGE_LOW = Constant(0.76, "", "of an estimate: one published time in twenty is shorter", "comparison", _A2, "several")
RANGE_HIGH = Constant(1.31, "", "of an estimate: one published time in twenty is longer", "comparison", _A2, "several")

VECTOR_BYTES = Constant(256, "B", "a repeat of a vector instruction", "target table", _A2, _NONE)
BLOCK_BYTES = Constant(32, "B", "the unit of the Unified Buffer and of the DMA engine", "target table", _A2, _NONE)
CACHE = Constant(192 * 2**20, "B", "L2 cache", "vTriton calibration", _B3, _9)
CACHE_B4 = Constant(96 * 2**20, "B", "L2 cache of the Ascend910B4", "inferred", _B4, _NONE)

LAUNCH = Constant(1.0e-6, "s", "a launch, whatever its programs", "vTriton profiles", _B3, _9)
LAUNCH_BLOCK = Constant(0.04e-6, "s", "of a launch, each core that runs programs", "vTriton profiles", _B3, _9)
NEXT_PROGRAM = Constant(
    0.75e-6, "s", "a further program of a core", "vTriton kernels", _B3, _9, ("vTriton vector_add",), "S"
)

READ = Constant(
    1.49 / 1.6,
    "",
    "of the peak of main memory, what loads reach",
    "asc-devkit",
    _A2,
    _9,
    ("asc-devkit data_copy rows=64 columns=1024 repeats=1 ",),
    "MTE2",
)
COPY = Constant(2 * 134.2 / 217 / 1.6, "", "of the peak of main memory, what copies reach", "vTriton kernels", _B3, _9)
LOAD_PORT = Constant(110, "B/cycle", "a core's loads, at most", "chip file", _B1, _NONE)
STORE_PORT = Constant(86, "B/cycle", "a core's stores, at most", "chip file", _B1, _NONE)
TYPICAL_LOAD_PORT = Constant(100.9 * 2**30 / 1.85e9, "B/cycle", "a core's loads", "pto-isa", _B1, _UNSTATED)
TYPICAL_STORE_PORT = Constant(64, "B/cycle", "a core's stores (UB to L2)", "chip file", _B1, _NONE)
TRANSFER_START = Constant(
    548.161e-6 / 49152 - 128 / (1.49e12 / 48),
    "s",
    "of a pipe, each DMA transfer beside its bytes: 49152 loads of 128 bytes by each of 48 cores take 548 us",
    "asc-devkit",
    _A2,
    _9,
    ("asc-devkit data_copy rows=1 ",),
    "MTE2",
)
TRANSFER_LATENCY = Constant(115e-9, "s", "from a DMA transfer's last byte to what waits for it", "pto-isa", _B1, _UNSTATED)
MEMORY_LATENCY = Constant(
    (200 - 50) / 1.85e9, "s", "the same, further, where bytes come from main memory", "vTriton calibration", _B1, _UNSTATED
)
SAME_ADDRESS = Constant(
    round(474.717 / 307.38, 2),
    "",
    "times as long, loads of the same addresses in the same order by all cores",
    "asc-devkit",
    _A2,
    _9,
)

VECTOR_HEAD = Constant(13, "cycles", "from a vector instruction's start to its first result", "tilesim", _B1, _UNSTATED)
SCALAR_OP = Constant(3.08, "cycles", "an operation of the scalar unit", "vTriton calibration", _B3, _9)
SCALAR_FLOAT = Constant(
    500, "cycles", "a division or root of floats in the scalar unit", "vTriton kernels", _B3, _9, _ONE_ROW, "S"
)
ISSUE = Constant(
    5.5, "cycles", "of the scalar unit, each instruction that it issues", "vTriton loop", _B3, _9, ("vTriton seeded",), "S"
)
SCALAR_GLOBAL = Constant(
    204 / 2, "cycles", "an element of global memory, by the scalar unit", "embedding kernel", _B4, _UNSTATED
)
SCALAR_LOCAL = Constant(
    20,
    "cycles",
    "an element of the UB, by the scalar unit: of the order of a vector instruction's latency",
    "inferred",
    _A2,
    _NONE,
)

FRACTAL = Constant(16, "", "rows and columns that the matrix unit multiplies in a cycle", "target table", _A2, _NONE)
FRACTAL_BYTES = Constant(32, "B", "of a row along k, the same", "target table", _A2, _NONE)
L0_BYTES = Constant(64 * 1024, "B", "L0A, and L0B", "target table", _A2, _NONE)
CUBE_LOAD_PORT = Constant(135 * 2**30, "B/s", "global memory to L1, whatever the chip's clock", "pto-isa", _B1, _UNSTATED)
PRODUCT_HEAD = Constant(21, "cycles", "of an instruction of the matrix unit, beside its products", "pypto", _A2, _UNSTATED)
PASSES_FP32 = Constant(2, "cycles", "a fractal of fp32", "pypto", _A2, _UNSTATED)
TO_L0A = Constant(129.7, "B/cycle", "L1 to L0A", "pypto", _A2, _UNSTATED)
TO_L0B = Constant(85.4, "B/cycle", "L1 to L0B", "pypto", _A2, _UNSTATED)
TO_L0A_PEAK = Constant(512, "B/cycle", "L1 to L0A, at most", "chip file", _B1, _NONE)
TO_L0B_PEAK = Constant(256, "B/cycle", "L1 to L0B, at most", "chip file", _B1, _NONE)
DRAIN_ROW = Constant(4.45, "cycles", "a row of L0C through the fixpipe, at least", "pypto", _A2, _UNSTATED)
DRAIN_BYTES = Constant(118, "B/cycle", "a row of L0C through the fixpipe", "pypto", _A2, _UNSTATED)
DRAIN_TURN = Constant(2.6, "cycles", "a row's further turn, of groups that are no power of two", "pypto", _A2, _UNSTATED)
DRAIN_GROUP = Constant(8, "", "numbers of a group", "pypto", _A2, _UNSTATED)
FILL = Constant(32 * 2**30 / 1.85e9, "B/cycle", "L1 with a number", "pto-isa", _B1, _UNSTATED)

CLOCK_950 = Constant(1.65e9, "1/s", "vector clock", "950 file", _PR, _NONE)
CACHE_950 = Constant(128 * 2**20, "B", "L2 cache", "950 file", _PR, _NONE)
LOAD_PORT_950 = Constant(100, "B/cycle", "a core's loads, at most", "950 file", _PR, _NONE)
STORE_PORT_950 = Constant(100, "B/cycle", "a core's stores, at most", "950 file", _PR, _NONE)
TYPICAL_LOAD_PORT_950 = Constant(
    53, "B/cycle", "a core's loads: the part of the peak that a 910B1's are", "inferred", _PR, _NONE
)
TYPICAL_STORE_PORT_950 = Constant(42, "B/cycle", "a core's stores (UB to L2)", "950 file", _PR, _NONE)
TRANSFER_LATENCY_950 = Constant(160 / 1.65e9, "s", "a load or store, beside its bytes", "GE", _PR, _NONE)
PEAK_PR = Constant(1.74e12, "B/s", "main memory, at most: loads of weights", "950 roofline", _PR, _UNSTATED)
READ_PR = Constant(1.7e12, "B/s", "main memory: loads", "950 roofline", _PR, _UNSTATED)
COPY_PR = Constant(1.17e12, "B/s", "main memory: a fused normalisation", "950 roofline", _PR, _UNSTATED)
PEAK_DT = Constant(64 * 40 * 1.65e9, "B/s", "main memory, at most: 64 cores of 40 bytes a cycle", "950 file", _DT, _NONE)
DT_TO_PR = Constant(
    4.0 / 1.6, "", "main memory of a 950DT over a 950PR's, as announced: so is what is reached", "inferred", _DT, _NONE
)
FUNCTION_HEAD = Constant(20, "cycles", "a vector function's start", "GE", _PR, _NONE)
REGISTER_ACCESSES = Constant(2, "", "registers that the UB gives or takes in a cycle", "Ascend C manual", _PR, _NONE)
REGISTER_ISSUE = Constant(2, "", "instructions issued in a cycle", "Ascend C manual", _PR, _NONE)
REGISTER_STORE = Constant(1, "cycles", "a store of a register", "GE", _PR, _NONE)
REGISTER_STORE_NARROW = Constant(5, "cycles", "a store of elements of 8 or 16 bits", "GE", _PR, _NONE)


def constants() -> Mapping[str, Constant]:
    """Every constant by its name."""
    return {name: value for name, value in globals().items() if isinstance(value, Constant)}


def is_fitted(label: str, pipe: str = "") -> bool:
    """Whether a constant was chosen after a published point, or after its time of a pipe."""
    return any(
        label.startswith(beginning) and pipe in ("", constant.pipe)
        for constant in constants().values()
        for beginning in constant.fitted
    )
