"""Costs of vector instructions, and the rates of a chip. The numbers that are not of one instruction are in constants.py."""

from __future__ import annotations

from dataclasses import dataclass

import npu_tiling

from ..errors import OfflineError, UnsupportedError
from . import ascend950
from . import constants as c
from .cube_costs import CubeCosts

VECTOR_BYTES = int(c.VECTOR_BYTES.value)
BLOCK_BYTES = int(c.BLOCK_BYTES.value)
_PTO, _INFERRED = "pto-isa", "inferred"


@dataclass(frozen=True)
class VectorCost:
    """Cycles of a vector instruction.

    Attributes:
        per_repeat: for each 256 bytes.
        latency: from its last repeat until its result can be used.
        source: a key of `constants.SOURCES`.
    """

    per_repeat: float
    latency: float
    source: str = _PTO


#: By the instruction's name in the module, its cost for fp32 as measured on a 910B1. An instruction that follows another at
#: once costs its repeats alone; its head and latency show where a barrier or flag waits for the result.
VECTOR_COSTS = {
    "vadd": VectorCost(2.07, 5.9),  # two tensors are read: two cycles a repeat
    "vsub": VectorCost(2.07, 5.9),
    "vmul": VectorCost(2.13, 6.9),
    "vmax": VectorCost(2, 4),
    "vmin": VectorCost(2, 4),
    "vand": VectorCost(2, 2.1),
    "vor": VectorCost(2, 2.1),
    "vxor": VectorCost(2, 2.1, _INFERRED),  # as vor
    "vdiv": VectorCost(4, 13),
    "vrec": VectorCost(4, 13, _INFERRED),  # as vdiv
    "vadds": VectorCost(1, 6),  # one tensor and a number: one cycle
    "vsubs": VectorCost(1, 6, _INFERRED),  # as vadds
    "vmuls": VectorCost(1, 7),
    "vmaxs": VectorCost(1, 4),
    "vmins": VectorCost(1, 4),
    "vabs": VectorCost(1, 4),
    "vrelu": VectorCost(1, 4),
    "vnot": VectorCost(1, 2.1),
    "vneg": VectorCost(1, 7, _INFERRED),  # as vmuls
    "vshl": VectorCost(1, 6),
    "vshr": VectorCost(1, 6),
    "vshls": VectorCost(1, 6, _INFERRED),  # as vshl
    "vshrs": VectorCost(1, 6, _INFERRED),  # as vshr
    "vexp": VectorCost(2, 12),
    "vln": VectorCost(2, 14),
    "vsqrt": VectorCost(2, 13),
    "vrsqrt": VectorCost(1.06, 4.8),
    "vcast": VectorCost(1, 4),  # fp32 to fp16; other types as that
    "vcmp": VectorCost(2, 10),
    "vcmps": VectorCost(2, 10, _INFERRED),  # as vcmp
    "vsel": VectorCost(2, 5),
    "vbrc": VectorCost(1, 1),  # vbrcb, vector_dup
    "copy": VectorCost(1.06, 0.9),  # vcopy
    "varange": VectorCost(2.07, 5.9, _INFERRED),  # additions
    "reduce": VectorCost(7, 20),  # vcadd, of 64 lanes to one
    "gather": VectorCost(12, 5),  # vgather, of elements next to each other
    "deinterleave": VectorCost(14, 5),  # vreducev2
    "bitcast": VectorCost(0, 0, _INFERRED),  # another type of the same bytes
}
SORT_32, MERGED = VectorCost(4, 8), VectorCost(2, 8, _INFERRED)
"""A sort: vbitsort of each 32 elements, and for each element that vmrgsort4 merges, with its place, two cycles."""


