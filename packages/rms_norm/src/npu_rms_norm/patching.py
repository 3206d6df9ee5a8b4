"""RMSNorm in a model that is there already: `patch(model)`, and which classes compute what our functions do.

A class of transformers is known by its name and the package that it is from. Which formula it has was read from its source,
release 5.23 of transformers, and a test compares the two for every name below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from npu_tiling.calls import statistics_dtype
from npu_tiling.models import Derived, Patch, Replacement, derived, in_order, stands_for, swap_classes, with_signature_of
from torch import Tensor, nn

from .api import gated_rms_norm, rms_norm
from .reference import ACTIVATIONS


@dataclass(frozen=True)
class Formula:
    """How a class computes RMSNorm.

    Attributes:
        casting_mode, offset: see `rms_norm`.
        eps: the attribute that holds eps.
        promotes: the result has the dtype that a product of x and the weight has, and not x's.
    """

    casting_mode: str
    offset: float
    eps: str
    promotes: bool = False


LLAMA = Formula("llama", 0.0, "variance_epsilon", promotes=True)
OLMO2 = Formula("gemma", 0.0, "variance_epsilon")
GEMMA = Formula("gemma", 1.0, "eps")
TORCH = Formula("gemma", 0.0, "eps")

_LLAMA = (
    "Aimv2 Apertus Arcee AriaText AXK1 AXK2 BailingHybrid Bamba BitNet Cohere2Moe Cosmos3EdgeText Csm Cwm DeepseekOcr2Text "
    "DeepseekOcr2Vision DeepseekV2 DeepseekV3 DeepseekV32 Deimv2 Dia DiffLlama Doge Dots1 Emu3 Ernie4_5 Ernie4_5_Moe "
    "Ernie4_5_VLMoe EuroBert Evolla Exaone4 Exaone4_5_ ExaoneMoe FalconH1 FalconMamba Glm Glm4 Glm4Moe Glm4MoeLite Glm4v "
    "Glm4vMoe Glm4vMoeText Glm5Next Glm5NextText GlmImage GlmMoeDsa GlmOcr Granite Granite4VisionText GraniteMoe "
    "GraniteMoeHybrid GraniteMoeShared GraniteMoeSWA GraniteSWA HiggsAudioV2 HunYuanDenseV1 HunYuanMoEV1 HunYuanVL "
    "HyperCLOVAX HYV3 HYV4 Inkling InternVLVision Jamba JetMoe KimiLinear Kolibri1 Laguna Lfm2 Lfm2Moe LightOnOcr Llama "
    "LongcatFlash Mamba Mamba2 Mellum MiMoV2Flash MiniCPM3 MiniMax MiniMaxM2 Ministral Ministral3 Mistral Mistral3 Mistral4 "
    "MistralLarge4 Mixtral Molmo2 MuseGlimmerAssistant NeuCodec Olmoe Ovis2 PaddleOCR PeAudioEncoder PeAudioVideoEncoder "
    "PeVideoEncoder Phi3 Phi4Multimodal QianfanOCRVision Qwen2 Qwen2_5_VL Qwen2_5Omni Qwen2Moe Qwen2VL Qwen3 Qwen3Moe "
    "Qwen3OmniMoe Qwen3OmniMoeCode2Wav Qwen3OmniMoeText Qwen3OmniMoeThinkerText Qwen3VLMoeText Qwen3VLText Sapiens2 SeedOss "
    "SmolLM3 SolarOpen TimesFm TimesFm2_5 Ultrabert UltraVBert UnlimitedOcrText VibeVoice VibeVoiceAcousticTokenizer "
    "VibeVoiceAsr VoxtralRealtime Xcodec2 Youtu Zamba2 Zaya"
)
_OLMO2 = "Afmoe Beam DeepseekV4 FlexOlmo Flint GptOss NemotronH NemotronH_Omni_ Olmo2 Olmo3 OlmoHybrid OpenAIPrivacyFilter"
_GEMMA = "Gemma Gemma2 Gemma3 Qwen3Next Qwen3_5 Qwen3_5Moe RecurrentGemma T5Gemma VaultGemma"

#: What the classes of transformers compute, by their names.
FORMULAS = {
    f"{model}RMSNorm": formula
    for models, formula in ((_LLAMA, LLAMA), (_OLMO2, OLMO2), (_GEMMA, GEMMA))
    for model in models.split()
}


@dataclass(frozen=True)
class GatedFormula:
    """How a class computes RMSNorm with a gate; its eps is `variance_epsilon`.

    Attributes:
        casting_mode, norm_before_gate: see `gated_rms_norm`.
        promotes: as of `Formula`. Such a class may have groups of `group_size` columns, each normalised by itself, and be
            called without a gate; the activation of the others is their attribute of that name.
    """

    casting_mode: str
    norm_before_gate: bool
    promotes: bool = False


QWEN3_NEXT = GatedFormula("llama", True)
KIMI_LINEAR = GatedFormula("gemma", True)
MAMBA2 = GatedFormula("llama", False, promotes=True)

#: What the gated classes of transformers compute, by their names.
GATED = {
    f"{model}RMSNormGated": formula
    for models, formula in (
        ("OlmoHybrid Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4ExpText", QWEN3_NEXT),
        ("BailingHybrid Glm5NextText KimiLinear", KIMI_LINEAR),
        ("Bamba GraniteMoeHybrid Mamba NemotronH Zamba2", MAMBA2),
    )
    for model in models.split()
}


def patch(model: nn.Module) -> Patch:
    """Let `rms_norm` and `gated_rms_norm` compute the RMSNorms of a model that they know: those of torch and transformers.

    Modules stay where they are, with their parameters, hooks and flags; each gets a class derived from its own whose forward
    calls `rms_norm` with that class's roundings and eps. So `state_dict` and `save_pretrained` are as before, and the model
    can be copied, pickled and compiled. Patch a model before it is sharded or wrapped.

    Known are `torch.nn.RMSNorm` over one dimension and the RMSNorms of transformers' Llama, Mistral, Mixtral, Qwen 2 and 3,
    Phi-3, Gemma 1 to 3, OLMo 2 and 3, Granite, GLM, DeepSeek 2 and 3 and others with one of their formulas, and the gated
    ones of Mamba 2, Bamba, Nemotron-H, Zamba 2, Granite 4, Qwen3-Next, Qwen 3.5, OLMo hybrid and Kimi Linear. Every other
    module with Norm in its class's name is left alone, and so are norms whose forward was replaced, as accelerate and
    kernelize do, or that of their class, and weights that are quantised or sharded. What becomes so after the patch computes
    what it did, with a warning; so does a norm under a mode that is not torch's own, or while it is traced or exported to
    ONNX.

    Args:
        model: any module, changed in place.

    Returns:
        What was replaced, what was left, and what computed without our operators when it was called, with the reasons;
        `print` it. `.undo()` gives every module its class again; as a context manager it does so at the end.

    Source: transformers, `models/*/modeling_*.py`.
    """
    return swap_classes(model, "npu_rms_norm", _recognise)


def _recognise(module: nn.Module) -> Replacement | str | None:
    known = type(module)
    if "norm" not in known.__name__.lower():
        return None
    if isinstance(module, (_Patched, _PatchedGated)):
        return "it is patched already"
    gated = GATED.get(known.__name__) if known.__module__.startswith("transformers.") else None
    if gated is not None:
        return _recognise_gated(module, gated)
    formula = formula_of(known)
    if formula is None:
        return "no RMSNorm that is known"
    if isinstance(module, nn.RMSNorm) and len(module.normalized_shape) != 1:
        return f"it normalises over {len(module.normalized_shape)} dimensions, and rms_norm over one"
    by = f'rms_norm(casting_mode="{formula.casting_mode}", offset={formula.offset})'
    return Replacement(_patched(known), by)


def _recognise_gated(module: nn.Module, formula: GatedFormula) -> Replacement | str:
    activation = "silu" if formula.promotes else getattr(module, "activation", None)
    if activation not in ACTIVATIONS:
        return f"its gate has the activation {activation!r}, and gated_rms_norm silu or sigmoid"
    options = f'casting_mode="{formula.casting_mode}", norm_before_gate={formula.norm_before_gate}'
    return Replacement(_patched_gated(type(module)), f'gated_rms_norm({options}, activation="{activation}")')


def formula_of(known: type) -> Formula | None:
    """What a class computes, None if that is not known; a class derived from a known one may compute anything."""
    if known is nn.RMSNorm:
        return TORCH
    return FORMULAS.get(known.__name__) if known.__module__.startswith("transformers.") else None


def normalise(formula: Formula, x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """The result of a class with this formula, in the dtype that it has there."""
    if weight is not None and weight.dtype not in (x.dtype, torch.float32):
        weight = weight.float()
    if eps is None:
        eps = torch.finfo(statistics_dtype(x.dtype)).eps  # as in torch.nn.functional.rms_norm
    if formula.promotes and weight is not None and weight.dtype != x.dtype:
        return weight * rms_norm(x, None, eps, casting_mode=formula.casting_mode)
    return rms_norm(x, weight, eps, offset=formula.offset, casting_mode=formula.casting_mode)


class _Patched(Derived):
    weight: nn.Parameter | None


def _patched(known: Any) -> type[nn.Module]:
    formula = formula_of(known)
    assert formula is not None

    @with_signature_of(known)
    def forward(self: _Patched, *arguments: Any, **keywords: Any) -> Tensor:
        given = in_order(known.forward, arguments, keywords)
        if len(given) == 1 and stands_for(self, known, input=given[0], weight=self.weight):
            return normalise(formula, given[0], self.weight, getattr(self, formula.eps))
        y: Tensor = known.forward(self, *arguments, **keywords)
        return y

    return derived(f"Npu{known.__name__}", (_Patched, known), {"forward": forward}, _patched, known)


def normalise_gated(formula: GatedFormula, norm: Any, x: Tensor, gate: Tensor | None) -> Tensor:
    """The result of `norm`, a module whose class has this formula, in the dtype that it has there."""
    if formula.promotes:
        return _normalise_groups(norm, x, gate)
    assert gate is not None
    weight, mode = _known(norm.weight, x), formula.casting_mode
    return gated_rms_norm(x, _known(gate, x), weight, norm.variance_epsilon, casting_mode=mode, activation=norm.activation)


def _normalise_groups(norm: Any, x: Tensor, gate: Tensor | None) -> Tensor:
    size = getattr(norm, "group_size", x.shape[-1])
    weight = None
    if norm.weight.dtype == x.dtype:
        weight = norm.weight if size == x.shape[-1] else norm.weight.unflatten(-1, (-1, size))  # one for each group
    parts = x.unflatten(-1, (-1, size))
    if gate is None:
        y = rms_norm(parts, weight, norm.variance_epsilon)
    else:
        gates = _known(gate, x).unflatten(-1, (-1, size))
        y = gated_rms_norm(parts, gates, weight, norm.variance_epsilon, norm_before_gate=False)
    y = y.flatten(-2)
    return y if weight is not None else norm.weight * y


class _PatchedGated(Derived):
    weight: nn.Parameter


def _known(tensor: Tensor, x: Tensor) -> Tensor:
    """A parameter in a dtype that the norm of x takes: x's or fp32."""
    return tensor if tensor.dtype in (x.dtype, torch.float32) else tensor.float()


def _patched_gated(known: Any) -> type[nn.Module]:
    formula = GATED[known.__name__]

    @with_signature_of(known)
    def forward(self: _PatchedGated, *arguments: Any, **keywords: Any) -> Tensor:
        given = in_order(known.forward, arguments, keywords)
        if len(given) == 1 and formula.promotes:
            given = (*given, None)
        if len(given) == 2 and stands_for(self, known, input=given[0], gate=given[1], weight=self.weight):
            return normalise_gated(formula, self, *given)
        y: Tensor = known.forward(self, *arguments, **keywords)
        return y

    return derived(f"Npu{known.__name__}", (_PatchedGated, known), {"forward": forward}, _patched_gated, known)
