"""Costs of instructions, with the source of every number; ascend950.py and register_costs.py have the Ascend950's.

Four kinds of source stand in the comments:

- *chip*: the compiler's target table, or the vendor's configuration file of the Ascend910B1 (`Ascend910B1.ini`: memory
  rates in bytes per cycle and core), of the same architecture.
- *vendor model*: the cost model of A2 and A3 chips that Huawei publishes with its PTO tile library (`pto-isa`,
  include/pto/costmodel: a2a3 and arch_config.hpp, version of September 2026), which says it was measured on a 910B1.
- *published*: measurements of an Ascend910B4; those of kernels are in tools/compare/published.py. Where those of bandwidth,
  of a transfer's start and of launches were published was not recorded.
- *inferred*: not measured; the reasoning is in the comment.
"""

from __future__ import annotations

from dataclasses import dataclass

import npu_tiling

from ..errors import UnsupportedError
from . import ascend950, cube_costs
from .cube_costs import CubeCosts

VECTOR_BYTES = 256  # chip: one repeat of a vector instruction, 64 lanes of fp32
BLOCK_BYTES = 32  # chip: the unit of the Unified Buffer, and of the DMA engine


@dataclass(frozen=True)
class VectorCost:
    """Cycles of a vector instruction: `per_repeat` for each 256 bytes, and `latency` until its result can be used."""

    per_repeat: float
    latency: float


#: By the instruction's name in the module. vendor model: its measurements of fp32 on the 910B1. An instruction that follows
#: another at once costs its repeats alone; the latency shows where a barrier or flag waits for the result.
VECTOR_COSTS = {
    "vadd": VectorCost(2.07, 5.9),  # two tensors are read: two cycles a repeat
    "vsub": VectorCost(2.07, 5.9),
    "vmul": VectorCost(2.13, 6.9),
    "vmax": VectorCost(2, 4),
    "vmin": VectorCost(2, 4),
    "vand": VectorCost(2, 2.1),
    "vor": VectorCost(2, 2.1),
    "vxor": VectorCost(2, 2.1),  # inferred: as vor
    "vdiv": VectorCost(4, 13),
    "vrec": VectorCost(4, 13),  # inferred: as vdiv
    "vadds": VectorCost(1, 6),  # one tensor and a number: one cycle
    "vsubs": VectorCost(1, 6),  # inferred: as vadds
    "vmuls": VectorCost(1, 7),
    "vmaxs": VectorCost(1, 4),
    "vmins": VectorCost(1, 4),
    "vabs": VectorCost(1, 4),
    "vrelu": VectorCost(1, 4),
    "vnot": VectorCost(1, 2.1),
    "vneg": VectorCost(1, 7),  # inferred: as vmuls
    "vshl": VectorCost(1, 6),
    "vshr": VectorCost(1, 6),
    "vexp": VectorCost(2, 12),
    "vln": VectorCost(2, 14),
    "vsqrt": VectorCost(2, 13),
    "vrsqrt": VectorCost(1.06, 4.8),
    "vcast": VectorCost(1, 4),  # vconv of fp32 to fp16; the others inferred from it
    "vcmp": VectorCost(2, 10),
    "vcmps": VectorCost(2, 10),  # inferred: as vcmp
    "vsel": VectorCost(2, 5),
    "vbrc": VectorCost(1, 1),  # vbrcb, vector_dup
    "copy": VectorCost(1.06, 0.9),  # vcopy
    "varange": VectorCost(2.07, 5.9),  # inferred: additions
    "reduce": VectorCost(7, 20),  # vcadd, of 64 lanes to one
}


