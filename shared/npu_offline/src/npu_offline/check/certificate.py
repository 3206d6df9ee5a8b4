"""What a model's training step launches and computes, judged: kernels from their final modules, layers against fp64."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch

from ..errors import OfflineError
from ..execute.final.findings import WEAK
from ..launches import Launch, describe_tile
from ..toolchain.compilation import compile_linalg, front_end_of
from . import run_calls
from .calls import launches_of
from .culprit import judged
from .execution import LINALG, MEANING
from .kernel_file import KernelCall
from .layers import OPERATORS, Layers
from .recorded import Program, watched
from .script import npu_on_cpu, program_of
from .stopped import is_refusal, said_of

WRONG, NOT_RUN, RIGHT = "wrong", "not run", "right"
VERDICTS = (WRONG, NOT_RUN, RIGHT)
_TOKENS = (2, 12)
_MOST_PARAMETERS = 2**24  # which a few copies in fp64 may have, and minutes
_LARGE_SIZE = 1000
_SIZES = {  # of those that a configuration has
    "vocab_size": 96,
    "unpadded_vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 16,
    "hidden_size": 64,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_layers": 2,
    "num_heads": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window": 4,
    "sliding_window_size": 4,
    "d_rel": 4,
    "rel_extent": 16,
    "n_layers_per_attn_res_block": 2,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def certify(words: Sequence[str], given: Sequence[str], soc: str, toolchain: str) -> dict[str, Any]:
    """Run a training step from the final modules of one toolchain, with all checks, and judge what it launched and computed.

    Args:
        words: a type of model of transformers, or the command line of a Python program.
        given: sizes of the model as NAME=VALUE.
        soc, toolchain: the chip and the compiler.

    Returns:
        Values that can be written as JSON: `kernels` and `layers`, each with a verdict and why; `left`, what `patch` left
        alone; `others`, names of other libraries' kernels; `stopped`, why the step did not end, and `status` of a program.

    Raises:
        OfflineError: there is no such model or program, or transformers is missing.
    """
    left: list[dict[str, str]] = []
    run = program_of(words) if len(words) > 1 else functools.partial(_train, _model_of(words[0], given), left)
    stopped, status = "", 0
    with npu_on_cpu(soc, toolchain=toolchain) as emulation:
        layers = Layers(emulation)
        with watched(emulation) as program, layers.watched():
            try:
                run()
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else int(error.code is not None)
            except Exception as error:
                stopped, status = said_of(error), int(not is_refusal(error))
        launches = list(emulation.launches)
        of_layers = layers.rows()
    kernels = _kernels(launches, program, soc, toolchain)
    found = [{**row, "toolchain": toolchain} for row in (*kernels, *of_layers)]
    return {
        "kernels": found[: len(kernels)],
        "layers": found[len(kernels) :],
        "left": left,
        "others": list(layers.others),
        "skipped": layers.skipped,
        "stopped": stopped,
        "status": status,
        "transformers": f", transformers {version('transformers')}" if "transformers" in sys.modules else "",
    }


def _model_of(name: str, given: Sequence[str]) -> Callable[[], torch.nn.Module]:
    """Makes a model of random weights, the same every time."""
    try:
        transformers: Any = importlib.import_module("transformers")
        auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    except ImportError as error:
        raise OfflineError(f"{name!r} is a model of transformers, which is not installed: {error}") from None
    transformers.logging.set_verbosity_error()
    kind = name.lower().replace("-", "_").replace(".", "_")
    classes = {
        **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    kind = next((each for each in (f"{kind}_text", kind) if each in classes), "")
    if not kind:
        raise OfflineError(
            f"{name!r} is neither a file nor a type of language models of transformers, such as llama or qwen3"
        )
    config = transformers.CONFIG_MAPPING[kind]
    known = config().to_dict()
    sizes: dict[str, object] = {size: value for size, value in _SIZES.items() if size in known}
    if kind in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        sizes["decoder_start_token_id"] = 0
    if "kv_lora_rank" in known:  # latent attention has as many of both
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    sizes |= dict(map(_size, given))
    model_class = getattr(transformers, classes[kind])
    try:
        with torch.device("meta"):
            parameters = sum(each.numel() for each in model_class(config(**sizes)).parameters())
    except Exception as error:
        raise OfflineError(f"transformers makes no {kind} of these sizes: {error}") from None
    if parameters > _MOST_PARAMETERS:
        large = {name: size for name, size in config(**sizes).to_dict().items() if type(size) is int and size > _LARGE_SIZE}
        raise OfflineError(
            f"{kind} has {parameters:,} parameters: make one of {large} smaller, as in {next(iter(large), 'vocab_size')}=64"
        )

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        model: torch.nn.Module = model_class(config(**sizes, use_cache=False))
        for parameter in model.parameters():
            if bool((parameter == parameter.flatten()[0]).all()):  # ones and zeros would hide a weight that is left out
                torch.nn.init.normal_(parameter, parameter.mean().item(), 0.3)
        return model.train()

    return make


def _size(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise OfflineError(f"{text!r} is no size of a model, must be NAME=VALUE, such as hidden_size=128")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def _train(make: Callable[[], torch.nn.Module], left: list[dict[str, str]]) -> None:
    """A forward and a backward of a patched model."""
    model = make()
    packages = [name for name in OPERATORS if importlib.util.find_spec(name)]
    if not packages:
        raise OfflineError(f"none of {', '.join(OPERATORS)} is installed: there is nothing to patch the model with")
    for package in packages:
        patched = importlib.import_module(package).patch(model)
        left += [{"package": package, "layer": name, "class": was, "why": why} for name, was, why in patched.left]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, model.get_input_embeddings().num_embeddings, _TOKENS, generator=generator)  # type: ignore[operator]
    labels = ids.masked_fill(torch.rand(_TOKENS, generator=generator) < 0.3, -100)  # noqa: PLR2004
    model(input_ids=ids, labels=labels).loss.backward()


def _kernels(launches: Sequence[Launch], program: Program, soc: str, toolchain: str) -> list[dict[str, Any]]:
    """A row for each kernel and its constants: its findings in the step, and `run`'s verdict on its first launch."""
    grouped: dict[tuple[str, str], list[Launch]] = {}
    for launch in launches:
        grouped.setdefault((launch.kernel, describe_tile(launch)), []).append(launch)
    rows = []
    for key, group in grouped.items():
        call = program.calls.get(key)
        why = list(dict.fromkeys(str(note) for launch in group for note in launch.notes if note.kind != WEAK))
        verdict, about = WRONG if why else RIGHT, dict[str, Any]()
        if call is not None:
            verdict, more, about = _judged(call, soc, toolchain, verdict)
            why += more
        rows.append(_row(*key, len(group), verdict, why, about))
    refused = ((name, why) for name, why in program.refused.items())
    return rows + [_row(name, "", 0, NOT_RUN, [why], {}) for name, why in refused]


