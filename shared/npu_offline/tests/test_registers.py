"""Vector functions on registers, and jumps: on modules short enough to count by hand."""

import pytest
from npu_offline import UnsupportedError
from npu_offline.module.mlir import parse
from npu_offline.timing import costs_of
from npu_offline.timing.instructions import SetFlag
from npu_offline.timing.program import translate
from npu_offline.timing.register_costs import library
from npu_offline.timing.registers import vector_functions

COSTS = costs_of("Ascend950PR_957b")
UB = "#hivm.address_space<ub>"
HEAD = 20
V = "vector<64xf32>"
ADD = f'"hivm_regbaseintrins.intr.hivm.vadd.s.x"({{}}, {{}}, %m) : ({V}, {V}, vector<256xi1>) -> {V}'
LOAD = '"hivm_regbaseintrins.intr.hivm.vldsx1.v64f32"(%p, {}, %one, %one) : (!llvm.ptr<6>, i32, i32, i32) -> vector<64xf32>'
STORE = '"hivm_regbaseintrins.intr.hivm.vstsx1.{}"({}, %p, %i, %m) : ({}, !llvm.ptr<6>, i32, vector<256xi1>) -> ()'
MASK = '"hivm_regbaseintrins.intr.hivm.pge.b32"(%one, %one) : (i32, i32) -> vector<256xi1>'

JUMPS = f"""
  "func.func"() <{{function_type = (memref<8x64xf32, {UB}>, i32, !llvm.ptr<6>) -> (), sym_name = "vf"}}> ({{
  ^bb0(%x: memref<8x64xf32, {UB}>, %n: i32, %p: !llvm.ptr<6>):
    %one = "llvm.mlir.constant"() <{{value = 1 : i32}}> : () -> i32
    %zero = "llvm.mlir.constant"() <{{value = 0 : i32}}> : () -> i32
    %m = {MASK}
    %first = {LOAD.format("%zero")}
    "cf.br"(%zero, %first)[^bb1] : (i32, vector<64xf32>) -> ()
  ^bb1(%i: i32, %sum: vector<64xf32>):
    %more = "arith.cmpi"(%i, %n) <{{predicate = 2 : i64}}> : (i32, i32) -> i1
    "cf.cond_br"(%more)[^bb2, ^bb3] <{{operandSegmentSizes = array<i32: 1, 0, 0>}}> : (i1) -> ()
  ^bb2:
    BODY
    %next = "llvm.add"(%i, %one) : (i32, i32) -> i32
    "cf.br"(%next, LEFT)[^bb1] : (i32, vector<64xf32>) -> ()
  ^bb3:
    "func.return"() : () -> ()
  }}) {{hivm.vector_function}} : () -> ()
"""

LOOP = f"""
  "func.func"() <{{function_type = (memref<8x64xf32, {UB}>) -> (), sym_name = "vf"}}> ({{
  ^bb0(%x: memref<8x64xf32, {UB}>):
    %zero = "arith.constant"() <{{value = 0 : index}}> : () -> index
    %one = "arith.constant"() <{{value = 1 : index}}> : () -> index
    %last = "arith.constant"() <{{value = 8 : index}}> : () -> index
    %pad = "arith.constant"() <{{value = 0.0 : f32}}> : () -> f32
    %first = "arith.constant"() <{{value = dense<0.0> : vector<64xf32>}}> : () -> vector<64xf32>
    %all = "scf.for"(%zero, %last, %one, %first) ({{
    ^bb1(%i: index, %sum: vector<64xf32>):
      %v = "vector.transfer_read"(%x, %i, %zero, %pad) : (memref<8x64xf32, {UB}>, index, index, f32) -> vector<64xf32>
      %w = "math.exp"(%v) : (vector<64xf32>) -> vector<64xf32>
      %left = "arith.addf"(%sum, %w) : (vector<64xf32>, vector<64xf32>) -> vector<64xf32>
      "scf.yield"(%left) : (vector<64xf32>) -> ()
    }}) : (index, index, index, vector<64xf32>) -> vector<64xf32>
    "func.return"() : () -> ()
  }}) {{hivm.vector_function}} : () -> ()
"""


def functions(text):
    return vector_functions(parse(f'"builtin.module"() ({{{text}}}) : () -> ()'), COSTS)


def called(*body, left="%sum", rounds=8):
    function = functions(JUMPS.replace("BODY", "\n".join(body)).replace("LEFT", left))["vf"]
    assert function.needed == (1,)
    cost = function.call(rounds)
    assert cost.peak <= cost.busy
    return cost


def test_a_loop_costs_its_arithmetic_as_often_as_its_argument_says():
    body = [f"%a{i} = {ADD.format(f'%a{i - 1}' if i else '%v', '%v')}" for i in range(3)]
    cost = called(f"%v = {LOAD.format('%i')}", *body)
    assert (cost.busy, cost.latency, cost.elements) == (
        HEAD + 8 * 3 + 1 + 0.5 - 0.5,
        4,
        8 * 64,
    )  # and a mask before the loop
    assert called(f"%v = {LOAD.format('%i')}", *body, rounds=100).busy - cost.busy == 92 * 3


def test_a_running_sum_waits_for_the_sum_before():
    body = (f"%v = {LOAD.format('%i')}", f"%s = {ADD.format('%sum', '%v')}")
    assert called(*body).busy == HEAD + 1 + 8
    assert called(*body, left="%s").busy == HEAD + 1 + 8 * 4


