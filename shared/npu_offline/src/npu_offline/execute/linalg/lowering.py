"""Lowers Linalg IR, as the Ascend compiler is given it, to the LLVM dialect for this host.

Tiles and copies between global memory and the Unified Buffer stay as they are on the chip. Tiles become plain memory, vector
operations become loops, and every access to global memory is reported to the runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from xdsl.dialects.builtin import (
    DYNAMIC_INDEX,
    DenseArrayBase,
    IndexType,
    IntegerAttr,
    MemRefType,
    ModuleOp,
    StringAttr,
    SymbolRefAttr,
    i32,
)
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.rewriter import InsertPoint, Rewriter

from ...errors import UnsupportedError
from ...module.mlir import make, name_of, parse, parse_attribute, property_of, symbol_of, text
from ...toolchain.compilers import tool
from ...toolchain.opt import opt
from ..c_compiler import has_c_function, host_triple
from .casts import define_casts, define_quotients, round_each
from .instrument import instrument
from .library import PRINTING, write_out
from .memory import keep_tensors_whose_memory_is_read
from .products import order_products
from .sums import widen_sums

ENTRY = "npu_offline_entry"
_KERNEL = "npu_offline_kernel"  # not its own name, which may be that of a C function

_PASSES = (
    # Vector operations on tensors become loops over buffers, one loop for those that use each other's results alone; each
    # buffer is freed where its last use ends.
    "--convert-elementwise-to-linalg",
    "--linalg-fuse-elementwise-ops",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--buffer-loop-hoisting",
    "--ownership-based-buffer-deallocation",
    "--canonicalize",
    "--buffer-deallocation-simplification",
    "--bufferization-lower-deallocations",
    "--convert-linalg-to-loops",
    # What is still narrower than fp32, minima and the bodies of products, is fp32 arithmetic too.
    "--math-legalize-to-f32",
    "--arith-emulate-unsupported-floats=source-types=bf16,f16 target-type=f32",
    "--arith-expand=include-bf16=true",
    "--memref-expand",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-cf-to-llvm",
    "--convert-math-to-llvm",
    "--convert-math-to-libm",
    "--convert-arith-to-llvm",
    "--convert-index-to-llvm",
    "--finalize-memref-to-llvm=use-aligned-alloc=true",
    "--convert-func-to-llvm",
    "--lower-affine",
    "--convert-arith-to-llvm",
    "--reconcile-unrealized-casts",
    # A third fewer operations to read, follow and compile.
    "--canonicalize",
    "--cse",
)

_AROUND_COPIES = {"memref.alloc", "bufferization.to_tensor"}
_RUNTIME = {
    "npu_offline_copy": "!llvm.func<void (i64, ptr, ptr, i32, i32)>",
    "npu_offline_move": "!llvm.func<void (ptr, ptr, i64, i32, i32)>",
    "npu_offline_touch": "!llvm.func<void (ptr, i64, i32, i32)>",
    "npu_offline_alloc": "!llvm.func<ptr (i64, i64)>",
    "npu_offline_free": "!llvm.func<void (ptr)>",
    "npu_offline_atomic_begin": "!llvm.func<void ()>",
    "npu_offline_atomic_end": "!llvm.func<void ()>",
    "npu_offline_turn": "!llvm.func<void ()>",
    "npu_offline_print_text": "!llvm.func<void (i64)>",
    "npu_offline_print_integer": "!llvm.func<void (i64)>",
    "npu_offline_print_real": "!llvm.func<void (f64)>",
    "npu_offline_print_end": "!llvm.func<void ()>",
}
_CALLED = ("npu_offline_atomic_begin", "npu_offline_atomic_end", "npu_offline_turn")
_REPLACED = {"memrefCopy", "aligned_alloc", "free", *_CALLED, *PRINTING}
_HINTS = {"annotation.mark", "llvm.intr.assume", "gpu.barrier"}
"""For the Ascend compiler: tl.compile_hint, tl.assume, tl.debug_barrier."""
_MEANT = {"hivm.hir.pointer_cast": "pointers that a kernel reads from memory (hivm.hir.pointer_cast)"}


def lower(linalg: str, toolchain: str, *, wide_sums: bool = False) -> str:
    """The LLVM dialect of a kernel, with the function `npu_offline_entry(slots, x, y, z)` that runs program (x, y, z).

    `slots` is an array of 8-byte values: the five of each memref (two pointers, offset, size, stride), then the scalars
    in the order of the function's parameters, the last three of them the grid's.

    Args:
        linalg: the "ttadapter" module.
        toolchain: the version whose passes are used.
        wide_sums: sums of fp16 are taken in fp32 and rounded once, as the Ascend compilers do, not after each addition;
            nothing is printed.

    Raises:
        UnsupportedError: the kernel uses something that only the chip has.
        CompilationError: a pass failed.
    """
    program = tool(toolchain, "bishengir-opt")
    module = parse(opt(program, linalg, "--mlir-print-op-generic"))
    kernel = _defined(module.body.block.ops)
    parameters = [argument.type for argument in kernel.regions[0].blocks[0].args]
    kernel.properties["sym_name"] = StringAttr(_KERNEL)
    write_out(module, program, prints=not wide_sums)
    _prepare(module)
    define_casts(module)
    define_quotients(module)
    keep_tensors_whose_memory_is_read(module)
    order_products(module)
    if wide_sums:
        widen_sums(module)
    round_each(module)
    functions = list(parse(opt(program, text(module), *_PASSES, "--mlir-print-op-generic")).body.block.ops)
    kernel = _defined(functions)
    instrument(kernel, [value for value in kernel.regions[0].blocks[0].args if str(value.type) == "!llvm.ptr"])
    _keep_rolled(kernel)
    _resolve(functions)
    kernel.properties["linkage"] = parse_attribute("#llvm.linkage<internal>")
    return opt(program, _assemble(functions, parameters))


def _defined(functions: Iterable[Operation]) -> Operation:
    """The one function with a body: the kernel."""
    return next(op for op in functions if op.regions and op.regions[0].blocks)


def _prepare(module: ModuleOp) -> None:
    """Rewrite operations that only passes of the chip's dialects can lower."""
    for op in list(module.walk()):
        name = name_of(op)
        if _is_atomic(op):
            _make_atomic(op)
        elif name in ("scf.for", "scf.while"):
            Rewriter.insert_op(_call("npu_offline_turn"), InsertPoint.at_start(op.regions[0].blocks[0]))
        elif name in _HINTS:
            Rewriter.erase_op(op)
        elif name.partition(".")[0] in ("hfusion", "hivm", "hacc"):
            raise UnsupportedError(f"the emulator has no {_MEANT.get(name, name)}")
    for symbol in _CALLED:
        declaration = parse(
            f'"func.func"() <{{function_type = () -> (), sym_name = "{symbol}", sym_visibility = "private"}}> '
            "({}) : () -> ()"
        ).body.block.first_op
        assert declaration is not None
        declaration.detach()
        Rewriter.insert_op(declaration, InsertPoint.at_end(module.body.block))


