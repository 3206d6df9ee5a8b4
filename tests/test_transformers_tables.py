"""The classes that `patch` knows by name are, in the source of transformers, what it takes them for."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from npu_embedding.patching import SCALED
from npu_fused_linear_cross_entropy.patching import CAUSAL_LMS, MIXTURES, WITH_IMAGES

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


@pytest.mark.parametrize("name", sorted(CAUSAL_LMS))
def test_causal_language_models_compute_the_loss_from_their_head_alone(source, name):
    forward = re.sub(r"self\.loss_function\(.*\)", "LOSS", source(name)["forward"])
    softcap = """    if self.config.final_logit_softcapping is not None:
        logits = logits / self.config.final_logit_softcapping
        logits = torch.tanh(logits)
        logits = logits * self.config.final_logit_softcapping
"""
    expected = re.sub(r"self\.loss_function\(.*\)", "LOSS", source("LlamaForCausalLM")["forward"])
    assert forward.replace(softcap, "") == expected
    assert "LOSS" in expected and "logits = self.lm_head(hidden_states)" in expected


@pytest.mark.parametrize("name", sorted(MIXTURES | WITH_IMAGES))
def test_mixtures_and_models_with_images_do_what_the_patched_ones_do(source, name):
    """All arguments but the loss's go to the base model; nothing happens to the logits; the router's loss is added."""
    try:
        forward = source(name)["forward"]
    except KeyError:
        pytest.skip(f"this release of transformers has no {name}")
    (call,) = re.findall(r"self\.model\((.*?)\)\n", forward)
    arguments = re.findall(
        r"(\w+)(?:=[^,]*)?", re.sub(r": [^,=]*(?=[,=])", "", re.search(r"def forward\(self, (.*?), \*\*", forward)[1])
    )
    passed = set(re.findall(r"(\w+)=\1\b", call))
    assert {one for one in arguments if re.search(rf"\b{one}=?", forward)} - passed <= {
        "labels",
        "logits_to_keep",
        "None",
        "0",
    }
    before = forward[forward.index(":\n") + 2 : forward.index("self.model(")]
    assert re.fullmatch(r"\s+(output_router_logits = .*\s+)?outputs(: Any)? = ", before)
    after = forward[forward.index("logits = self.lm_head(hidden_states)") :]
    between = after[: after.index("self.loss_function(")]
    assert re.fullmatch(r"logits = self\.lm_head\(hidden_states\)\s+loss = None\s+if labels is not None:\s+loss = ", between)
    assert ("load_balancing_loss_func(outputs.router_logits" in after) == ("output_router_logits" in arguments)
    if "output_router_logits" in arguments:
        assert re.search(r"loss \+= self\.(config\.text_config\.)?router_aux_loss_coef \* aux_loss", after)


@pytest.mark.slow
def test_the_readme_says_what_patch_takes_of_each_model():
    models = importlib.import_module("tools.models")
    readme = models.README.read_text()
    assert models.filled(readme) == readme, "python -m tools.models"
    assert models.filled(readme.replace("| Mixtral, OLMoE | yes", "| Mixtral, OLMoE | no")) == readme
