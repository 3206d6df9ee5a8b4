"""What the releases of triton-ascend ask of device code, read from its source.

Device helpers that one kernel reaches have names of their own: triton-ascend 3.2.0 tells helpers apart by name and types.

Where two helpers of one name meet in a kernel, the second silently computes the first; a helper called `sigmoid` replaces
`tl.sigmoid`. A masked load says what a masked element is: releases after 3.2.1 leave it undefined, where 3.2.0 gives zero,
and they refuse `other` without a mask.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap

import pytest

from tools.workspace import ROOT, read_packages

triton = pytest.importorskip("triton", reason="needs Triton: device code imports it")
tl = pytest.importorskip("triton.language")

PACKAGES = [package for package in read_packages().values() if package.is_operator or package.name == "npu-tiling"]


def functions_of(package):
    """Every `@triton.jit` function that the package's modules define, by module and name."""
    source = ROOT / package.folder / "src"
    found = {}
    for path in sorted((source / package.module).rglob("*.py")):
        if "@triton.jit" not in path.read_text():
            continue
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, triton.runtime.JITFunction) and value.fn.__module__ == name:
                found[name, value.fn.__name__] = value
    return found


@functools.cache
def called(function):
    """The `@triton.jit` functions that the source of one names: those of triton.language too."""
    found, tree = [], ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    for node in ast.walk(tree):
        value = None
        if isinstance(node, ast.Name):
            value = function.fn.__globals__.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            value = getattr(function.fn.__globals__.get(node.value.id), node.attr, None)
        if isinstance(value, triton.runtime.JITFunction):
            found.append(value)
    return found


def reached(function):
    """What a function calls, through any number of helpers."""
    seen, waiting = {}, [function]
    while waiting:
        for helper in called(waiting.pop()):
            if id(helper) not in seen:
                seen[id(helper)] = helper
                waiting.append(helper)
    return list(seen.values())


def clashes(function):
    """Names of helpers that `function` reaches twice, or that triton.language has too."""
    helpers = reached(function)
    names = [helper.fn.__name__ for helper in helpers]
    ours = [helper.fn.__name__ for helper in helpers if not helper.fn.__module__.startswith("triton.")]
    return sorted({name for name in names if names.count(name) > 1} | {name for name in ours if hasattr(tl, name)})


@pytest.mark.parametrize("package", PACKAGES, ids=[package.name for package in PACKAGES])
def test_helpers_that_one_kernel_reaches_have_names_of_their_own(package):
    functions = functions_of(package)
    assert functions
    assert {key: clashes(function) for key, function in functions.items() if clashes(function)} == {}


@triton.jit
def sigmoid(x):
    return x + 1


@triton.jit
def planted_kernel(p_x):
    tl.store(p_x, sigmoid(tl.load(p_x)))


def test_a_helper_with_the_name_of_one_of_tritons_is_found():
    assert clashes(planted_kernel) == ["sigmoid"]


def undefined_loads(path):
    """Loads of a file with a mask and without `other`, or the reverse.

    One whose value is stored at once under its own mask needs no `other`.
    """
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "tl.load"]
    stores = [call for call in calls if ast.unparse(call.func) == "tl.store" and call.args[1] in loads]
    stored = [store.args[1] for store in stores if mask_of(store, 2) == mask_of(store.args[1], 1)]
    return [ast.unparse(load) for load in loads if load not in stored and bool(mask_of(load, 1)) != has_other(load)]


def has_other(load):
    return len(load.args) > 2 or "other" in named(load)


def mask_of(call, position):
    """The expression of a load's or a store's mask, "" where it has none."""
    given = call.args[position] if len(call.args) > position else named(call).get("mask")
    return ast.unparse(given) if given is not None else ""


def named(call):
    return {keyword.arg: keyword.value for keyword in call.keywords}


@pytest.mark.parametrize("package", PACKAGES, ids=[package.name for package in PACKAGES])
def test_a_masked_load_says_what_a_masked_element_is(package):
    files = sorted((ROOT / package.folder / "src").rglob("*.py"))
    assert {str(path): undefined_loads(path) for path in files if undefined_loads(path)} == {}


def test_loads_that_leave_a_masked_element_undefined_are_found(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text(
        "tl.load(p, m, 0.0)\ntl.load(p, mask=m, other=0)\ntl.load(p)\ntl.store(q, tl.load(p, mask=m), mask=m)\n"
        "tl.load(p, m)\ntl.load(p, other=0)\ntl.store(q, tl.load(p, mask=n), mask=m)\ntl.store(q, tl.load(p, mask=m))\n"
    )
    assert undefined_loads(file) == ["tl.load(p, m)", "tl.load(p, other=0)", "tl.load(p, mask=n)", "tl.load(p, mask=m)"]
