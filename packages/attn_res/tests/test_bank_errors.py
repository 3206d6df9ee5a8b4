"""Bad arguments of `attn_res_bank` are refused with one sentence that names them."""

import banks
import pytest
import torch
from npu_attn_res import attn_res_bank

BAD = {
    "n_blocks is 6": (lambda a: a | {"n_blocks": 6}, ValueError),
    "n_blocks is -1": (lambda a: a | {"n_blocks": -1}, ValueError),
    "n_blocks is torch.float32": (lambda a: a | {"n_blocks": torch.tensor(3.0)}, TypeError),
    r"n_blocks has shape \(2,\)": (lambda a: a | {"n_blocks": torch.tensor([1, 2])}, ValueError),
    "bank has shape": (lambda a: a | {"bank": a["bank"][:3]}, ValueError),
    "bank is a int": (lambda a: a | {"bank": 3}, TypeError),
    r"bank\[1\] has shape": (lambda a: a | {"bank": [a["prefix"], a["prefix"][:3]], "n_blocks": None}, ValueError),
    "append is True .* full": (lambda a: a | {"n_blocks": 5, "append": True}, ValueError),
    "append is True .* list": (lambda a: a | {"bank": [], "n_blocks": None, "append": True}, ValueError),
    "in_place is True and must be False for leaves": (
        lambda a: a | {"prefix": a["prefix"].requires_grad_()[:, :], "in_place": True},
        ValueError,
    ),
    "in_place is True .* for leaves": (
        lambda a: a | {"prefix": a["prefix"].requires_grad_(), "in_place": True, "append": True},
        ValueError,
    ),
    "append is True and must be False for leaves": (
        lambda a: a | {"bank": a["bank"].requires_grad_(), "append": True},
        ValueError,
    ),
    "prefix has strides": (lambda a: a | {"prefix": a["prefix"].t().contiguous().t(), "in_place": True}, ValueError),
    "prefix has strides .* of their own": (
        lambda a: a | {"prefix": a["prefix"][:1].expand(a["prefix"].shape), "in_place": True},
        ValueError,
    ),
    "bank has strides .* of their own": (
        lambda a: a | {"bank": a["bank"][:1].expand(a["bank"].shape), "append": True},
        ValueError,
    ),
    "layer_output has shape": (lambda a: a | {"layer_output": a["prefix"][:3]}, ValueError),
    "query has shape": (lambda a: a | {"query": a["query"][:3]}, ValueError),
    "output_dtype is torch.int8": (lambda a: a | {"output_dtype": torch.int8}, TypeError),
    "scale is nan": (lambda a: a | {"scale": float("nan")}, ValueError),
    "rms_eps is -1": (lambda a: a | {"rms_eps": -1}, ValueError),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(device, message):
    bank, prefix, x, query, rms_weight, _ = banks.tensors(device)
    given = {"bank": bank, "n_blocks": 3, "prefix": prefix, "query": query, "rms_weight": rms_weight, "layer_output": x}
    attn_res_bank(**given | {"n_blocks": None})  # a call like a right one is not checked again
    change, kind = BAD[message]
    with pytest.raises(kind, match=message):
        attn_res_bank(**change(given))
