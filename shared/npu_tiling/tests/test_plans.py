"""Operators that are records and plans: what is derived, what runs, and when a call is decided again."""

import ctypes
import gc
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import npu_tiling
import pytest
import torch
from npu_tiling import arguments, operators, plans
from npu_tiling import chips as detection
from npu_tiling import launch as fallback
from npu_tiling.calls import Empty, Size, are_aligned, derive
from npu_tiling.direct import DirectCall
from npu_tiling.dispatch import Function, OperatorLibrary, apply
from npu_tiling.launch import CountTiling, Kernels
from npu_tiling.operators import Operator
from npu_tiling.plans import Plan, Reached, Slot
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

CHIP = npu_tiling.GPUS["H200"]
LIBRARY = OperatorLibrary("npu_tiling_test_plans")


class Tile(NamedTuple):
    BLOCK: int

    @property
    def constants(self):
        return {"BLOCK": self.BLOCK}

    @property
    def options(self):
        return {}

    def smaller(self):
        return Tile(self.BLOCK // 2) if self.BLOCK > 16 else None


def scale_kernel(p_x, p_y, n, factor, BLOCK: int):
    """y = factor x."""


class Scaled(NamedTuple):
    """y = factor x, twice where asked for."""

    x: Tensor
    other: Tensor | None
    factor: float
    twice: bool

    def results(self):
        like = Empty(self.x.shape, self.x.dtype)
        return {"y": like, "z": like if self.twice else None}


def scale(p: Plan, call: Scaled):
    y, z = (p.new(each) for each in call.results().values())
    x = p.contiguous(call.x)
    tile = p.decide("scale", Tile(64))
    for source, into in ((x, y), (y, z)):
        if into is not None:
            sizes = {"n": x.numel(), "factor": call.factor}
            p.launch(
                scale_kernel, "scale", -(-x.numel() // tile.BLOCK), reads={"p_x": source}, writes={"p_y": into}, sizes=sizes
            )
    return y, z


def reference(call: Scaled):
    y = (call.x * call.factor).contiguous()
    return y, y * call.factor if call.twice else None


class Recorded(Function):
    @staticmethod
    def forward(ctx, run, x, factor, twice):
        ctx.factor = factor
        return run(x, None, factor, twice)

    @staticmethod
    def backward(ctx, dy, dz):
        return None, dy * ctx.factor, None, None


OPERATOR = Operator(LIBRARY, "scaled", Scaled, ["y", "z"], plan=scale, reference=reference)
OPERATOR.autograd(lambda run, x, other, *options: apply(Recorded, run, x, *options), as_given=True)


@pytest.fixture
def launches(monkeypatch):
    """A CPU is an H200, and the kernel a stand-in: a list of the tiles that it was launched with, and how."""
    made, known = [], set()

    def run(kernel, tile, how, x, y, n, factor):
        made.append((tile, how))
        addresses = [each if isinstance(each, int) else each.data_ptr() for each in (x, y)]
        given, to = map((ctypes.c_float * n).from_address, addresses)
        to[:] = [each * factor for each in given]

    def launch(self, module, kernel, decision, grid, tensors, scalars):
        assert grid == -(-scalars[0] // decision.constants["BLOCK"])
        run(kernel, decision.constants["BLOCK"], "known" if decision.key in known else "new", *tensors, *scalars)
        known.add(decision.key)

    def direct_call(self, module, kernel, decision, grid, device, dtypes, scalars):
        def call(grid, _, __, stream, *given):
            run(kernel, decision.constants["BLOCK"], "direct", *given)

        return (DirectCall(call, lambda index: 0, (), ()), watching) if decision.key in known else None

    class Watching:
        hooks: tuple = ()

        def __bool__(self):
            return bool(self.hooks)

    watching = Watching()
    made.append(watching)
    monkeypatch.setitem(detection._found, torch.device("cpu"), CHIP)
    monkeypatch.setattr(Kernels, "launch", launch)
    monkeypatch.setattr(Kernels, "direct_call", direct_call)
    monkeypatch.setattr(fallback, "replaced", {})
    for name in ("_plans", "_functions"):
        monkeypatch.setattr(OPERATOR, name, {})
    monkeypatch.setattr(OPERATOR, "_approved", set())
    return made


def call(x, factor=2.0, twice=False):
    return OPERATOR(Scaled(x, None, factor, twice))


def ways(launches):
    """How kernels were launched since the last question."""
    found = [how for _, how in launches[1:]]
    del launches[1:]
    return found


def test_schema_fake_function_and_opcheck_follow_from_the_record():
    assert OPERATOR.signature.schema == "scaled(Tensor x, Tensor? other, float factor, bool twice) -> (Tensor y, Tensor z)"
    operator = torch.ops.npu_tiling_test_plans.scaled.default
    for twice in (False, True):
        torch.library.opcheck(operator, (torch.randn(3, 5).t().requires_grad_(), None, 2.0, twice))


def test_a_record_takes_from_another_what_it_is_not_given():
    scaled = Scaled(torch.ones(2), None, 2.0, True)
    assert derive(Scaled, scaled, factor=3.0) == Scaled(scaled.x, None, 3.0, True)
    with pytest.raises(TypeError, match="'factors'"):
        derive(Scaled, scaled, factors=3.0)
    with pytest.raises(AttributeError, match="BLOCK"):
        derive(Tile, scaled)


def test_equal_calls_become_a_function_and_other_calls_do_not(launches):
    x = torch.randn(8, 16)
    for expected in (["new"], ["known"], ["direct"], ["direct"]):
        assert torch.equal(call(x)[0], 2 * x)
        assert ways(launches) == expected
    for y in (torch.randn(8, 16), torch.randn(24, 16)[8:16]):
        assert torch.equal(call(y)[0], 2 * y)
        assert ways(launches) == ["direct"]
    others = {
        "size": torch.randn(9, 16),
        "strides": torch.randn(16, 8).t(),
        "an address that is not aligned": torch.randn(129)[1:].view(8, 16),
    }
    for other in others.values():
        for _ in range(3):
            assert torch.equal(call(other)[0], 2 * other)
    assert ways(launches) == ["known", "known", "direct"] * 2 + ["known"] * 3
    for factor in (0.0, -0.0, 1, 1.0, True):
        for _ in range(4):
            found = call(x, factor)[0]
            assert torch.equal(found, x * float(factor))


def test_a_function_runs_with_gradients_and_for_each_result_that_is_asked_for(launches):
    for twice in (False, True):
        for _ in range(5):
            x = torch.randn(4, 8, requires_grad=True)
            y, z = call(x, 3.0, twice)
            assert torch.equal(y, 3 * x) and (z is None) is not twice
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, 3.0))
    assert ways(launches)[-2:] == ["direct", "direct"]


def test_a_recorded_call_makes_one_key(launches, monkeypatch):
    x, made, key = torch.randn(4, 8, requires_grad=True), [], OPERATOR._key
    monkeypatch.setattr(OPERATOR, "_key", lambda *arguments: made.append(key(*arguments)) or made[-1])
    for calls in (1, 2, 3, 4):
        assert torch.equal(call(x)[0], 2 * x)
        assert len(made) == calls


def test_a_profiler_and_another_chip_see_every_launch(launches):
    x = torch.randn(4, 8)
    for _ in range(4):
        call(x)
    ways(launches)
    launches[0].hooks = ("a hook",)
    assert torch.equal(call(x)[0], 2 * x) and ways(launches) == ["known"]
    launches[0].hooks = ()
    with npu_tiling.use_device(CHIP, emulated=True):
        assert torch.equal(call(x)[0], 2 * x) and ways(launches) == ["known"]
    with detection.plain_pytorch():
        assert torch.equal(call(x)[0], 2 * x) and ways(launches) == []
    call(x)
    assert ways(launches) == ["direct"]


def test_equal_calls_are_checked_once(launches):
    asked = []

    def check(given):
        asked.append(given)
        arguments.rows("x", given.x)

    def checked(x, factor=2.0):
        given = Scaled(x, None, factor, False)
        found = OPERATOR.if_checked(check, given)
        if found is None:
            check(given)
            found = OPERATOR(given, check)
        return found[0]

    x = torch.randn(4, 8)
    for _ in range(3):
        assert torch.equal(checked(x), 2 * x)
    assert len(asked) == 1
    assert OPERATOR.if_checked(check, Scaled(x, x.to("meta"), 2.0, False)) is None
    for wrong in ("a string", None, 3, [x], torch.randn(())):
        with pytest.raises((TypeError, ValueError), match="x"):
            checked(wrong)
    assert OPERATOR.if_checked("another check", Scaled(x, None, 2.0, False)) is None
    assert OPERATOR.if_checked(check, Scaled(x, None, 2, False)) is None  # an int, which the check saw no equal of
    assert OPERATOR.if_checked(check, Scaled(x, None, [], False)) is None
    with detection.plain_pytorch():
        assert OPERATOR.if_checked(check, Scaled(x, None, 2.0, False)) is None


def refusing(monkeypatch, above):
    launch = Kernels.launch

    def refused(self, module, kernel, decision, *rest):
        if decision.constants["BLOCK"] > above:
            raise RuntimeError("ub overflow, requires 16 bits while 8 bits available")
        launch(self, module, kernel, decision, *rest)

    monkeypatch.setattr(Kernels, "launch", refused)


def test_a_refused_tile_is_replaced_by_the_next_one_once(launches, monkeypatch):
    refusing(monkeypatch, above=16)
    x = torch.randn(6, 4).t()
    with pytest.warns(RuntimeWarning, match="overflows the Unified Buffer") as warned:
        assert torch.equal(call(x, twice=True)[1], 4 * x)
    assert len(warned) == 2 and [tile for tile, _ in launches[1:]] == [16, 16]
    for size in (6, 7):
        y = torch.randn(size, 4).t()
        assert torch.equal(call(y)[0], 2 * y)  # and no warning, which would be an error here
    assert {tile for tile, _ in launches[1:]} == {16}


def test_of_two_decisions_with_one_name_the_refused_one_is_made_again(launches, monkeypatch):
    def twice(p, call):
        y, _ = scale(p, call)
        z, _ = scale(p, call._replace(x=y))
        return y, z

    operator = Operator(LIBRARY, "two_decisions", Scaled, ["y", "z"], plan=twice, reference=reference)
    refusing(monkeypatch, above=32)
    x = torch.randn(4, 8)
    with pytest.warns(RuntimeWarning, match="overflows the Unified Buffer") as warned:
        y, z = operator(Scaled(x, None, 2.0, False))
    assert torch.equal(y, 2 * x) and torch.equal(z, 4 * x)
    assert len(warned) == 1


def test_a_call_whose_every_tile_is_refused_is_an_error_that_says_so(launches, monkeypatch):
    refusing(monkeypatch, above=0)
    with pytest.warns(RuntimeWarning), pytest.raises(npu_tiling.UnifiedBufferError, match="not even its smallest tile"):
        call(torch.randn(4, 8))


def plan_of(x, **tiles):
    return OPERATOR.plan(Scaled(x, None, 2.0, True), CHIP, tiles=tiles)


def test_a_plan_needs_no_data_and_its_tiles_can_be_set():
    x = torch.empty(2**20, 64, device="meta")
    plan = plan_of(x)
    assert [type(step).__name__ for step in plan.steps] == ["New", "New", "Launch", "Launch"]
    first = plan.steps[2]
    assert (first.kernel, first.grid, first.numbers) == ("scale_kernel", 2**20, (2**26, 2.0))
    assert first.reads == {"p_x": plan.arguments[0]} and first.writes == {"p_y": plan.results[0]}
    assert first.origin.function == "scale" and "test_plans.py:" in first.origin.place
    assert plan_of(x, scale=Tile(1024)).steps[2].grid == 2**16


def test_a_launch_names_every_parameter_and_no_other():
    def wrong(p, call):
        p.decide("scale", Tile(64))
        p.launch(scale_kernel, "scale", 1, reads={"p_x": call.x, "p_z": call.x}, writes={}, sizes={"n": 1, "factor": 1.0})

    plan = Plan(CHIP)
    with pytest.raises(TypeError, match=r"scale_kernel: missing \['p_y'\], unknown \['p_z'\]"):
        wrong(plan, Scaled(plan.argument(torch.empty(4)), None, 2.0, False))


def test_a_launch_takes_the_constants_that_its_kernel_has():
    class Wide(Tile):
        @property
        def constants(self):
            return {"UNUSED": 1, **super().constants}

    x = torch.empty(4)
    narrow, wide = (plan_of(x, scale=tiling).launches[0].decision for tiling in (Tile(64), Wide(64)))
    assert wide.constants == narrow.constants and wide.key == narrow.key

    plan = Plan(CHIP)
    slot = plan.argument(x)
    plan.decide("scale", Wide(64))
    given = {"reads": {"p_x": slot}, "writes": {"p_y": slot}, "sizes": {"n": 1, "factor": 1.0}}
    with pytest.raises(TypeError, match=r"missing \[\], unknown \['FLAG'\]"):
        plan.launch(scale_kernel, "scale", 1, flags={"FLAG": True}, **given)


def test_a_step_that_reads_an_argument_after_it_was_written_to_is_an_error():
    plan = Plan(CHIP)
    x, y = plan.argument(torch.empty(4)), plan.argument(torch.empty(4))
    plan.torch(torch.Tensor.copy_, x, y, writes=[x])
    with pytest.raises(AssertionError, match="after it was written to"):
        plan.torch(torch.Tensor.copy_, y, plan.view(x, (2,), (1,), 1), writes=[y])


def test_memory_ends_with_its_last_use(launches):
    alive = []

    def note(tensor):
        alive.append(weakref.ref(tensor))
        return tensor.clone()

    def chain(p, call):
        x = call.x
        for _ in range(4):
            x = p.torch(note, x, makes=Empty(x.shape, x.dtype))
        p.torch(lambda tensor: alive.append(sum(each() is not None for each in alive[1:])), x, writes=[])
        return (x, None)

    operator = Operator(LIBRARY, "chain", Scaled, ["y", "z"], plan=chain, reference=reference)
    x = torch.randn(4)
    gc.collect()
    assert torch.equal(operator(Scaled(x, None, 1.0, False))[0], x)
    assert alive[-1] == 0  # of what was copied, the argument aside


def test_memory_that_was_viewed_or_returned_beside_what_is_used_ends_too(launches):
    """After the last use of its views, before the next function runs."""
    made, held = [], []

    def note(tensor):
        held.append([not each.expired() for each in made])

    def copies(*views):
        both = [each.clone() for each in views]
        made.extend(StorageWeakRef(each.untyped_storage()) for each in (*views, *both))
        return both

    def chain(p, call):
        x = call.x
        of_bits, plain = (p.new(Empty(x.shape, x.dtype)) for _ in range(2))
        for each in (of_bits, plain):
            p.torch(torch.Tensor.copy_, each, x, writes=[each])
        views = p.view(of_bits, x.shape, (1,), dtype=torch.int32), p.view(plain, (2,), (1,), 2)
        _, half = p.torch(copies, *views, makes=[None, Empty((2,), x.dtype)])
        p.torch(note, half)
        p.torch(note, x)
        return (p.torch(torch.Tensor.clone, x, makes=Empty(x.shape, x.dtype)), None)

    operator = Operator(LIBRARY, "views_end", Scaled, ["y", "z"], plan=chain, reference=reference)
    x = torch.randn(4)
    for _ in range(4):  # step by step, then as a function
        made.clear()
        held.clear()
        assert torch.equal(operator(Scaled(x, None, 1.0, False))[0], x)
        assert held == [[False, False, False, True], [False] * 4]


def test_views_start_where_an_argument_does(launches):
    def halves(p, call):
        second = p.view(call.x, (4,), (1,), 4)
        return p.torch(torch.Tensor.clone, second, makes=Empty((4,), second.dtype)), None

    operator = Operator(LIBRARY, "halves", Scaled, ["y", "z"], plan=halves, reference=reference)
    for x in (torch.randn(8), torch.randn(24)[16:]):
        for _ in range(3):
            assert torch.equal(operator(Scaled(x, None, 1.0, False))[0], x[4:])


@pytest.mark.parametrize("by_address", [False, True], ids=["tensors, as on npu", "addresses, as on cuda"])
def test_launches_reach_views(launches, monkeypatch, by_address):
    """Of an argument, and of memory that the plan makes."""

    def halves(p, call):
        y = p.new(Empty((8,), torch.float32))
        p.decide("scale", Tile(64))
        for start in (4, 0):
            source, into = (p.view(each, (4,), (1,), start) for each in (call.x, y))
            sizes = {"n": 4, "factor": call.factor}
            p.launch(scale_kernel, "scale", 1, reads={"p_x": source}, writes={"p_y": into}, sizes=sizes)
        return y, None

    class Writer(operators._Writer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self._by_address = by_address

    monkeypatch.setattr(operators, "_Writer", Writer)
    operator = Operator(LIBRARY, f"halves_{by_address}", Scaled, ["y", "z"], plan=halves, reference=reference)
    for x in [torch.randn(8), torch.randn(24)[16:]] * 3:
        assert torch.equal(operator(Scaled(x, None, 3.0, False))[0], 3 * x)
    assert ways(launches)[-6:] == ["direct"] * 6


def test_slots_know_which_strides_are_contiguous():
    for shape, strides, expected in (((2, 3), (3, 1), True), ((2, 3), (1, 2), False), ((1, 3), (7, 1), True)):
        assert Slot(0, shape, strides, torch.float32, 0).is_contiguous() is expected
    assert Empty((2, 3, 4), torch.float32, last_outermost=True).strides == (3, 1, 6)


class Sorted(NamedTuple):
    """The upper halves of fp32 numbers in ascending order, from the number at `first` on."""

    x: Tensor
    first: Size
    bound: float | None

    def results(self):
        return {"halves": Empty((self.x.numel() - self.first, 2), torch.int16)}


def sorted_halves(p, call):
    x = call.x
    if call.bound is not None:
        x = p.new(Empty(x.shape, x.dtype))
        p.torch(torch.clamp, call.x, call.bound)  # what it returns is not used
        p.torch(torch.Tensor.copy_, x, call.x, writes=[x])
    x = p.view(x, (x.numel(),), (1,))
    values, _ = p.torch(torch.sort, x, makes=(Empty(x.shape, x.dtype), Empty(x.shape, torch.int64)))
    last = p.view(values, (x.numel() - call.first,), (1,), call.first)
    p.view(p.torch(torch.clone, x, makes=Empty(x.shape, x.dtype)), (1,), (1,))  # which no step uses
    halves = p.view(last, (x.numel() - call.first, 2), (2, 1), dtype=torch.int16)
    return [p.torch(torch.clone, halves, makes=call.results()["halves"])]


class Cleared(NamedTuple):
    """Sets x to 0."""

    x: Tensor

    def results(self):
        return {}


def clear(p, call):
    p.torch(torch.Tensor.zero_, call.x, writes=[call.x])
    return ()


SORTED = Operator(
    LIBRARY,
    "sorted_halves",
    Sorted,
    ["halves"],
    plan=sorted_halves,
    reference=lambda call: [call.x.sort().values.view(torch.int16).view(-1, 2)[call.first :].clone()],
)
CLEARED = Operator(
    LIBRARY, "cleared_", Cleared, [], plan=clear, reference=lambda call: (call.x.zero_(), ())[1], writes=["x"]
)


def test_one_result_stands_by_itself_and_a_symbol_is_an_option(launches):
    assert SORTED.signature.schema == "sorted_halves(Tensor x, SymInt first, float? bound) -> (Tensor halves)"
    assert torch.equal(SORTED(Sorted(torch.tensor(1.5), 0, None)), torch.tensor([[0, 16320]], dtype=torch.int16))
    for bound in (None, -9.0):
        torch.library.opcheck(torch.ops.npu_tiling_test_plans.sorted_halves.default, (torch.randn(8), 2, bound))
        for _ in range(4):  # by steps, then as a function
            x = torch.randn(8)
            assert torch.equal(SORTED(Sorted(x, 2, bound)), x.sort().values.view(torch.int16).view(-1, 2)[2:])
    assert SORTED._functions


def test_an_operator_without_results_returns_none(launches):
    assert CLEARED.signature.schema == "cleared_(Tensor(a!) x) -> ()"
    for _ in range(4):
        x = torch.randn(8)
        assert CLEARED(Cleared(x)) is None and not x.any()
    assert CLEARED._functions


def flagged_kernel(p_x, BLOCK: int, BY_ROW: int):
    """A kernel."""


def test_flags_are_constants_beside_those_of_the_tiling():
    plan = Plan(CHIP)
    plan.decide("flagged", Tile(64))
    x = plan.argument(torch.empty(4))
    plan.launch(flagged_kernel, "flagged", 1, reads={"p_x": x}, writes={}, sizes={}, flags={"BY_ROW": True})
    assert plan.launches[0].decision.constants == {"BLOCK": 64, "BY_ROW": True}


def test_a_launch_over_rows_has_the_programs_of_the_tiling_that_was_decided():
    def tiling(rows):
        return CountTiling(device=CHIP, blocks=(("BLOCK", rows), ("BY_ROW", 1)), per_program=rows, why="", decided_at="")

    plan = Plan(CHIP, {"by hand": tiling(4)}, {("flagged_kernel", tiling(16)): tiling(8)})
    x = plan.argument(torch.empty(64))
    for name in ("", "by hand"):
        plan.launch_over(flagged_kernel, tiling(16), 64, decision=name, reads={"p_x": x}, writes={}, sizes={})
    assert [(each.decision.name, each.grid) for each in plan.launches] == [("flagged_kernel", 8), ("by hand", 16)]


class Listed(NamedTuple):
    """Each of several tensors times a factor, where it is asked for, and one more tensor."""

    xs: Sequence[Tensor]
    x: Tensor
    factor: float
    wanted: Sequence[bool]
    n: Size
    dtype: torch.dtype | None

    def results(self, chip):
        asked = zip(self.xs, self.wanted, strict=True)
        return {"ys": [Empty(x.shape, x.dtype) if each else None for x, each in asked], "y": None}


def halve_and_leave(one, others):
    return one / 2, None, [other / 2 for other in others][-1]


def scale_list(p: Plan, call: Listed):
    p.decide("scale", Tile(64))
    ys = [p.new(each) for each in call.results(p.chip)["ys"]]
    for x, y in zip(call.xs, ys, strict=True):
        if y is not None:
            given = {"p_x": Reached([x, call.x]), "p_y": y}
            p.launch(scale_kernel, "scale", 1, reads=given, writes={}, sizes={"n": x.numel(), "factor": 2 * call.factor})
    alike = Empty(call.x.shape, call.x.dtype)
    one, nothing, last = p.torch(halve_and_leave, ys[0], [ys[0], ys[-1]], makes=[alike, None, alike])
    assert nothing is None
    return [one, *ys[1:-1], last], None


def scaled_list(call: Listed):
    return [x * call.factor if each else None for x, each in zip(call.xs, call.wanted, strict=True)], None


LISTED = Operator(LIBRARY, "listed", Listed, ["ys", "y"], plan=scale_list, reference=scaled_list, lists=["ys"], batched=True)


def test_lists_are_arguments_results_and_arguments_of_steps(launches):
    schema = "listed(Tensor[] xs, Tensor x, float factor, bool[] wanted, SymInt n, ScalarType? dtype) -> "
    assert LISTED.signature.schema == schema + "(Tensor?[] ys, Tensor y)"
    for wanted in ((True, True, True), (True, False, True)):
        torch.library.opcheck(
            torch.ops.npu_tiling_test_plans.listed.default,
            ([torch.randn(2, 8) for _ in range(3)], torch.randn(2, 8), 3.0, wanted, 1, None),
            test_utils="test_faketensor",
        )
        for _ in range(4):
            xs = [torch.randn(2, 8) for _ in range(3)]
            ys, none = LISTED(Listed(xs, torch.randn(2, 8), 3.0, wanted, 1, None))
            expected = [3 * x if i in (0, 2) else 6 * x for i, x in enumerate(xs)]
            assert none is None
            for one, asked, y in zip(ys, wanted, expected, strict=True):
                assert torch.equal(one, y) if asked else one is None
    assert ways(launches)[-4:] == ["direct"] * 4


def test_a_plan_knows_whether_the_tensors_of_a_list_are_aligned():
    aligned, other = torch.empty(64), torch.empty(64)[4:]
    assert are_aligned([aligned]) and not are_aligned([aligned, other])
    for xs, expected in (([aligned, aligned], True), ([aligned, other], False)):
        call = Listed([x[:32] for x in xs], aligned[:32], 1.0, [True, True], 1, None)
        assert LISTED.plan(call, CHIP).aligned_lists is expected
    keys = [LISTED.signature.key([x[:32]], aligned, 1.0, [True], 1, None) for x in (aligned, other)]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("by_address", [False, True], ids=["tensors, as on npu", "addresses, as on cuda"])
def test_a_launch_may_be_given_tuples_of_slots(launches, by_address):
    plan, given = Plan(CHIP), []
    x, y = plan.argument(torch.empty(4)), plan.argument(torch.empty(4))
    plan.decide("scale", Tile(64))
    plan.launch(
        scale_kernel, "scale", 1, reads={"p_x": (x, y)}, writes={"p_y": Reached([y, x])}, sizes={"n": 4, "factor": 1.0}
    )
    call = DirectCall(lambda grid, _, __, stream, *arguments: given.extend(arguments), lambda index: 0, (), ())
    tensors = torch.empty(4), torch.empty(4)
    writer = operators._Writer(plan, torch.device("cpu"), [2])
    writer._by_address = by_address
    writer.function(iter([(call, ())]))([*tensors])
    first, second = (tensor.data_ptr() for tensor in tensors) if by_address else tensors
    assert all(one is each or one == each for one, each in zip(given[0], (first, second), strict=True))
    reached = given[1] if by_address else given[1][0]  # a CPU emulates kernels, and needs all that one may reach
    assert reached is second or reached == second
    assert [slot.number for slot in plans.slots_in(plan.steps[0].slots)] == [0, 1, 1, 0]


def test_a_launch_is_given_descriptors(launches):
    """They are made anew in every call, and passed on as they are."""
    made = []

    def describe(matrix, rows, columns):
        made.append((tuple(matrix.shape), rows, columns))
        return matrix

    def described(p, call):
        y = p.new(call.results()["y"])
        p.decide("scale", Tile(64))
        d_x = p.descriptor(call.x, (2, 4), describe)
        assert d_x.block == (2, 4)
        sizes = {"n": call.x.numel(), "factor": call.factor}
        p.launch(scale_kernel, "scale", 1, reads={"p_x": d_x}, writes={"p_y": y}, sizes=sizes)
        return y, None

    operator = Operator(LIBRARY, "described", Scaled, ["y", "z"], plan=described, reference=reference)
    for i in range(4):
        x = torch.rand(2, 4)
        assert torch.equal(operator(Scaled(x, None, 3.0, False))[0], 3 * x)
        assert made == [((2, 4), 2, 4)] * (i + 1)
    assert ways(launches)[-1] == "direct"
