"""Executes the programs of a grid from their TTIR, several at once: a mask says which take part where they part ways."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from xdsl.dialects.builtin import DenseArrayBase, TensorType
from xdsl.ir import Attribute, Block, Operation

from ...errors import EndlessLoopError, UnsupportedError
from ...module.mlir import name_of, parse, property_of, symbol_of
from ...module.places import lines_by_operation
from ...toolchain.ttir import generic_form
from .accesses import Accesses
from .memory import Memory
from .numbers import Array, Numbers, integer_of, is_float, kind_of
from .tiles import Frame, Mask, Step, Value, alike, all_programs, both, chosen, merged, pure, shape_of

_ELEMENTS = 1 << 17  # of the largest tile of programs that are executed at once: what a cache holds
_SKIPPED = {"tt.print", "tt.assert", "gpu.barrier", "tt.annotation", "llvm.intr.assume"}
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "arith.addi": np.add,
    "arith.muli": np.multiply,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.addf": np.add,
    "arith.mulf": np.multiply,
    "arith.maxnumf": np.fmax,
    "arith.minnumf": np.fmin,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
}
_INFINITE = re.compile(r"dense<(0x[0-9A-F]+)> : tensor<[\dx]*x(bf16|f\d+)>")  # xDSL takes the bits for a number


class Meaning:
    """A kernel as its TTIR says it."""

    def __init__(self, name: str, ttir: str) -> None:
        """
        Args:
            name: of the kernel.
            ttir: its module, before any compiler for a chip has seen it.
        """
        self.name = name
        module = parse(_INFINITE.sub(r"\1 : \2", generic_form(ttir)))
        self._functions = {symbol_of(op, "sym_name"): op for op in module.walk() if name_of(op) == "tt.func"}
        self._kernel = self._functions[name]
        lines, met = lines_by_operation(ttir), dict[str, int]()
        self._lines: dict[Operation, str] = {}
        for op in module.walk():
            position = met.get(name_of(op), 0)
            met[name_of(op)] = position + 1
            found = lines.get(name_of(op), [])
            self._lines[op] = found[position] if position < len(found) else ""
        kinds = [value.type for op in module.walk() for value in op.results]
        self.kinds = {_text_kind(kind) for kind in kinds}
        tiles = [prod(kind.get_shape()) for kind in kinds if isinstance(kind, TensorType)]
        names = {name_of(op) for op in module.walk()}
        waits = "scf.while" in names and names & {"tt.atomic_cas", "tt.atomic_rmw"}
        self._together = 1 if waits else max(1, _ELEMENTS // max([1, *tiles]))

    def execute(
        self,
        grid: tuple[int, int, int],
        scalars: Mapping[str, Any],
        names: Sequence[str],
        memory: Memory,
        *,
        other: bool = False,
        late: Callable[[], bool] = lambda: False,
    ) -> None:
        """Execute all programs of a launch.

        Args:
            grid: programs in x, y and z.
            scalars: values of the arguments that are no pointers, by name.
            names: of all arguments, constants left out, in order.
            memory: what the pointers point to.
            other: as `Numbers` takes it; programs then run in reverse order.
            late: whether it has to stop.

        Raises:
            OutOfBoundsError: a program accesses what is in no argument.
            UnsupportedError: an operation or a type is not known.
            EndlessLoopError: `late` says so.
            RaceError: programs race, and the memory looks for that.
        """
        execution = _Execution(self, grid, memory, Numbers(other=other), late)
        arguments = []
        for name, argument in zip(names, self._kernel.regions[0].blocks[0].args, strict=True):
            kind = kind_of(argument.type)
            value = scalars[name] if name in scalars else memory.address_of(name)
            arguments.append(np.array([value]).astype(execution.numbers.dtype(kind)))
        count = prod(grid)
        together = 1 if memory.races else self._together
        chunks = [np.arange(first, min(first + together, count)) for first in range(0, count, together)]
        with np.errstate(all="ignore"):
            for linear in reversed(chunks) if other else chunks:
                execution.chunk(self._kernel, arguments, linear)

    def place(self, op: Operation) -> str:
        """Where an operation stands: "kernels.py:7:5"."""
        return self._lines.get(op, "")

    def function(self, name: str) -> Operation:
        """A function that the kernel calls."""
        return self._functions[name]


def _in_order(first: Block) -> list[Block]:
    """The blocks of a function, each behind all that jump to it.

    Raises:
        UnsupportedError: they make a loop.
    """
    found: list[Block] = []
    open_: list[Block] = []

    def visit(block: Block) -> None:
        if block in open_:
            raise UnsupportedError("a loop of branches is not known")
        if block in found:
            return
        open_.append(block)
        for target in block.last_op.successors if block.last_op else ():
            visit(target)
        open_.pop()
        found.append(block)

    visit(first)
    return found[::-1]


def _added_in_order(x: Array, axis: int) -> Array:
    """A sum in fp32, one after another: what is lost in the worst order of all."""
    added = np.add.accumulate(x, axis=axis, dtype=np.float32).take(-1, axis)
    return np.where(np.isfinite(added), added, np.add.reduce(x, axis=axis))


def _multiplied_in_order(left: Array, right: Array, start: Array, exact: Array) -> Array:
    """A product of matrices, added to `start` in fp32 from its last term on, as no library does; `exact` if not finite."""
    added = np.broadcast_to(start, exact.shape).astype(np.float32)
    for term in reversed(range(left.shape[-1])):
        added += left[..., term, None] * right[..., term, None, :]
    return np.where(np.isfinite(added), added, exact)


def _text_kind(kind: Attribute) -> str:
    element = kind.get_element_type() if isinstance(kind, TensorType) else kind
    return str(element)


class _Execution(Accesses):
    def __init__(
        self, meaning: Meaning, grid: tuple[int, int, int], memory: Memory, numbers: Numbers, late: Callable[[], bool]
    ) -> None:
        super().__init__(meaning.name, meaning.place, memory, numbers)
        self._meaning, self._grid, self._late = meaning, grid, late
        self._compiled: dict[Block, list[Step]] = {}

    def chunk(self, kernel: Operation, arguments: Sequence[Value], linear: Array) -> None:
        frame = Frame()
        x, y, _ = self._grid
        self._memory.program = int(linear[0])
        frame.programs = (linear % x, linear // x % y, linear // (x * y))
        frame.count = len(linear)
        self._function(kernel, arguments, frame, None)

    def _function(self, function: Operation, arguments: Sequence[Value], frame: Frame, active: Mask) -> list[Value]:
        """Execute a function, whose blocks make no loop: an early return makes several."""
        blocks = _in_order(function.regions[0].blocks[0])
        frame.update(zip(blocks[0].args, arguments, strict=True))
        pending: dict[Block, Any] = {blocks[0]: (active,)}
        returned: list[Value] = []
        for block in blocks:
            if block not in pending:
                continue
            (mask,) = pending.pop(block)
            self._block(block, frame, mask)
            last = block.last_op
            assert last is not None
            if name_of(last) == "tt.return":
                values = [frame[each] for each in last.operands]
                returned = values if not returned else [merged(mask, *pair) for pair in zip(values, returned, strict=True)]
            for target, passed, taken in self._jumps(last, frame, mask):
                if taken is not None and not taken.any():
                    continue
                first = target not in pending
                for argument, value in zip(target.args, passed, strict=True):
                    frame[argument] = value if first else merged(taken, value, frame[argument])
                before = None if first else pending[target][0]
                pending[target] = (taken if first else None if taken is None or before is None else before | taken,)
        return returned

    def _jumps(self, last: Operation, frame: Frame, mask: Mask) -> Iterator[tuple[Block, Sequence[Value], Mask]]:
        if name_of(last) == "cf.br":
            yield last.successors[0], [frame[each] for each in last.operands], mask
        elif name_of(last) == "cf.cond_br":
            yes = all_programs(frame[last.operands[0]], frame.count)
            count = len(last.successors[0].args)
            for target, operands, taken in (
                (last.successors[0], last.operands[1 : 1 + count], yes),
                (last.successors[1], last.operands[1 + count :], ~yes),
            ):
                yield target, [frame[each] for each in operands], taken if mask is None else mask & taken

    def _block(self, block: Block, frame: Frame, active: Mask) -> None:
        steps = self._compiled.get(block)
        if steps is None:
            steps = self._compiled[block] = [step for op in block.ops for step in self._steps(op)]
        for step in steps:
            step(frame, active)

    def _steps(self, op: Operation) -> Iterator[Step]:
        """What an operation does; nothing for those that end a block."""
        name = name_of(op)
        if name in _SKIPPED or name in ("scf.yield", "scf.condition", "tt.return", "cf.br", "cf.cond_br"):
            return
        if name.endswith((".return",)):
            return
        special = getattr(self, f"_{name.replace('.', '_')}", None)
        if special is not None:
            yield special(op)
            return
        compute = self.numbers.elementwise(op)
        if compute is None:
            where = self._meaning.place(op)
            raise UnsupportedError(f"{name} is not known{f' ({where})' if where else ''}")
        yield pure(op, compute)

    # Programs and constants.

    def _tt_get_program_id(self, op: Operation) -> Step:
        axis, (result,) = integer_of(op, "axis"), op.results

        def run(frame: Frame, _: Mask) -> None:
            frame[result] = frame.programs[axis].astype(np.int32)

        return run

    def _tt_get_num_programs(self, op: Operation) -> Step:
        count = np.array([self._grid[integer_of(op, "axis")]], np.int32)
        return pure(op, lambda: count)

    def _arith_constant(self, op: Operation) -> Step:
        value = self.numbers.constant(op)
        return pure(op, lambda: value)

    def _tt_make_range(self, op: Operation) -> Step:
        value = np.arange(integer_of(op, "start"), integer_of(op, "end"), dtype=np.int32)[None]
        return pure(op, lambda: value)

    # Shapes.

    def _tt_splat(self, op: Operation) -> Step:
        shape = shape_of(op.results[0].type)
        ones = (1,) * len(shape)
        return pure(op, lambda x: np.broadcast_to(x.reshape(x.shape[:1] + ones), x.shape[:1] + shape))

    def _tt_broadcast(self, op: Operation) -> Step:
        shape = shape_of(op.results[0].type)
        return pure(op, lambda x: np.broadcast_to(x, x.shape[:1] + shape))

    def _tt_expand_dims(self, op: Operation) -> Step:
        axis = integer_of(op, "axis") + 1
        return pure(op, lambda x: np.expand_dims(x, axis))

    def _tt_reshape(self, op: Operation) -> Step:
        shape = shape_of(op.results[0].type)
        return pure(op, lambda x: x.reshape(x.shape[:1] + shape))

    def _tt_trans(self, op: Operation) -> Step:
        order = property_of(op, "order")
        assert isinstance(order, DenseArrayBase)
        axes = (0, *(int(axis) + 1 for axis in order.get_values()))
        return pure(op, lambda x: x.transpose(axes))

    def _tt_cat(self, op: Operation) -> Step:
        return pure(op, lambda x, y: np.concatenate(alike(x, y), axis=1))

    def _tt_join(self, op: Operation) -> Step:
        return pure(op, lambda x, y: np.stack(alike(x, y), axis=-1))

    def _tt_split(self, op: Operation) -> Step:
        return pure(op, lambda x: (x[..., 0], x[..., 1]))

    def _tt_flip(self, op: Operation) -> Step:
        axis = integer_of(op, "dim") + 1
        return pure(op, lambda x: np.flip(x, axis))

    def _tt_sort(self, op: Operation) -> Step:
        axis, found = integer_of(op, "dim") + 1, property_of(op, "descending")
        descending = "true" in str(found)

        def run(x: Array) -> Array:
            if x.dtype.kind == "f" and np.isnan(x).any():
                raise UnsupportedError("a sort of NaN is not defined")
            ordered = np.sort(x, axis)
            return np.flip(ordered, axis) if descending else ordered

        return pure(op, run)

    def _tt_gather(self, op: Operation) -> Step:
        axis = integer_of(op, "axis") + 1

        def run(x: Array, index: Array) -> Array:
            count = max(len(x), len(index))
            whole = [np.broadcast_to(each, (count, *each.shape[1:])) for each in (x, index)]
            return np.take_along_axis(whole[0], whole[1].astype(np.int64), axis)

        return pure(op, run)

    def _tt_histogram(self, op: Operation) -> Step:
        bins = shape_of(op.results[0].type)[0]

        def run(x: Array) -> Array:
            inside = np.where((x >= 0) & (x < bins), x, bins)
            return np.stack([np.bincount(row, minlength=bins + 1)[:bins] for row in inside]).astype(np.int32)

        return pure(op, run)

    # Arithmetic that is not element by element.

    def _arith_select(self, op: Operation) -> Step:
        def run(condition: Array, yes: Value, no: Value) -> Value:
            return chosen(condition, yes, no)

        return pure(op, run)

    def _tt_dot(self, op: Operation) -> Step:
        kind = kind_of(op.results[0].type)
        numbers = self.numbers
        wide: Any = np.float64 if numbers.other or kind == "f64" or not is_float(kind) else np.float32

        def run(a: Array, b: Array, c: Array) -> Array:
            left, right = (np.ascontiguousarray(each.astype(wide)) for each in (a, b))
            product = np.matmul(left, right)
            if numbers.other and kind == "f32":
                return _multiplied_in_order(left, right, c, product + c)
            if not is_float(kind):
                return (product.astype(np.int64) + c).astype(numbers.dtype(kind))
            return numbers.rounded(product + c, kind)

        return pure(op, run)

    def _tt_reduce(self, op: Operation) -> Step:
        axis, body = integer_of(op, "axis") + 1, op.regions[0].blocks[0]
        known = self._known_reduction(op)
        results, operands = list(op.results), list(op.operands)
        if known is not None:
            dtype = self.numbers.dtype(kind_of(results[0].type))
            if known is np.add and self.numbers.other and kind_of(results[0].type) == "f32":
                return pure(op, lambda x: _added_in_order(x, axis))
            return pure(op, lambda x: known.reduce(x, axis=axis).astype(dtype, copy=False))

        def run(frame: Frame, active: Mask) -> None:
            values = [np.moveaxis(each, axis, 0) for each in alike(*(frame[each] for each in operands))]
            while len(values[0]) > 1:  # neighbours, so that an operation that does not commute is right too
                pairs = len(values[0]) // 2
                rest = [each[2 * pairs :] for each in values]
                combined = self._region(
                    body,
                    [*(each[0 : 2 * pairs : 2] for each in values), *(each[1 : 2 * pairs : 2] for each in values)],
                    frame,
                )
                values = [np.concatenate(pair) for pair in zip(combined, rest, strict=True)]
            for result, value in zip(results, values, strict=True):
                frame[result] = value[0]

        return run

    def _known_reduction(self, op: Operation) -> Any:
        body = op.regions[0].blocks[0]
        first, *rest = body.ops
        kind = kind_of(op.results[0].type)
        if len(rest) != 1 or set(first.operands) != set(body.args) or len(body.args) != 2:  # noqa: PLR2004 - x and y
            return None
        if kind == "i1":
            return np.logical_xor if name_of(first) == "arith.addi" else None
        if kind in ("f16", "bf16") and not self.numbers.other and name_of(first) in ("arith.addf", "arith.mulf"):
            return None  # each step is rounded
        return _REDUCTIONS.get(name_of(first))

    def _tt_scan(self, op: Operation) -> Step:
        axis, body = integer_of(op, "axis") + 1, op.regions[0].blocks[0]
        backwards = "true" in str(property_of(op, "reverse"))
        known = self._known_reduction(op)
        results, operands = list(op.results), list(op.operands)

        def run(frame: Frame, active: Mask) -> None:
            values = [np.moveaxis(each, axis, 0) for each in alike(*(frame[each] for each in operands))]
            values = [each[::-1] if backwards else each for each in values]
            if known is not None:
                found = [known.accumulate(values[0], axis=0).astype(values[0].dtype, copy=False)]
            else:
                rows = [[each[0] for each in values]]
                for i in range(1, len(values[0])):
                    rows.append(self._region(body, [*rows[-1], *(each[i] for each in values)], frame))
                found = [np.stack(column) for column in zip(*rows, strict=True)]
            for result, value in zip(results, found, strict=True):
                frame[result] = np.moveaxis(value[::-1] if backwards else value, 0, axis)

        return run

    def _region(self, body: Block, arguments: Sequence[Array], frame: Frame) -> list[Array]:
        """What the body of a reduction makes of its arguments, whose first axis is no program."""
        frame.update(zip(body.args, arguments, strict=True))
        self._block(body, frame, None)
        assert body.last_op is not None
        return [np.broadcast_to(frame[each], arguments[0].shape) for each in body.last_op.operands]

    # Control flow.

    def _tt_call(self, op: Operation) -> Step:
        function = self._meaning.function(symbol_of(op, "callee"))

        def run(frame: Frame, active: Mask) -> None:
            found = self._function(function, [frame[each] for each in op.operands], frame, active)
            frame.update(zip(op.results, found, strict=True))

        return run

    def _scf_if(self, op: Operation) -> Step:
        bodies = [region.blocks[0] if region.blocks else None for region in op.regions]

        def run(frame: Frame, active: Mask) -> None:
            yes = frame[op.operands[0]]
            uniform = yes if len(yes) == 1 else yes[active] if active is not None else yes
            if uniform.all() or not uniform.any():
                body = bodies[0 if uniform.all() else 1]
                frame.update(zip(op.results, self._yielded(body, frame, active), strict=True))
                return
            masks = (yes if active is None else active & yes, ~yes if active is None else active & ~yes)
            ends = [self._yielded(body, frame, mask) for body, mask in zip(bodies, masks, strict=True)]
            frame.update(
                (result, merged(masks[0], *pair)) for result, pair in zip(op.results, zip(*ends, strict=True), strict=True)
            )

        return run

    def _yielded(self, body: Block | None, frame: Frame, active: Mask) -> list[Value]:
        if body is None:
            return []
        self._block(body, frame, active)
        assert body.last_op is not None
        return [frame[each] for each in body.last_op.operands]

    def _scf_for(self, op: Operation) -> Step:
        body = op.regions[0].blocks[0]
        first, stop, step, *starts = op.operands

        def run(frame: Frame, active: Mask) -> None:
            carried = [frame[each] for each in starts]
            induction, last, by = frame[first], frame[stop], frame[step]
            while True:
                alive = both(active, induction < last)
                if alive is not None and not alive.any():
                    break
                self._stop_if_late(op)
                frame[body.args[0]] = induction
                frame.update(zip(body.args[1:], carried, strict=True))
                made = self._yielded(body, frame, alive)
                carried = [merged(alive, *pair) for pair in zip(made, carried, strict=True)]
                induction = induction + by
            frame.update(zip(op.results, carried, strict=True))

        return run

    def _scf_while(self, op: Operation) -> Step:
        head, body = op.regions[0].blocks[0], op.regions[1].blocks[0]

        def run(frame: Frame, active: Mask) -> None:
            carried, alive = [frame[each] for each in op.operands], active
            passed: list[Value] = []
            while True:
                self._stop_if_late(op)
                frame.update(zip(head.args, carried, strict=True))
                condition, *now = self._yielded(head, frame, alive)
                passed = now if not passed else [merged(alive, *pair) for pair in zip(now, passed, strict=True)]
                alive = both(alive, condition)
                if alive is not None and not alive.any():
                    break
                frame.update(zip(body.args, passed, strict=True))
                made = self._yielded(body, frame, alive)
                carried = [merged(alive, *pair) for pair in zip(made, carried, strict=True)]
            frame.update(zip(op.results, passed, strict=True))

        return run

    def _stop_if_late(self, loop: Operation) -> None:
        if self._late():
            where = next(filter(None, map(self._meaning.place, loop.walk())), "")  # a `while` has none itself
            raise EndlessLoopError(
                f"kernel {self._meaning.name}: its TTIR runs for too long{f', in a loop ({where})' if where else ''}"
            )