def _make_atomic(op: Operation) -> None:
    """Compute `global = combine(global, update)` in a tile under a lock, with one DMA out.

    The lock also covers the copy of the old value, which the IR has before or after the update where the kernel uses it.
    """
    place = op.operands[-1]
    if not isinstance(place.type, MemRefType):
        raise UnsupportedError("the emulator has no atomic update of anything but global memory")
    first, last = _with_copy_of_old_value(op, place)
    new: list[Operation] = []
    sizes: list[SSAValue] = []
    for dimension, size in enumerate(place.type.get_shape()):
        if size == DYNAMIC_INDEX:
            new.append(make("arith.constant", results=[IndexType()], value=IntegerAttr(dimension, IndexType())))
            new.append(make("memref.dim", [place, new[-1].results[0]], [IndexType()]))
            sizes.append(new[-1].results[0])
    tile_type = MemRefType(place.type.get_element_type(), place.type.get_shape())
    new.append(make("memref.alloc", sizes, [tile_type], operandSegmentSizes=DenseArrayBase.from_list(i32, [len(sizes), 0])))
    tile = new[-1].results[0]
    new.append(make("memref.copy", [place, tile]))
    Rewriter.insert_op(new, InsertPoint.before(op))
    back = make("memref.copy", [tile, place])
    Rewriter.insert_op(back, InsertPoint.after(op))
    Rewriter.insert_op(_call("npu_offline_atomic_begin"), InsertPoint.before(new[0] if first is op else first))
    Rewriter.insert_op(_call("npu_offline_atomic_end"), InsertPoint.after(back if last is op else last))
    op.operands = [tile if operand is place else operand for operand in op.operands]


