"""What `patch` takes of models of transformers: `python -m tools.models` writes the table of the README.

Each model is made without memory, of a tiny configuration, and given to the three `patch`.
"""

from __future__ import annotations

import re
from typing import Any

import npu_embedding
import npu_fused_linear_cross_entropy
import npu_rms_norm
import torch
import transformers

from .workspace import ROOT

README = ROOT / "README.md"
_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "Llama 1 to 3, Mistral, Ministral 3": [("Llama", {}), ("Mistral", {}), ("Ministral3", {})],
    "Mixtral, OLMoE": [("Mixtral", _LOCAL), ("Olmoe", _EXPERTS)],
    "Qwen 2, 3, 3 MoE": [("Qwen2", {}), ("Qwen3", {}), ("Qwen3Moe", _EXPERTS)],
    "Qwen3-Next, Qwen 3.5": [("Qwen3Next", _EXPERTS), ("Qwen3_5", {}), ("Qwen3_5Moe", _EXPERTS)],
    "Gemma 1, 2, 3": [("Gemma", {}), ("Gemma2", {}), ("Gemma3", {})],
    "Phi-3, OLMo 2, 3, GLM 4, SmolLM 3": [(family, {}) for family in ("Phi3", "Olmo2", "Olmo3", "Glm4", "SmolLM3")],
    "DeepSeek V2, V3, GLM 4.5": [
        ("DeepseekV2", {**_ROUTED, **_LATENT}),
        ("DeepseekV3", {**_ROUTED, **_LATENT}),
        ("Glm4Moe", _ROUTED),
    ],
    "gpt-oss, Granite, Kimi Linear, Mamba 2": [
        ("GptOss", _LOCAL),
        ("Granite", {}),
        ("KimiLinear", _EXPERTS),
        ("Mamba2", {"num_heads": 4, "head_dim": 32, "state_size": 8, "n_groups": 1}),
    ],
    "T5, mT5, UMT5": [(family, _T5) for family in ("T5", "MT5", "UMT5")],
    "Llama 4, Gemma 4": [
        ("Llama4", _LOCAL),
        ("Gemma4", {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96}),
    ],
}
"""By row of the table, families of transformers with what their configurations have beside the sizes."""


def make(family: str, options: dict[str, Any]) -> torch.nn.Module:
    """A language model without memory."""
    names = (f"{family}TextConfig", f"{family}Config")
    config = next(getattr(transformers, name) for name in names if hasattr(transformers, name))
    with torch.device("meta"):
        kinds = (f"{family}ForCausalLM", f"{family}ForConditionalGeneration")
        kind = next(getattr(transformers, name) for name in kinds if hasattr(transformers, name))
        model: torch.nn.Module = kind(config(**_SIZES, **options))
    return model


def table() -> str:
    """In Markdown: a row of several models says what holds for each of them."""
    lines = ["| model | norms | embedding | loss |", "|---|---|---|---|"]
    for row, families in MODELS.items():
        found = {_cells(make(family, options)) for family, options in families}
        assert len(found) == 1, f"{row} are not alike: {found}"
        lines.append(f"| {row} | {' | '.join(*found)} |")
    return "\n".join(lines)


def _cells(model: torch.nn.Module) -> tuple[str, ...]:
    reports = [package.patch(model) for package in (npu_rms_norm, npu_embedding, npu_fused_linear_cross_entropy)]
    return tuple("no" if not report.replaced else "some" if report.left else "yes" for report in reports)


def filled(readme: str) -> str:
    """The README with today's table."""
    return re.sub(r"^\| model \| norms \|.*?(?=\n\n)", table(), readme, flags=re.M | re.S)


if __name__ == "__main__":
    README.write_text(filled(README.read_text()))