def test_accesses_go_beside_the_arithmetic():
    loads = [f"%v{i} = {LOAD.format('%i')}" for i in range(6)]
    assert called(*loads).busy == HEAD + 1 + 8 * 6 / 2
    store = STORE.format("v64f32", "%sum", "vector<64xf32>")
    assert called(*loads, store, store).busy == HEAD + 1 + 8 * 8 / 2
    narrow = called(
        f"%h = {LOAD.format('%i').replace('v64f32', 'v128bf16').replace('vector<64xf32>', 'vector<128xbf16>')}",
        STORE.format("v128bf16", "%h", "vector<128xbf16>"),
    )
    assert narrow.busy == HEAD + 1 + 8 * 5


def test_what_does_not_change_in_a_loop_is_computed_once():
    body = [f"%m{i} = {MASK}" for i in range(5)]
    assert called(*body).busy == called(*body, rounds=80).busy == HEAD + 6


def test_the_bound_issues_in_pairs_and_stores_one_at_a_time():
    adds = [f"%a{i} = {ADD.format('%sum', '%sum')}" for i in range(6)]
    assert called(*adds, rounds=1000).peak == pytest.approx(1000 * 6 / 2, rel=0.01)
    store = STORE.format("v64f32", "%sum", "vector<64xf32>")
    assert called(store, store, rounds=1000).peak == pytest.approx(1000 * 2, rel=0.01)


def test_operations_on_vectors_cost_as_their_instructions_do():
    cost = functions(LOOP)["vf"].call()
    assert (cost.busy, cost.latency) == (HEAD + 8 * (4 + 1), 13)


def test_unknown_instructions_are_refused():
    with pytest.raises(UnsupportedError, match="math.sin"):
        functions(LOOP.replace("math.exp", "math.sin"))
    with pytest.raises(UnsupportedError, match="vsort32"):
        called(f"%v = {ADD.format('%sum', '%sum').replace('vadd', 'vsort32')}")
    with pytest.raises(UnsupportedError, match="reduce_sum_ar_float"):
        library("reduce_sum_ar_float", (4, 64), 4)
    assert library("copy_ubuf_to_ubuf_1d_float", (640,), 4).busy == HEAD + 10


KERNEL = """
  "func.func"() <{function_type = (i64, i64, i64, i32, i32, i32, i32) -> (), sym_name = "kernel"}> ({
  ^bb0(%f: i64, %l: i64, %w: i64, %n: i32, %x: i32, %y: i32, %z: i32):
    %zero = "llvm.mlir.constant"() <{value = 0 : index}> : () -> i64
    %one = "llvm.mlir.constant"() <{value = 1 : i64}> : () -> i64
    %two = "llvm.mlir.constant"() <{value = 2 : i64}> : () -> i64
    %place = "builtin.unrealized_conversion_cast"(%zero) : (i64) -> index
    %buffer = "hivm.hir.pointer_cast"(%zero) : (i64) -> BUFFER
    %p = "llvm.mlir.undef"() : () -> !llvm.ptr<6>
    %cell = "memref.alloca"() <{operandSegmentSizes = array<i32: 0, 0>}> : () -> memref<1xi64>
    "memref.store"(%zero, %cell, %place) : (i64, memref<1xi64>, index) -> ()
    %begin = "hivm.hir.get_block_idx"() : () -> i64
    %number = "llvm.trunc"(%begin) : (i64) -> i32
    "cf.br"(%number)[^bb1] : (i32) -> ()
  ^bb1(%i: i32):
    %more = "llvm.icmp"(%i, %n) <{predicate = 2 : i64}> : (i32, i32) -> i1
    "cf.cond_br"(%more)[^bb2, ^bb3] <{operandSegmentSizes = array<i32: 1, 0, 0>}> : (i1) -> ()
  ^bb2:
    %count = "memref.load"(%cell, %place) : (memref<1xi64>, index) -> i64
    %event = "llvm.urem"(%count, %two) : (i64, i64) -> i64
    "func.call"(%buffer, %n, %p) <{callee = @vf}> {hivm.vector_function} : (BUFFER, i32, !llvm.ptr<6>) -> ()
    "hivm.hir.set_flag"(%event) {set_pipe = #hivm.pipe<PIPE_V>, wait_pipe = #hivm.pipe<PIPE_MTE3>} : (i64) -> ()
    %next = "llvm.add"(%count, %one) : (i64, i64) -> i64
    "memref.store"(%next, %cell, %place) : (i64, memref<1xi64>, index) -> ()
    %after = "arith.addi"(%i, %x) : (i32, i32) -> i32
    "cf.br"(%after)[^bb1] : (i32) -> ()
  ^bb3:
    "func.return"() : () -> ()
  }) {hacc.function_kind = #hacc.function_kind<DEVICE>} : () -> ()
""".replace("BUFFER", f"memref<8x64xf32, {UB}>")


def test_jumps_and_counters_on_the_stack_are_followed():
    function = functions(JUMPS.replace("BODY", f"%s = {ADD.format('%sum', '%sum')}").replace("LEFT", "%s"))["vf"]
    (program,) = translate(parse(f'"builtin.module"() ({{{KERNEL}}}) : () -> ()'), {"n": "i32"}, COSTS, {"vf": function})
    issues = list(program.run(1, 0, 3, 1, 1, None, 12))  # program 1 of 3: rounds 1, 4, 7 and 10
    calls, flags = issues[::2], issues[1::2]
    assert [(type(item), item.event) for _, item, _ in flags] == [(SetFlag, event) for event in (0, 1, 0, 1)]
    assert {item.busy for _, item, _ in calls} == {HEAD + 1 + 12 * 4}
    assert list(program.run(2, 0, 3, 1, 1, None, 2)) == []
    # Two jumps, a comparison, the load, the remainder, the store and two additions from one flag to the next call.
    assert (calls[2][0], flags[2][0]) == (8 * COSTS.scalar_op, 0)