def _row(
    kernel: str, constants: str, launches: int, verdict: str, why: Sequence[str], about: dict[str, Any]
) -> dict[str, Any]:
    row = {"kernel": kernel, "constants": constants, "launches": launches, "verdict": verdict, "why": list(why)}
    return {"package": "", "hashes": {}, **about, **row}


def _judged(call: KernelCall, soc: str, toolchain: str, verdict: str) -> tuple[str, list[str], dict[str, Any]]:
    """What `run` says of a launch, and where its kernel is from, with digests."""
    functions = run_calls.compared(call, [], None, None)
    records = functools.cache(lambda: launches_of([(call.label, call.launch)], soc, {}))
    outcomes = list(run_calls.run_levels(call.label, functions, soc, (MEANING, LINALG, toolchain)))
    found = list(judged(call.label, functions, outcomes, records, soc, expected=False))
    why = [str(each) for each in found if each.culprit]
    if outcomes[-1].refused and verdict == RIGHT:
        verdict, why = NOT_RUN, [*why, outcomes[-1].problem]
    about: dict[str, Any] = {"package": call.kernel.__module__.partition(".")[0]}
    hashes = {"kernel": digest(call.kernel.cache_key), "inputs": digest(*_inputs(call))}
    for record in records()[:1]:
        name, ttir, linalg = front_end_of(record)
        options = dict(record.options)
        try:
            hashes["module"] = digest(compile_linalg(name, ttir, linalg, options, soc, toolchain).stages.get("final", ""))
        except OfflineError as error:
            why.append(str(error))
    return WRONG if any(each.culprit for each in found) else verdict, why, {**about, "hashes": hashes}


def _inputs(call: KernelCall) -> list[str]:
    given = sorted(call.arguments().items())
    return [
        call.grid,
        *(f"{name} {value.tolist() if isinstance(value, torch.Tensor) else value!r}" for name, value in given),
    ]


def digest(*texts: str) -> str:
    """SHA-256 of texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
