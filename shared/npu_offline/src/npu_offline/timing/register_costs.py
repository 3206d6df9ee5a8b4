"""Costs of instructions on a vector unit that computes on registers (Ascend950), with the source of every number.

Two kinds of source stand in the comments; the numbers that are not of one instruction are in constants.py:

- *vendor table*: latency and throughput by instruction and type, from the cost model of the graph compiler GE for these
  chips (`hicann/ge`, compiler/graph/optimize/autofuse/att/gen_model_info/api_perf_register/v2/perf_param_v2.cpp,
  GetVfInstructPerfTable). The straight lines over the length of a tensor in the same file are not used: they are those of
  the older chips, number by number.
- *inferred*: not measured; the reasoning is in the comment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

from xdsl.dialects.builtin import FixedBitwidthType, IntegerType, VectorType
from xdsl.ir import Attribute, Operation

from ..errors import UnsupportedError
from ..module.mlir import name_of, property_of, symbol_of
from . import constants as c
from .costs import VECTOR_BYTES
from .instructions import Vector

HEAD = c.FUNCTION_HEAD.value
ACCESSES = c.REGISTER_ACCESSES.value
ISSUED = c.REGISTER_ISSUE.value


@dataclass(frozen=True)
class RegisterCost:
    """Cycles of an instruction for one register.

    Attributes:
        throughput: until the next of its kind may follow.
        latency: until its result can be used.
        paired: issued in pairs, by two units; no other is issued in more than one a cycle.
    """

    throughput: float
    latency: float
    paired: bool = True


@dataclass(frozen=True)
class Instruction:
    """What an operation of a vector function issues.

    Attributes:
        cost: of one register.
        number: of registers.
        loads, stores: registers that cross between the unit and the Unified Buffer.
        storing: cycles of the stores.
        merging: latency from the last operand, where another than the cost's.
    """

    cost: RegisterCost
    number: int = 1
    loads: int = 0
    stores: int = 0
    storing: float = 0
    merging: float | None = None


#: By instruction: the cost with floats, and with integers. vendor table, its fp32.
_COSTS = {
    "vadd": (RegisterCost(1, 4), RegisterCost(2, 4)),
    "vsub": (RegisterCost(1, 4), RegisterCost(2, 4)),
    "vmul": (RegisterCost(1, 5), RegisterCost(2, 5)),
    "vadds": (RegisterCost(2, 4), RegisterCost(2, 4)),
    "vmuls": (RegisterCost(1, 5), RegisterCost(2, 5)),
    "vmula": (RegisterCost(1, 6), RegisterCost(2, 6)),
    "vabs": (RegisterCost(1, 2), RegisterCost(2, 4)),
    "vneg": (RegisterCost(1, 2), RegisterCost(2, 4)),
    "vdiv": (RegisterCost(4, 14), RegisterCost(4, 14)),  # integers inferred from floats
    "vexp": (RegisterCost(4, 13), RegisterCost(4, 13)),
    "vexpdif": (RegisterCost(4, 13 + 4), RegisterCost(4, 13 + 4)),  # inferred: vexp, and the latency of vsub
    "vln": (RegisterCost(4, 15), RegisterCost(4, 15)),
    "vsqrt": (RegisterCost(4, 14), RegisterCost(4, 14)),
    "vcvt": (RegisterCost(2, 5), RegisterCost(2, 4)),
    "vtrc": (RegisterCost(2, 5), RegisterCost(2, 5)),
    "vcadd": (RegisterCost(1, 19, paired=False), RegisterCost(1, 13, paired=False)),
    "vcmax": (RegisterCost(1, 19, paired=False), RegisterCost(1, 13, paired=False)),  # inferred: as vcadd
    "vcmin": (RegisterCost(1, 19, paired=False), RegisterCost(1, 13, paired=False)),  # inferred: as vcadd
}
_SIMPLE = RegisterCost(1, 3)  # maximum, minimum, bits, comparison, selection, the mask of a number of lanes
_FILL = RegisterCost(1, 8)  # a number in every lane
_MASK = RegisterCost(2, 4)  # of two masks
_ORDER = RegisterCost(1, 8, paired=False)  # packing a mask; inferred: other changes of the order of lanes
_ACCESS = RegisterCost(0, 0)  # a load or store has no unit of its own, see Instruction
_COSTS |= dict.fromkeys(
    ("vmax", "vmin", "vmaxs", "vmins", "vrelu", "vcmp", "vcmps", "vsel", "plt", "pltm", "pge", "pset"), (_SIMPLE, _SIMPLE)
)
_COSTS |= dict.fromkeys(("vand", "vor", "vxor", "vnot", "vshl", "vshr", "vshls", "vshrs"), (_SIMPLE, _SIMPLE))
_COSTS |= dict.fromkeys(("vdup", "vdups", "vbr", "vci"), (_FILL, _FILL))  # vci inferred
_COSTS |= dict.fromkeys(("pand", "por", "pxor", "pnot", "psel"), (_MASK, _MASK))
_COSTS |= dict.fromkeys(("vintlv", "vdintlv", "pintlv", "pdintlv", "punpack", "ppack", "movvp"), (_ORDER, _ORDER))

_STORE = c.REGISTER_STORE.value
_STORE_NARROW = c.REGISTER_STORE_NARROW.value

_INTRINSIC = "hivm_regbaseintrins.intr.hivm."
_LOADS = ("vldsx1", "vldas", "vldus", "plds")
_STORES = ("vstsx1", "vstus", "vstas", "pstu", "psts")
_OF_ELEMENTS = ("vstsx1", "vstus")
_FREE = {"init"}  # the state of a sequence of unaligned accesses
_TWICE_NARROW = ("vdiv", "vexp", "vexpdif", "vln", "vsqrt")  # vendor table: twice the throughput's cycles in 16 bits
_CALLS = {  # the library's functions for 64-bit elements: two registers each
    "vbr_int64": Instruction(_FILL, 2),
    "vdups_int64": Instruction(_FILL, 2),
    "vload_NORM_int64": Instruction(_ACCESS, 2, loads=2),
    "cast_int64_t_to_": Instruction(_COSTS["vcvt"][1], 2),
    "masked_store_NORM_B64": Instruction(_ACCESS, 2, stores=2, storing=2 * _STORE),
}

#: Operations on vectors, before instructions are chosen for them: inferred, the instruction that does the same.
_OPERATIONS = {
    **{f"arith.{name}{kind}": f"v{name}" for name in ("add", "sub", "mul") for kind in "fi"},
    **{f"arith.{name}": "vdiv" for name in ("divf", "divsi", "divui")},
    **{f"arith.{name}": "vmax" for name in ("maximumf", "maxnumf", "maxsi", "maxui")},
    **{f"arith.{name}": "vmin" for name in ("minimumf", "minnumf", "minsi", "minui")},
    **{f"arith.{name}": "vcvt" for name in ("extf", "truncf", "sitofp", "uitofp", "fptosi", "extsi", "extui", "trunci")},
    **{f"arith.{name}i": f"v{name}" for name in ("and", "or", "xor")},
    **{f"arith.{name}": "vshr" for name in ("shrsi", "shrui")},
    **{f"arith.{name}": "vcmp" for name in ("cmpf", "cmpi")},
    **{f"math.{name}": "vabs" for name in ("absf", "absi")},
    "arith.shli": "vshl",
    "arith.select": "vsel",
    "arith.negf": "vneg",
    "math.exp": "vexp",
    "math.log": "vln",
    "math.sqrt": "vsqrt",
    "math.fma": "vmula",
    "vector.broadcast": "vdup",
    "vector.step": "vci",
    "vector.create_mask": "plt",
    "vector.transfer_read": "vldsx1",
    "vector.transfer_write": "vstsx1",
}
_ON_MASKS = {"vand": "pand", "vor": "por", "vxor": "pxor", "vsel": "psel"}
_FREE_OPERATIONS = {
    *("arith.constant", "arith.bitcast", "vector.constant_mask", "vector.shape_cast", "vector.extract"),
    *("annotation.mark", "builtin.unrealized_conversion_cast", "scf.for", "scf.yield", "scf.if", "func.return"),
    *("llvm.bitcast", "llvm.extractvalue", "llvm.alloca", "llvm.mlir.undef", "cf.br", "cf.cond_br"),
}


def instruction(op: Operation) -> Instruction | None:
    """The instruction of an operation of a vector function; None for scalar arithmetic and operations without cost.

    Raises:
        UnsupportedError: it is in no table.
    """
    name = name_of(op)
    types = [value.type for value in (*op.results, *op.operands) if isinstance(value.type, VectorType)]
    if name.startswith(_INTRINSIC):
        base = name.removeprefix(_INTRINSIC).partition(".")[0]
        return None if base in _FREE else _instruction(base, types, name)
    if name == "func.call":
        callee = symbol_of(op, "callee").removeprefix("_mlir_ciface_")
        for prefix, found in _CALLS.items():
            if callee.startswith(prefix):
                return found
        raise UnsupportedError(f"the time model has no cost for {callee} in a vector function")
    if not types or name in _FREE_OPERATIONS:
        return None
    if name == "vector.reduction":
        return _reduction(op, types)
    if name == "math.rsqrt":  # as the table models it: a square root and a division
        root, quotient = _COSTS["vsqrt"][0], _COSTS["vdiv"][0]
        return Instruction(RegisterCost(root.throughput + quotient.throughput, root.latency + quotient.latency))
    if name not in _OPERATIONS:
        raise UnsupportedError(f"the time model has no cost for {name} in a vector function")
    base = _OPERATIONS[name]
    if _bits(types[0]) == 1:
        base = _ON_MASKS.get(base, base)
    return _instruction(base, types, name)


def _reduction(op: Operation, types: Sequence[Attribute]) -> Instruction:
    """A reduction to one number, which may be added to, or compared with, a second operand."""
    kind = str(property_of(op, "kind")).partition("<")[2][:3]
    alone = _instruction({"add": "vcadd", "max": "vcmax", "min": "vcmin"}.get(kind, f"reduction {kind}"), types, str(op))
    if property_of(op, "withoutInitMergeOp") is not None or len(op.operands) == 1:
        return alone
    merge = _COSTS["vadd"][0]
    cost = RegisterCost(alone.cost.throughput + merge.throughput, alone.cost.latency + merge.latency, paired=False)
    return Instruction(cost, alone.number, merging=merge.latency)


def _instruction(base: str, types: Sequence[Attribute], name: str) -> Instruction:
    """The cost of an instruction; `types` are those of its vectors, the result's or the stored one's first."""
    registers = max((ceil(_lanes(kind) * _bits(kind) / 8 / VECTOR_BYTES) for kind in types if _bits(kind) > 1), default=1)
    if base in _LOADS:
        return Instruction(_ACCESS, registers, loads=registers)
    if base in _STORES:
        narrow = base in _OF_ELEMENTS and 1 < _bits(types[0]) < 32
        return Instruction(_ACCESS, registers, stores=registers, storing=registers * (_STORE_NARROW if narrow else _STORE))
    base = "vcvt" if base.startswith("vcvt") else base
    if base not in _COSTS:
        raise UnsupportedError(f"the time model has no cost for the vector instruction {name}")
    if base in _TWICE_NARROW and _bits(types[0]) == 16:
        registers *= 2
    integers = all(isinstance(_element(kind), IntegerType) for kind in types)
    return Instruction(_COSTS[base][integers], registers)


def _element(kind: Attribute) -> Attribute:
    assert isinstance(kind, VectorType)
    return kind.get_element_type()


def _bits(kind: Attribute) -> int:
    element = _element(kind)
    return element.bitwidth if isinstance(element, FixedBitwidthType) else 64


def _lanes(kind: Attribute) -> int:
    assert isinstance(kind, VectorType)
    return prod(kind.get_shape())


_LIBRARY = ("copy", "broadcast_", "vbrc")


def library(name: str, shape: Sequence[int], itemsize: float) -> Vector:
    """The cost of a library function, or operation, that only moves bytes within the Unified Buffer.

    Raises:
        UnsupportedError: it does something else.
    """
    if not name.startswith(_LIBRARY):
        raise UnsupportedError(f"the time model has no cost for {name} on a vector unit with registers")
    registers = prod(shape[:-1]) * ceil(shape[-1] * itemsize / VECTOR_BYTES) if shape else 1
    return Vector(name, prod(shape), HEAD + registers * _STORE, 0, registers * _STORE)  # inferred: a store for each register
