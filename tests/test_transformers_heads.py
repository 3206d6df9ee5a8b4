"""The loss's `patch` and each language model of transformers: the same training step, or it is left and named here."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path

import pytest
import torch
from causal_lms import VOCABULARY
from npu_fused_linear_cross_entropy import patch

transformers = pytest.importorskip("transformers", minversion="5.0")
FILES = sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))
HEAD = re.compile(r"^class (\w+(?:For(?:CausalLM|ConditionalGeneration)|LMHeadModel))\((?!nn\.Module)", re.M)
_COMMON = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
_BART = {
    **_COMMON,
    "d_model": 32,
    **{
        f"{of}_{name}": size
        for of in ("encoder", "decoder")
        for name, size in [("layers", 1), ("attention_heads", 2), ("ffn_dim", 32)]
    },
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
_DECODER = {**_BART, "is_decoder": True, "is_encoder_decoder": False}
_T5 = {
    **_COMMON,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "dropout_rate": 0.0,
}
_BERT = {
    **_COMMON,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "is_decoder": True,
}
_MODERN = dict.fromkeys(("mlp_dropout", "attention_dropout", "embedding_dropout"), 0.0)
_XLNET = {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32, "dropout": 0.0}
_CPM = {**_COMMON, "hidden_size": 32, "num_attention_heads": 2, "dim_head": 16, "dim_ff": 32, "num_hidden_layers": 1}
_AUDIO = {**_BART, "max_target_positions": 32}
#: Models whose forward calls cross entropy itself, or whose head is inside another module, with the sizes of small ones.
MODELS = {
    "BartForConditionalGeneration": _BART,
    "T5ForConditionalGeneration": _T5,
    "WhisperForConditionalGeneration": {**_AUDIO, "num_mel_bins": 8, "max_source_positions": 16},
    "RobertaForCausalLM": _BERT,
    "ModernBertDecoderForCausalLM": {**{k: v for k, v in _BERT.items() if "prob" not in k and k != "is_decoder"}, **_MODERN},
}
MORE = {
    **{f"{name}ForConditionalGeneration": _BART for name in ("MBart", "Blenderbot", "BlenderbotSmall", "M2M100", "Pegasus")},
    **{f"{name}ForConditionalGeneration": _BART for name in ("PLBart", "Mvp", "PegasusX")},
    **{f"{name}ForCausalLM": _DECODER for name in ("Bart", "MBart", "Blenderbot", "Pegasus", "Marian", "PLBart", "TrOCR")},
    **{f"{name}ForConditionalGeneration": _T5 for name in ("MT5", "UMT5", "LongT5", "SwitchTransformers")},
    **{
        f"{name}ForCausalLM": _BERT for name in ("XLMRoberta", "Camembert", "RemBert", "RoFormer", "MegatronBert", "Electra")
    },
    **{f"{name}ForCausalLM": _BERT for name in ("Ernie", "Data2VecText", "RobertaPreLayerNorm", "XLMRobertaXL", "RoCBert")},
    "BertLMHeadModel": _BERT,
    "BigBirdForCausalLM": _BERT,
    "XLNetLMHeadModel": _XLNET,
    "CpmAntForCausalLM": _CPM,
    "NllbMoeForConditionalGeneration": {**_BART, "num_experts": 2, "expert_capacity": 8, "router_jitter_noise": 0.0},
    "Speech2TextForConditionalGeneration": {**_AUDIO, "input_feat_per_channel": 8, "conv_channels": 16},
}


def model_of(name):
    return re.sub("For(CausalLM|ConditionalGeneration)$|LMHeadModel$", "", name)


def make(name):
    config = getattr(transformers, model_of(name) + "Config")
    torch.manual_seed(0)
    model = getattr(transformers, name)(config(**{**MODELS, **MORE}[name])).train()
    for module in model.modules():
        for rate in ("p", "layerdrop"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def batch(name):
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(3, VOCABULARY, (2, 2, 8), generator=generator)
    labels[0, :2] = -100
    features = {"Whisper": (2, 8, 32), "Speech2Text": (2, 32, 8)}.get(model_of(name))
    given = {"input_ids": ids} if features is None else {"input_features": torch.randn(features, generator=generator)}
    return {**given, "labels": labels}


@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(each, marks=pytest.mark.nightly) for each in MORE)])
def test_a_step_is_the_same(name):
    model, given = make(name), batch(name)
    expected = model(**given)
    trained = [each for each in model.parameters() if each.requires_grad]
    wanted = torch.autograd.grad(expected.loss, trained, allow_unused=True)
    report = patch(model)
    found = model(**given)
    gradients = torch.autograd.grad(found.loss, trained, allow_unused=True)
    assert report.replaced and not report.fell_back and found.logits is None
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=1e-6)
    largest = max(each.abs().max().item() for each in wanted if each is not None)
    for one, other in zip(gradients, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:  # fp32's roundings, of sums of 2 x 8 tokens through two layers
            torch.testing.assert_close(one, other, rtol=0, atol=2e-6 * largest)
    logits = model.eval()(**given).logits
    report.undo()
    assert torch.equal(logits, model(**given).logits)


_INDEXER = {"budget": 64, "compress_ratio": 4, "n_heads": 2, "kv_heads": 1, "head_dim": 64}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
#: What a default configuration lacks; "text" is that of the language model.
LACKS = {
    "Nemotron": {"num_key_value_heads": 8},
    "Ministral": {"head_dim": 128},
    "HunYuanDenseV1": {"head_dim": 128},
    "HunYuanMoEV1": {"head_dim": 128},
    "HunYuanVL": {"text.head_dim": 128},
    "Qwen4Exp": {f"text.indexer_{name}": size for name, size in _INDEXER.items()},
    "CohereCompass": {"text.rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "Lfm2Moe": {"layer_types": ["full_attention"] * 32},
    "AyaVision": {"vision_config.num_attention_heads": 16},
    "Emu3": {"vocabulary_map": {"<image>": 1}},
    "Chameleon": {"vocabulary_map": {"<image>": 1}},
    "Dots1": {"n_shared_experts": 1, "n_routed_experts": 8},
    "MoonshineStreaming": {"num_key_value_heads": 8},
}
#: Models that are left, with the reason.
LEFT = {
    "Blip2ForConditionalGeneration": "asks for pictures",
    "ChameleonForConditionalGeneration": "rules out the columns of picture tokens",
    "BlipTextLMHeadModel": "shifts its logits and its labels, and smooths them",
    "ClvpForCausalLM": "names no output embeddings",
    "CsmDepthDecoderForCausalLM": "a head for each codebook",
    "CsmForConditionalGeneration": "a second loss of its own, of codebooks",
    "DiaForConditionalGeneration": "several heads in one",
    "DoryForCausalLM": "a scale for each column",
    "FSMTForConditionalGeneration": "its head is its embedding",
    "GitForCausalLM": "drops the tokens of a picture from its logits",
    "GradiumPhononTTSForConditionalGeneration": "names no output embeddings",
    "HiggsAudioV2ForConditionalGeneration": "names no output embeddings",
    "InstructBlipForConditionalGeneration": "asks for pictures",
    "InstructBlipVideoForConditionalGeneration": "asks for pictures",
    "Llama4ForConditionalGeneration": "its forward ends in an error, in 5.24",
    "MusicgenForCausalLM": "several heads",
    "MusicgenMelodyForCausalLM": "several heads",
    "PocketTTSForConditionalGeneration": "names no output embeddings",
    "Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration": "several heads",
    "SeamlessM4Tv2TextToUnitForConditionalGeneration": "as many logits as characters, which it counts first",
    "T5GemmaForConditionalGeneration": "the loss function of masked models",
    "T5Gemma2ForConditionalGeneration": "the loss function of masked models",
    "VibeVoiceForConditionalGeneration": "a second loss, of sound",
}
LEAST = 285  # of those of 5.24 that can be made


def models():
    """Every language model with a cross entropy, as a class."""
    for file in FILES:
        text = file.read_text()
        heads = list(HEAD.finditer(text))
        for found in heads:
            end = text.find("\nclass ", found.end())
            if re.search(r"loss_function|cross_?entropy", text[found.start() : end], re.I):
                yield f"transformers.models.{file.parent.name}.{file.stem}", found[1]


def without_numbers(known):
    """A model of its default configuration that takes no memory; None where the configuration makes none."""
    config = known.config_class()
    for path, value in LACKS.get(model_of(known.__name__), {}).items():
        *parts, name = path.split(".")
        setattr(config.get_text_config() if parts == ["text"] else functools.reduce(getattr, parts, config), name, value)
    with torch.device("meta"):
        return known(config)


@pytest.mark.nightly
def test_every_language_model_is_known_or_named_here(capsys):
    replaced, left, unmade = set(), {}, {}
    for module, name in models():
        try:
            model = without_numbers(getattr(importlib.import_module(module), name))
        except Exception as error:
            unmade[name] = f"{type(error).__name__}: {error}"
            continue
        report = patch(model)
        if any(entry.name == "" for entry in report.replaced):
            replaced.add(name)
        else:
            left[name] = "; ".join(entry.text for entry in report.left if entry.name == "")
    with capsys.disabled():
        print(f"\ntransformers {transformers.__version__}: {len(replaced)} known, {len(left)} left, {len(unmade)} not made")
        for name, why in (*left.items(), *unmade.items()):
            print(f"  {name}: {why[:200]}")
    assert set(left) <= set(LEFT)
    assert not replaced & set(LEFT)
    assert len(replaced) >= LEAST