@dataclass(frozen=True)
class ChipCosts:
    """The rates of one chip. Times in seconds, rates in bytes per second, everything else in cycles.

    Attributes:
        vector_cores: how many cores run vector programs.
        cycle: of the core clock.
        peak_bandwidth: of main memory, reads and writes together, over all cores.
        bandwidth: of main memory, as copies reach it.
        cache_bytes: of the L2 cache, over all cores.
        load_port, store_port: the peak of one core, from and to global memory.
        typical_load_port, typical_store_port: the same in the vendor's model.
        transfer_start: of each DMA transfer, during which its pipe does nothing else.
        scalar_op: one integer operation of the scalar unit.
        scalar_global: one element read from or written to global memory by the scalar unit.
        scalar_local: one element read from or written to the Unified Buffer by the scalar unit.
        launch: from the command to the first instruction, and from the last one to the end.
        cube: costs of its cube cores; None if they are not known.
        registers: whether the vector unit computes on registers, in vector functions, not on the Unified Buffer.
    """

    vector_cores: int
    cycle: float
    peak_bandwidth: float
    bandwidth: float
    cache_bytes: int
    load_port: float
    store_port: float
    typical_load_port: float
    typical_store_port: float
    transfer_start: float
    scalar_op: float
    scalar_global: float
    scalar_local: float
    launch: float
    cube: CubeCosts | None = None
    registers: bool = False


_MIB = 2**20
_CACHE = {"Ascend910B4": 96 * _MIB}  # chip (secondary)
_OTHER_CACHE = 192 * _MIB
_ACHIEVED = 0.75 / 0.8  # published: 0.75 TB/s reached of 0.8 on the Ascend910B4
_TRANSFER_START = 220e-9 / 2  # published: 220 ns for a tile's load and store together. Inferred: half for each.
# Inferred: the published embedding kernel takes 204 cycles for each element it moves, a read and a write.
_SCALAR_GLOBAL = 204 / 2
_SCALAR_LOCAL = 20  # inferred: of the order of a vector instruction's latency, without its arithmetic
_LAUNCH = (2.4e-6 + 3.6e-6) / 2  # published: from 2.4 to 3.6 us


def costs_of(soc: str) -> ChipCosts:
    """The rates of a chip.

    Raises:
        UnsupportedError: no bandwidth or clock is known for it.
    """
    device = npu_tiling.soc(soc)
    if device.arch == "dav-c310":
        return _ascend950(device)
    if device.bandwidth is None or device.clock_hz is None:
        raise UnsupportedError(f"soc is {soc}, must be a chip whose bandwidth and clock are known")
    cycle = 1 / device.clock_hz
    return ChipCosts(
        vector_cores=device.vector_cores,
        cycle=cycle,
        peak_bandwidth=device.bandwidth,
        bandwidth=device.bandwidth * _ACHIEVED,
        cache_bytes=_CACHE.get(soc, _OTHER_CACHE),
        load_port=110 / cycle,  # chip: l2_read_rate
        store_port=86 / cycle,  # chip: l2_write_rate
        typical_load_port=100.9 * 2**30 / 1.85e9 / cycle,  # vendor model: 100.9 GiB/s, at its clock; its GB are 2**30 bytes
        typical_store_port=64 / cycle,  # chip: ub_to_l2_rate; the vendor model's 188 GiB/s would be 109 bytes a cycle
        transfer_start=_TRANSFER_START,
        scalar_op=1,  # inferred: one a cycle
        scalar_global=_SCALAR_GLOBAL,
        scalar_local=_SCALAR_LOCAL,
        launch=_LAUNCH,
        cube=CubeCosts(cores=device.cube_cores, typical_load_port=min(cube_costs.LOAD_PORT, 110 / cycle)),
    )


def _ascend950(device: npu_tiling.Device) -> ChipCosts:
    memory = ascend950.memory_of(device.name)
    if memory is None:
        raise UnsupportedError(f"soc is {device.name}, must be a chip whose bandwidth and clock are known")
    return ChipCosts(
        vector_cores=device.vector_cores,
        cycle=1 / ascend950.CLOCK,
        peak_bandwidth=memory.peak,
        bandwidth=memory.achieved,
        cache_bytes=ascend950.CACHE,
        load_port=ascend950.LOAD_PORT * ascend950.CLOCK,
        store_port=ascend950.STORE_PORT * ascend950.CLOCK,
        typical_load_port=ascend950.TYPICAL_LOAD_PORT * ascend950.CLOCK,
        typical_store_port=ascend950.TYPICAL_STORE_PORT * ascend950.CLOCK,
        transfer_start=ascend950.TRANSFER_START,
        scalar_op=1,  # inferred: as on the Ascend910B, like the rest
        scalar_global=_SCALAR_GLOBAL,
        scalar_local=_SCALAR_LOCAL,
        launch=_LAUNCH,
        registers=True,
    )