def _with_copy_of_old_value(update: Operation, place: SSAValue) -> tuple[Operation, Operation]:
    """The first and the last of an atomic update and the copy of its old value: the update alone where there is none.

    The copy stands right before the update, that of a compare-and-swap right after it; a load of the kernel's does not.
    """
    view = place.owner
    tile = view.operands[0] if isinstance(view, Operation) and name_of(view) == "memref.subview" else place
    swaps = "cas" in str(property_of(update, "GenericAtomicRMW"))
    copy = update.next_op if swaps else update.prev_op
    while copy is not None and name_of(copy) in _AROUND_COPIES:
        copy = copy.next_op if swaps else copy.prev_op
    if copy is None or name_of(copy) != "memref.copy" or copy.operands[0] not in (place, tile):
        return update, update
    return (update, copy) if swaps else (copy, update)


def _is_atomic(op: Operation) -> bool:
    return name_of(op) == "linalg.generic" and property_of(op, "GenericAtomicRMW") is not None


def _call(name: str) -> Operation:
    return make("func.call", callee=SymbolRefAttr(name))


def _keep_rolled(kernel: Operation) -> None:
    """Tell LLVM to unroll no loop: loops over tiles have known lengths, and unrolled ones take seconds to compile."""
    places = {block: place for place, block in enumerate(kernel.regions[0].blocks)}
    for block, place in places.items():
        end = block.last_op
        if end is not None and any(places[target] <= place for target in end.successors):
            end.properties["loop_annotation"] = parse_attribute("#llvm.loop_annotation<unroll = <disable = true>>")


def _resolve(functions: Sequence[Operation]) -> None:
    """Make calls of device functions calls of the C library, where it has the function; refuse others."""
    defined = {symbol_of(function, "sym_name") for function in functions if function.regions[0].blocks}
    renamed = {}
    for op in (op for function in functions for op in function.walk()):
        old = symbol_of(op, "callee") if name_of(op) == "llvm.call" else ""
        if old and old not in defined | _RUNTIME.keys():
            new = old.removeprefix("__hmf_")
            if not has_c_function(new):
                raise UnsupportedError(f"the emulator has no {old}")
            op.properties["callee"] = SymbolRefAttr(new)
            renamed[old] = new
    for function in functions:
        name = symbol_of(function, "sym_name")
        function.properties["sym_name"] = StringAttr(renamed.get(name, name))


def _assemble(functions: Sequence[Operation], parameters: Sequence[Attribute]) -> str:
    """The module to translate: the kernel, what it calls, the runtime's declarations and the entry."""
    parts = []
    for function in functions:
        function.attributes = {key: value for key, value in function.attributes.items() if key == "op_name__"}
        if function.regions[0].blocks or symbol_of(function, "sym_name") not in _REPLACED:
            parts.append(text(function))
    for symbol, kind in _RUNTIME.items():
        fresh = "res_attrs = [{llvm.noalias}], " if symbol == "npu_offline_alloc" else ""
        parts.append(f'"llvm.func"() <{{{fresh}function_type = {kind}, sym_name = "{symbol}"}}> ({{}}) : () -> ()')
    parts.append(_entry(parameters))
    body = "\n".join(parts)
    return f'"builtin.module"() ({{\n{body}\n}}) {{llvm.target_triple = "{host_triple()}"}} : () -> ()\n'


def _entry(parameters: Sequence[Attribute]) -> str:
    kinds: list[str] = []
    for parameter in parameters[:-3]:
        kinds += ["!llvm.ptr", "!llvm.ptr", "i64", "i64", "i64"] if isinstance(parameter, MemRefType) else [str(parameter)]
    lines = []
    for slot, kind in enumerate(kinds):
        place = f"<{{elem_type = i64, rawConstantIndices = array<i32: {slot}>}}>"
        lines.append(f'%p{slot} = "llvm.getelementptr"(%slots) {place} : (!llvm.ptr) -> !llvm.ptr')
        lines.append(f'%v{slot} = "llvm.load"(%p{slot}) : (!llvm.ptr) -> {kind}')
    values = ", ".join([*(f"%v{slot}" for slot in range(len(kinds))), "%x", "%y", "%z"])
    types = ", ".join([*kinds, "i32", "i32", "i32"])
    return "\n".join(
        [
            f'"llvm.func"() <{{function_type = !llvm.func<void (ptr, i32, i32, i32)>, sym_name = "{ENTRY}"}}> ({{',
            "^bb0(%slots: !llvm.ptr, %x: i32, %y: i32, %z: i32):",
            *lines,
            f'"llvm.call"({values}) <{{callee = @{_KERNEL}}}> : ({types}) -> ()',
            '"llvm.return"() : () -> ()',
            "}) : () -> ()",
        ]
    )
