"""The module reader: what xDSL's own parser reads, in less time."""

import npu_offline
import pytest
from npu_offline.module.mlir import name_of, parse
from npu_offline.module.reader import Reader
from npu_offline.toolchain.compilers import printer
from npu_offline.toolchain.opt import opt
from sample_kernels import rms_norm
from xdsl.context import Context
from xdsl.dialects.builtin import Builtin
from xdsl.parser import Parser
from xdsl.utils.exceptions import ParseError

MODULE = """\
#map = affine_map<(d0) -> (d0 + 4)>
!number = i32
"builtin.module"() ({
  "llvm.func"() <{function_type = !llvm.func<void (ptr)>, sym_name = "first"}> ({
  ^bb0(%0: i64, %1: !number):
    "cf.br"(%0)[^bb2] : (i64) -> ()
  ^bb1:  // pred: ^bb2
    "test.use"(%2, %4#1) {map = #map, text = "} : (\\"i8\\") -> ()"} : (i64, f32) -> ()
    "llvm.return"() : () -> ()
  ^bb2(%2: i64):  // pred: ^bb0
    %3 = "test.one"(%2) <{value = dense<[1, 2]> : tensor<2xi32>}> : (i64) -> tensor<2xi32>
    %4:2, %5 = "test.three"() : () -> (f32, f32, !llvm.struct<(ptr, i64)>)
    "test.region"(%3) ({
    ^bb0(%6: i64):
      "test.yield"(%6, %5) : (i64, !llvm.struct<(ptr, i64)>) -> ()
    }, {
    }) {map = #map} : (tensor<2xi32>) -> ()
    "cf.br"()[^bb1] : () -> ()
  }) : () -> ()
  "llvm.func"() <{sym_name = "second"}> ({
  ^bb0(%0: !number):
    "test.use"(%0) {map = #map} : (!number) -> ()
  }) : () -> ()
}) : () -> ()
"""


def context():
    made = Context(allow_unregistered=True)
    made.load_dialect(Builtin)
    return made


def test_every_form_is_read_as_by_xdsl():
    mine, theirs = Reader(MODULE).parse_module(), Parser(context(), MODULE).parse_module()
    assert str(mine) == str(theirs)
    assert [name_of(op) for op in mine.walk()] == [name_of(op) for op in theirs.walk()]
    uses = [op for op in mine.walk() if name_of(op) == "test.use"]
    assert name_of(uses[0].operands[1].owner) == "test.three" and uses[0].operands[1].index == 1


def test_an_alias_means_what_its_own_module_says():
    other = MODULE.replace("d0 + 4", "d0 + 5").replace("!number = i32", "!number = i16")
    Reader(MODULE).parse_module()
    assert str(Reader(other).parse_module()) == str(Parser(context(), other).parse_module())


def test_a_type_of_an_unknown_dialect_is_the_same_in_every_module():
    text = """"builtin.module"() ({
    %0 = "test.make"() : () -> memref<2xf32, #test.space<ub>>
    "test.region"(%0) ({
    }) : (memref<2xf32, #test.space<ub>>) -> ()
}) : () -> ()
"""
    assert len({str(Reader(text).parse_module()) for _ in range(2)}) == 1


def test_operations_that_begin_alike_share_no_properties():
    module = parse(
        '"builtin.module"() ({\n"a.b"() <{x = 1 : i32}> : () -> ()\n"a.b"() <{x = 1 : i32}> : () -> ()\n}) : () -> ()\n'
    )
    first, second = (op for op in module.walk() if name_of(op) == "a.b")
    del first.properties["x"]
    assert "x" in second.properties


@pytest.mark.parametrize("broken", ["%9", "(i64, f32)", "^bb2]"])
def test_what_is_no_module_is_refused(broken):
    text = MODULE.replace("%4#1", "%9") if broken == "%9" else MODULE.replace(broken, "")
    with pytest.raises((ParseError, ValueError)):
        Reader(text).parse_module()


@pytest.mark.compilers
@pytest.mark.parametrize("toolchain", npu_offline.VERSIONS)
def test_stages_of_a_compilation_are_read_as_by_xdsl(toolchain, monkeypatch):
    if toolchain not in npu_offline.installed():
        pytest.skip(f"needs a toolchain (npu-offline fetch {toolchain})")
    signature = {"x_ptr": "*fp16", "w_ptr": "*fp16", "y_ptr": "*fp16", "n_rows": "i32", "eps": "fp32"}
    constants = {"D": 512, "BM": 4}
    report = npu_offline.compile_kernel(rms_norm, signature, constants, soc="Ascend910B4", toolchain=toolchain)
    texts = [report.stages[stage] for stage in ("linalg", "final")]
    generics = [opt(printer("Ascend910B4", toolchain), text, "--mlir-print-op-generic") for text in texts]
    mine = [str(parse(generic)) for generic in generics]
    monkeypatch.setattr("npu_offline.module.mlir.Reader", lambda text: Parser(context(), text))
    assert mine == [str(parse(generic)) for generic in generics]
