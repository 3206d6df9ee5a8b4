"""Rules on what Triton's language means and the compilers make something else of: each a fault of COMPILER_FAULTS.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, IntegerAttr, IntegerType
from xdsl.ir import Operation, SSAValue

from ..module.mlir import name_of, property_of
from .arithmetic import LANES
from .rules import Compiled, Rule
from .view import copied_whole_from, integer_bits, is_bf16, kernel_of, pointers_of, root_of, tensor

_EXACT = 2**24  # integers below it are numbers of fp32
_INT = 32  # bits: what later Tritons sum narrower integers in
_BYTE = 8  # bits: unsigned bytes are right
_EQUALITIES = (0, 1)  # what MLIR writes == and != of integers as
_VIEWS = ("tt.addptr", "tt.splat", "tt.broadcast", "tt.expand_dims")
_COMPOSED = {"math.fma": "tl.fma", "math.exp2": "tl.exp2", "math.log2": "tl.log2"}


def boolean_comparison(compiled: Compiled) -> Iterator[str]:
    """A mask that is compared with one number that is true gives false for `==` and true for `!=`, whatever the mask
    holds: a set element counts as 1 and the number as -1 (compiler fault 21). Write the mask, `~mask` or `mask ^ number`."""
    for op, line in compiled.triton:
        if name_of(op) == "arith.cmpi" and _bits(op.operands[0]) == 1 and any(map(_may_be_true, op.operands)):
            yield f"a mask is compared with a number{line}"


def ordered_masks(compiled: Compiled) -> Iterator[str]:
    """Masks that are compared by `<`, `<=`, `>` or `>=` are compared by another relation, or do not compile (compiler fault
    36). `~a & b` is a < b, and `~a | b` is a <= b."""
    for op, line in compiled.triton:
        if name_of(op) == "arith.cmpi" and tensor(op.operands[0]) and _bits(op.operands[0]) == 1:
            relation = property_of(op, "predicate")
            if isinstance(relation, IntegerAttr) and relation.value.data not in _EQUALITIES:
                yield f"masks are compared by their order{line}"


def _may_be_true(value: SSAValue) -> bool:
    """Whether a tensor is one number for all its elements, and that is not known to be False."""
    op = value.owner
    if not isinstance(op, Operation) or name_of(op) not in ("arith.constant", "tt.splat"):
        return False
    given = property_of(op, "value")
    return not isinstance(given, DenseIntOrFPElementsAttr) or any(given.iter_values())


def unsigned_arithmetic(compiled: Compiled) -> Iterator[str]:
    """Tensors of uint16, uint32 and uint64 are shifted to the right, widened and compared for the larger one as signed
    numbers (compiler fault 22). Shift and widen with a mask: `(x >> 1) & 0x7FFFFFFF`, `x.to(tl.int64) & 0xFFFFFFFF`."""
    done = {
        "arith.shrui": ">>",
        "arith.extui": "a wider type",
        "arith.maxui": "tl.maximum",
        "arith.minui": "tl.minimum",
        "arith.uitofp": "a float",
    }
    for op, line in compiled.triton:
        if name_of(op) in done and tensor(op.operands[0]) and _bits(op.operands[0]) > _BYTE and not _is_cut(op):
            yield f"{done[name_of(op)]} of a tensor of uint{_bits(op.operands[0])}{line}"


def _is_cut(op: Operation) -> bool:
    """Whether all that follows cuts off the bits that a sign is copied to, as MLIR writes `(x >> 32).to(tl.int32)`."""
    if name_of(op) != "arith.shrui" or not isinstance(op.operands[1].owner, Operation):
        return False
    amount = property_of(op.operands[1].owner, "value")
    uses = [use.operation for use in op.results[0].uses]
    if not isinstance(amount, DenseIntOrFPElementsAttr) or not all(name_of(use) == "arith.trunci" for use in uses):
        return False
    kept = max((_bits(use.results[0]) for use in uses), default=0)
    shifted = max(each for each in amount.iter_values() if isinstance(each, int))
    return kept + shifted <= _bits(op.operands[0])


def byte_sum(compiled: Compiled) -> Iterator[str]:
    """A sum, difference or product of tensors of int8 or uint8 that becomes int64 or a float, or is divided, is not cut to a
    byte before: 100 + 100 is 200 (compiler fault 34). Widen before the sum, and take 8 bits of it: `& 0xFF`."""
    used = {"arith.extsi", "arith.extui", "arith.sitofp", "arith.uitofp"}
    used |= {"arith.divsi", "arith.divui", "arith.remsi", "arith.remui"}
    for op, line in compiled.triton:
        if name_of(op) not in used or not tensor(op.operands[0]) or _bits(op.operands[0]) != _BYTE:
            continue
        widened = _bits(op.results[0])
        summed = any(
            name_of(maker) in ("arith.addi", "arith.subi", "arith.muli") for maker in map(_maker, op.operands) if maker
        )
        if summed and widened in (0, _BYTE, 2 * _INT):
            yield f"a sum of bytes is {'divided' if widened == _BYTE else f'int{widened}' if widened else 'a float'}{line}"


def rounded_division(compiled: Compiled) -> Iterator[str]:
    """Quotients of int32 tensors and remainders of tensors of floats come of a division in fp32: above 2^24 they are wrong
    (compiler fault 23). Divide single numbers, whose quotients are exact, or widen to int64, which is a loop over elements.
    A quotient that only makes an address stays an integer, and one of a range that ends below 2^24 is right."""
    in_tiles = any(name_of(op) == "arith.divsi" and tensor(op.operands[0]) for op in kernel_of(compiled.linalg).walk())
    for op, line in compiled.triton:
        found = tensor(op.operands[0]) if op.operands else None
        if found and name_of(op) == "arith.divsi" and integer_bits(found[1]) == 32:  # noqa: PLR2004
            if in_tiles and _end(op.operands[0]) > _EXACT:
                yield f"// of a tensor of {found[0]} int32{line}"
        elif found and name_of(op) in ("tt.mod", "arith.remf") and not isinstance(found[1], IntegerType):
            yield f"% of a tensor of {found[0]} floats{line}"


def _end(value: SSAValue) -> int:
    """What a tensor stays below, where it is a range."""
    op = value.owner
    while isinstance(op, Operation) and name_of(op) in _VIEWS:
        op = op.operands[0].owner
    end = property_of(op, "end") if isinstance(op, Operation) else None
    return end.value.data if isinstance(end, IntegerAttr) else 2**31


def mask_sum(compiled: Compiled) -> Iterator[str]:
    """Triton 3.2 sums a mask modulo 2, and the compilers make "any" of that; later Tritons and CUDA's count (compiler
    fault 24). A running sum of a mask does not compile. Likewise int8 is summed modulo 256 and int16 modulo 65536, where
    later Tritons sum int32. Sum `x.to(tl.int32)`."""
    for op, line in compiled.triton:
        around = op.parent_op()
        if name_of(op) != "arith.addi" or around is None or name_of(around) not in ("tt.reduce", "tt.scan"):
            continue
        bits, running = _bits(op.operands[0]), name_of(around) == "tt.scan"
        if bits == 1:
            yield f"{'tl.cumsum' if running else 'tl.sum'} of a mask{line}"
        elif bits < _INT and not running:
            yield f"tl.sum of int{bits}{line}"


def nan_maximum(compiled: Compiled) -> Iterator[str]:
    """tl.maximum and tl.minimum drop NaN, in seven instructions; tl.max and tl.min keep it, in one (compiler fault 25). With
    `propagate_nan=tl.PropagateNan.ALL` all keep it, and tl.maximum takes one instruction. Tiles that are too short for a
    vector instruction to be worth its start are left alone."""
    for op, line in compiled.triton:
        if name_of(op) in ("arith.maxnumf", "arith.minnumf") and (found := tensor(op.operands[0], LANES + 1)):
            yield f"tl.{name_of(op)[6:9]}imum of {found[0]} numbers drops NaN{line}"


def composed_operation(compiled: Compiled) -> Iterator[str]:
    """The vector unit has no tl.fma, tl.exp2 and tl.log2, which on CUDA are the cheap ones: each is two instructions or
    more, and what the first of them gives is rounded (compiler fault 26). Take tl.exp and tl.log, and no sum that relies on
    a product that is not rounded."""
    for op, line in compiled.triton:
        if name_of(op) in _COMPOSED and tensor(op.operands[0]):
            yield f"{_COMPOSED[name_of(op)]} of a tensor{line}"


def lost_start(compiled: Compiled) -> Iterator[str]:
    """In a load of single elements, `tl.arange(C, C + D)` may begin at 0: triton-ascend makes a loop of the range and leaves
    out C (compiler fault 27). `C + tl.arange(0, D)` is right."""
    loops = (op for op in kernel_of(compiled.linalg).walk() if property_of(op, "ExtractedLoadOrStore"))
    if not any(name_of(op) == "memref.load" for loop in loops for op in loop.walk()):
        return
    for op, line in compiled.triton:
        start = property_of(op, "start") if name_of(op) == "tt.make_range" else None
        if isinstance(start, IntegerAttr) and start.value.data:
            yield f"a range begins at {start.value.data}, and elements are loaded one by one{line}"


def dropped_mask(compiled: Compiled) -> Iterator[str]:
    """A load whose mask is no rectangle, compares a difference, stands beside rows that are a remainder, or is of elements
    that are loaded one by one, reads the whole tile and selects afterwards: bytes behind the tensor are read (compiler
    fault 10). A mask that compares each axis' own range, `(o_row < n_rows) & (o_col < n_cols)`, is kept. Single elements are
    not told apart where another load of the tensor has no mask."""
    pointers = pointers_of(kernel_of(compiled.linalg))
    selected = [op.operands[1].owner for op in kernel_of(compiled.linalg).walk() if name_of(op) == "arith.select"]
    makers = [op for op in selected if isinstance(op, Operation)]
    loads = [(op, line) for op, line in compiled.triton if name_of(op) == "tt.load" and tensor(op.results[0])]
    without = {_argument(compiled, op.operands[0]) for op, _ in loads if len(op.operands) == 1}
    whole = {pointers.index(memory) for op in makers if (memory := _copied_whole(op)) in pointers}
    whole |= {pointers.index(memory) for op in makers for memory in _single(op) if memory in pointers} - without
    for op, line in loads:
        if len(op.operands) > 1 and _argument(compiled, op.operands[0]) in whole:
            yield f"load of {compiled.subject.pointers[_argument(compiled, op.operands[0])]}: its mask is dropped{line}"


def carried_mask(compiled: Compiled) -> Iterator[str]:
    """A mask that compares a range which a loop carries, `o += BLOCK`, with a constant is lost: the last tile is whole, and
    rows behind are read and written (compiler fault 32). Make the range in the loop, `i * BLOCK + tl.arange(0, BLOCK)`, or
    compare with an argument."""
    for op, line in compiled.triton:
        if name_of(op) == "arith.cmpi" and tensor(op.results[0]) and _is_mask(op.results[0]):
            makers = {"" if maker is None else name_of(maker) for maker in map(_maker, op.operands)}
            if makers == {"scf.for", "arith.constant"}:
                yield f"a range that a loop carries is compared with a constant{line}"


def lost_rest(compiled: Compiled) -> Iterator[str]:
    """What two branches reach because of a return runs in one of them alone: the rest of a kernel behind a return in a
    branch of a branch, or two returns that do the same (compiler fault 35). Return under one condition, `if (a) & (b):`, or
    put the rest into branches."""
    reached = Counter(id(block) for op, _ in compiled.triton for block in op.successors)
    for op, line in compiled.triton:
        block = op.parent_block()
        if block is not None and op is block.first_op and reached[id(block)] > 1 and name_of(op) != "tt.return":
            yield f"two branches reach the same code{line}"


def unchecked_shape(compiled: Compiled) -> Iterator[str]:
    """triton-ascend does not look at the shape of a tensor descriptor: a tile that reaches over its end is read and written
    whole (compiler fault 37). Take tiles that divide the shape, `tl.make_block_ptr` with `boundary_check`, or masks."""
    for op, line in compiled.triton:
        if name_of(op) in ("tt.descriptor_load", "tt.descriptor_store"):
            yield f"a tensor descriptor {'reads' if op.results else 'writes'} a whole tile{line}"


def split_load(compiled: Compiled) -> Iterator[str]:
    """A tile that a mask loads, that is used as rows, and whose rows are split into pairs, is computed with before it is
    loaded (compiler fault 38). Load without a mask, or load the halves apart, from `p_x + 2 * o` and `p_x + 2 * o + 1`."""
    for op, line in compiled.triton:
        if name_of(op) == "tt.split":
            maker, uses = op.operands[0].owner, 1
            while isinstance(maker, Operation) and name_of(maker) == "tt.reshape":
                uses = max(uses, len(list(maker.results[0].uses)))
                maker = maker.operands[0].owner
            is_masked = isinstance(maker, Operation) and name_of(maker) == "tt.load" and len(maker.operands) > 1
            if is_masked and uses > 1:
                yield f"pairs of rows that a mask loads are split{line}"


def rounded_number(compiled: Compiled) -> Iterator[str]:
    """A single number that becomes bf16 is rounded away from zero by CANN 8.5 where it is halfway between two, a tile to the
    even one (compiler fault 39). Make bf16 of a tile."""
    for op, line in compiled.triton:
        if name_of(op) == "arith.truncf" and is_bf16(op.results[0].type) and compiled.subject.toolchain == "1.0.0":
            yield f"a number becomes bf16{line}"


def _maker(value: SSAValue) -> Operation | None:
    """What makes a tensor before it is broadcast: an operation, or the loop that carries it."""
    while isinstance(value.owner, Operation) and name_of(value.owner) in _VIEWS[1:]:
        value = value.owner.operands[0]
    return value.owner if isinstance(value.owner, Operation) else value.owner.parent_op()


def _is_mask(value: SSAValue) -> bool:
    """Whether a load or a store takes it."""
    users = [use.operation for use in value.uses]
    return any(
        name_of(user) in ("tt.load", "tt.store")
        or (name_of(user) in (*_VIEWS[1:], "arith.andi") and _is_mask(user.results[0]))
        for user in users
    )


def _copied_whole(op: Operation) -> SSAValue | None:
    """The pointer argument that a tile is copied from without a mask."""
    return copied_whole_from(op.operands[0]) if name_of(op) == "bufferization.to_tensor" else None


def _single(op: Operation) -> Iterator[SSAValue | None]:
    """The pointer arguments that the elements of a tile are loaded from one by one."""
    if property_of(op, "ExtractedLoadOrStore"):
        yield from (root_of(each.operands[0]) for each in op.walk() if name_of(each) == "memref.load")


def _argument(compiled: Compiled, pointer: SSAValue) -> int:
    """Which of the kernel's pointers an address is computed of; -1 where that is not seen."""
    while isinstance(pointer.owner, Operation):
        if name_of(pointer.owner) not in _VIEWS:
            return -1
        pointer = pointer.owner.operands[0]
    arguments = [value for value in compiled.triton_arguments if "tt.ptr" in str(value.type)]
    return arguments.index(pointer) if pointer in arguments else -1


def _bits(value: SSAValue) -> int:
    """The width of a tensor's or a number's integers; 0 of others."""
    found = tensor(value)
    kind = found[1] if found else value.type
    return kind.width.data if isinstance(kind, IntegerType) else 0


RULES = (
    Rule("boolean-comparison", boolean_comparison),
    Rule("ordered-masks", ordered_masks),
    Rule("unsigned-arithmetic", unsigned_arithmetic),
    Rule("byte-sum", byte_sum),
    Rule("rounded-division", rounded_division),
    Rule("mask-sum", mask_sum),
    Rule("nan-maximum", nan_maximum),
    Rule("composed-operation", composed_operation),
    Rule("lost-start", lost_start),
    Rule("dropped-mask", dropped_mask),
    Rule("carried-mask", carried_mask),
    Rule("lost-rest", lost_rest),
    Rule("unchecked-shape", unchecked_shape),
    Rule("split-load", split_load),
    Rule("rounded-number", rounded_number),
)
