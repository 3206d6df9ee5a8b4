"""What is launched for each published measurement: by our operators, and by liger's for Ascend."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch
from npu_offline import LaunchRecord, OfflineError, record
from torch import Tensor

from . import peers
from .published import PUBLISHED, SOC, Published

Call = Callable[[], Tensor]  # runs the forward; what it returns can be differentiated
_ROWS, _INDICES, _COLUMNS, _BLOCKS = 2048, 16384, 768, 8
WIDTH, VOCABULARY = 4096, 128256
_BF16 = torch.bfloat16
CHUNK = 2048  # rows of logits: what the cross-entropy pass is timed on


def ours(row: Published) -> list[LaunchRecord]:
    """The launches of our operator. Of fused_linear_cross_entropy, those on one chunk of logits alone.

    Raises:
        OfflineError: the operator's package is not installed.
    """
    function = operator(row.operator)
    if row.operator == "fused_linear_cross_entropy":
        return logits_launches(function, CHUNK, WIDTH, VOCABULARY)
    return _launches(lambda: function(*_arguments(row)), row)


def theirs(row: Published) -> list[LaunchRecord]:
    """The launches of liger's operator for Ascend. Of fused_linear_cross_entropy, those of cross entropy on such a chunk."""
    if row.operator == "fused_linear_cross_entropy":
        function = peers.module("cross_entropy").LigerCrossEntropyFunction
        logits = torch.empty(CHUNK, VOCABULARY, dtype=_BF16, requires_grad=True)
        target = torch.zeros(CHUNK, dtype=torch.int64)
        return _launches(lambda: function.apply(logits, target, None)[0], row, peers.on_chip(SOC))
    names = {"rms_norm": "LigerRMSNormFunction", "embedding": "LigerEmbeddingFunction", "attn_res": "LigerAttnResFunction"}
    function = getattr(peers.module(row.operator), names[row.operator])
    given = _arguments(row)
    if row.operator == "rms_norm":
        given = (*given, 1e-6, 0.0, "llama", False)
    elif row.operator == "embedding":
        given = (given[1], given[0])
    else:
        given = (*given, 1e-6)
    return _launches(lambda: function.apply(*given), row, peers.on_chip(SOC))


def rows(operators: list[str] | None = None) -> Iterator[Published]:
    """The published measurements, of these operators or of all."""
    return (row for row in PUBLISHED if not operators or row.operator in operators)


def fewest_bytes(row: Published) -> int:
    """What the kernels of a measurement have to move; of fused_linear_cross_entropy a read and a write of the logits."""
    if row.operator == "rms_norm":
        return (2 if row.direction == "forward" else 3) * _ROWS * row.size * _BF16.itemsize
    if row.operator == "embedding":
        indices, table = _arguments(row)
        assert isinstance(indices, Tensor) and isinstance(table, Tensor)
        return (indices.numel() + indices.unique().numel()) * _COLUMNS * table.itemsize
    if row.operator == "attn_res":
        return (_BLOCKS + 1) * (1 if row.direction == "forward" else 2) * row.size * WIDTH * _BF16.itemsize
    return 2 * row.size * VOCABULARY * _BF16.itemsize


def operator(name: str) -> Callable[..., Tensor]:
    """An operator of ours by its name."""
    return function(name, name)


def function(operator: str, name: str) -> Callable[..., Any]:
    """A public function of an operator's package."""
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(f"npu_{operator}"), name)
    except ModuleNotFoundError:
        raise OfflineError(f"npu-{operator.replace('_', '-')} is not installed: it is what is compared") from None
    return found


def _arguments(row: Published) -> tuple[object, ...]:
    """Tensors of the shapes that were measured. Nothing touches the memory of the large ones."""
    if row.operator == "rms_norm":
        return torch.empty(_ROWS, row.size, dtype=_BF16, requires_grad=True), _weight(row.size)
    if row.operator == "embedding":
        generator = torch.Generator().manual_seed(0)
        indices = torch.randint(0, row.size, (_INDICES,), generator=generator)
        return indices, torch.empty(row.size, _COLUMNS, requires_grad=True)
    blocks = torch.empty(_BLOCKS, row.size, WIDTH, dtype=_BF16, requires_grad=True)
    return blocks, _weight(WIDTH), _weight(WIDTH)


def _weight(width: int) -> Tensor:
    return torch.empty(width, dtype=_BF16, requires_grad=True)


def _launches(call: Call, row: Published, surroundings: AbstractContextManager[None] | None = None) -> list[LaunchRecord]:
    """The launches of a forward, a backward, or both."""
    with surroundings or nullcontext():
        with record(SOC) as forward:
            result = call()
        with record(SOC) as backward:
            if row.direction != "forward":
                result.backward(torch.empty_like(result))
    if row.direction == "backward":
        return list(backward)
    return [*forward, *backward]


def logits_launches(function: Callable[..., Tensor], tokens: int, width: int, vocabulary: int) -> list[LaunchRecord]:
    """The kernels on one chunk of logits, in bf16 as torch_npu makes them; matrix products compute nothing here."""
    matmul = importlib.import_module("npu_fused_linear_cross_entropy.matmul")
    x = torch.empty(tokens, width, dtype=_BF16, requires_grad=True)
    weight = torch.empty(vocabulary, width, dtype=_BF16, requires_grad=True)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(matmul, "multiply", lambda *_, **__: None))
        stack.enter_context(mock.patch.object(matmul, "writes_fp32", lambda *_: False))
        launches = stack.enter_context(record(SOC))
        function(x, weight, torch.zeros(tokens, dtype=torch.int64), chunk_tokens=tokens)
    passes = ("cross_entropy_kernel", "cross_entropy_exponentials_kernel")
    return [launch for launch in launches if launch.name in passes]
