"""The classes that `patch` knows by name are, in the source of transformers, what it takes them for."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from npu_embedding.patching import SCALED

pytest.importorskip("transformers", minversion="5.0")
MODELS = Path(importlib.util.find_spec("transformers").origin).parent / "models"


@pytest.fixture(scope="module")
def source():
    """The forward, and what it calls, of a class by its name: types, comments and decorators left out."""
    places = {}
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        text = file.read_text()
        places.update((match[1], (text, match.start())) for match in re.finditer(r"^class (\w+)\(", text, re.M))

    def read(name):
        text, start = places[name]
        end = re.compile(r"\n(?=\S)").search(text, start)
        (known,) = ast.parse(text[start : end.start() if end else None]).body
        return {method.name: plain(method) for method in known.body if isinstance(method, ast.FunctionDef)}

    return read


def plain(method):
    for node in ast.walk(method):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            node.body = node.body[1:] if ast.get_docstring(node) else node.body
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("Any")
    return ast.unparse(method)


@pytest.mark.parametrize("name", sorted(SCALED))
def test_scaled_embeddings_ask_torch_for_the_rows(source, name):
    assert re.search(
        r"return super\(\)\.forward\(input_ids\) \* self\.embed_scale(\.to\(self\.weight\.dtype\))?$",
        source(name)["forward"],
    )


@pytest.mark.slow
def test_the_readme_says_what_patch_takes_of_each_model():
    models = importlib.import_module("tools.models")
    readme = models.README.read_text()
    assert models.filled(readme) == readme, "python -m tools.models"
    assert models.filled(readme.replace("| Mixtral, OLMoE | yes", "| Mixtral, OLMoE | no")) == readme