@dataclass(frozen=True)
class ChipCosts:
    """The rates of one chip. Times in seconds, rates in bytes per second, everything else in cycles.

    Attributes:
        vector_cores: how many cores run vector programs.
        cycle: of the core clock.
        peak_bandwidth: of main memory, reads and writes together, over all cores.
        read_bandwidth: of main memory, as loads reach it.
        copy_bandwidth: of main memory, as copies reach it.
        cache_bytes: of the L2 cache, over all cores.
        load_port, store_port: the peak of one core, from and to global memory.
        typical_load_port, typical_store_port: the same in the vendor's model.
        transfer_start: of each DMA transfer, during which its pipe does nothing else.
        transfer_latency: from its last byte until what waits for it goes on.
        memory_latency: the same, further, where its bytes come from main memory.
        vector_head: from the start of a vector instruction to its first result; zero where functions have heads.
        scalar_op: one operation of the scalar unit.
        scalar_float: one division or root of floats in the scalar unit.
        issue: of the scalar unit, each instruction that it issues.
        scalar_global: one element read from or written to global memory by the scalar unit.
        scalar_local: one element read from or written to the Unified Buffer by the scalar unit.
        launch: of each launch, whatever its programs.
        launch_block: of a launch, each core that runs programs.
        next_program: a core's further program.
        same_address: how many times as long a load takes where all cores load from one address.
        cube: costs of its cube cores; None if they are not known.
        registers: whether the vector unit computes on registers, in vector functions, not on the Unified Buffer.
    """

    vector_cores: int
    cycle: float
    peak_bandwidth: float
    read_bandwidth: float
    copy_bandwidth: float
    cache_bytes: int
    load_port: float
    store_port: float
    typical_load_port: float
    typical_store_port: float
    vector_head: float
    transfer_latency: float
    cube: CubeCosts | None = None
    registers: bool = False
    transfer_start: float = c.TRANSFER_START.value
    memory_latency: float = c.MEMORY_LATENCY.value
    scalar_op: float = c.SCALAR_OP.value
    scalar_float: float = c.SCALAR_FLOAT.value
    issue: float = c.ISSUE.value
    scalar_global: float = c.SCALAR_GLOBAL.value
    scalar_local: float = c.SCALAR_LOCAL.value
    launch: float = c.LAUNCH.value
    launch_block: float = c.LAUNCH_BLOCK.value
    next_program: float = c.NEXT_PROGRAM.value
    same_address: float = c.SAME_ADDRESS.value

    def memory_seconds(self, read: float, written: float) -> float:
        """The time of main memory. Bytes written take as long as bytes read; where it does both, copies' rate is reached."""
        mixed = 2 * min(read, written)
        return mixed / self.copy_bandwidth + (read + written - mixed) / self.read_bandwidth


def costs_of(soc: str, clock: float | None = None) -> ChipCosts:
    """The rates of a chip.

    Args:
        soc: its name.
        clock: of its cores, in Hz, for a chip of which none is published.

    Raises:
        UnsupportedError: no bandwidth or clock is known for it.
        OfflineError: a clock is given for a chip of which one is published.
    """
    device = npu_tiling.soc(soc)
    is_known = device.clock_hz is not None or ascend950.memory_of(soc) is not None
    if clock is not None and is_known:
        raise OfflineError(f"clock is {clock:g} Hz, must be left out: the clock of {soc} is published")
    if device.arch == "dav-c310":
        return _ascend950(device)
    hertz = device.clock_hz or clock
    if device.bandwidth is None or hertz is None:
        raise UnsupportedError(f"soc is {soc}, must be a chip whose bandwidth and clock are known")
    return ChipCosts(
        vector_cores=device.vector_cores,
        cycle=1 / hertz,
        peak_bandwidth=device.bandwidth,
        read_bandwidth=device.bandwidth * c.READ.value,
        copy_bandwidth=device.bandwidth * c.COPY.value,
        cache_bytes=int((c.CACHE_B4 if soc == "Ascend910B4" else c.CACHE).value),
        load_port=c.LOAD_PORT.value * hertz,
        store_port=c.STORE_PORT.value * hertz,
        typical_load_port=c.TYPICAL_LOAD_PORT.value * hertz,
        typical_store_port=c.TYPICAL_STORE_PORT.value * hertz,
        vector_head=c.VECTOR_HEAD.value,
        transfer_latency=c.TRANSFER_LATENCY.value,
        cube=CubeCosts(cores=device.cube_cores, typical_load_port=min(c.CUBE_LOAD_PORT.value, c.LOAD_PORT.value * hertz)),
    )


def _ascend950(device: npu_tiling.Device) -> ChipCosts:
    """Its rates; what nothing is published of is as on the Ascend910B."""
    memory = ascend950.memory_of(device.name)
    if memory is None:
        raise UnsupportedError(f"soc is {device.name}, must be a chip whose bandwidth and clock are known")
    hertz = c.CLOCK_950.value
    return ChipCosts(
        vector_cores=device.vector_cores,
        cycle=1 / hertz,
        peak_bandwidth=memory.peak,
        read_bandwidth=memory.read,
        copy_bandwidth=memory.copy,
        cache_bytes=int(c.CACHE_950.value),
        load_port=c.LOAD_PORT_950.value * hertz,
        store_port=c.STORE_PORT_950.value * hertz,
        typical_load_port=c.TYPICAL_LOAD_PORT_950.value * hertz,
        typical_store_port=c.TYPICAL_STORE_PORT_950.value * hertz,
        vector_head=0,
        transfer_latency=c.TRANSFER_LATENCY_950.value,
        registers=True,
    )
