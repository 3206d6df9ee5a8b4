"""Bad input is refused with one sentence that names the argument, what it was and what it must be."""

import pytest
import torch
from npu_attn_res import AttnRes, BlockAttnRes, attn_res, attn_res_merge, attn_res_phase1

V, W, T = torch.ones(3, 2, 8), torch.ones(8), torch.ones(2)


def one_too_many():
    depth = BlockAttnRes(8, 1, 1).start(V[0])
    depth.input()
    depth.add(V[0])
    depth.input()


def output_before_input():
    BlockAttnRes(8, 2, 1).start(V[0]).add(V[0])


def other_rows():
    depth = BlockAttnRes(8, 2, 1).start(V[0])
    depth.input()
    depth.add(V[0, :1])


REFUSED = {
    "an output before an input": (
        output_before_input,
        ValueError,
        r"given to add\(\) before the first input\(\) and must be",
    ),
    "residuals is no list": (lambda: attn_res(3, W, W), TypeError, "residuals is a int and must be a tensor, or a list"),
    "no blocks": (lambda: attn_res([], W, W), ValueError, "residuals is empty and must have at least one"),
    "no stacked blocks": (lambda: attn_res(V[:0], W, W), ValueError, r"residuals has shape \(0, 2, 8\)"),
    "residuals is a row": (
        lambda: attn_res(W, W, W),
        ValueError,
        r"residuals has shape \(8,\) and must have shape \(N, ..., D\)",
    ),
    "a block is no tensor": (
        lambda: attn_res([V[0], 1.0], W, W),
        TypeError,
        r"residuals\[1\] is a float and must be a tensor",
    ),
    "a block has another shape": (
        lambda: attn_res([V[0], V[1, :1]], W, W),
        ValueError,
        r"residuals\[1\] has shape \(1, 8\) and must have shape \(2, 8\)",
    ),
    "a block has another dtype": (
        lambda: attn_res([V[0], V[1].half()], W, W),
        TypeError,
        r"residuals\[1\] is torch.float16",
    ),
    "a block is elsewhere": (lambda: attn_res([V[0], V[1].to("meta")], W, W), ValueError, r"residuals\[1\] is on meta"),
    "residuals is integer": (
        lambda: attn_res(V.long(), W, W),
        TypeError,
        "residuals is torch.int64 .* must be torch.float32",
    ),
    "no columns": (lambda: attn_res(V[..., :0], W, W), ValueError, "must have a last dimension of at least 1"),
    "query is no tensor": (lambda: attn_res(V, None, W), TypeError, "query is a NoneType and must be a tensor"),
    "query is too long": (lambda: attn_res(V, torch.ones(9), W), ValueError, r"query has shape \(9,\) .* \(8,\)"),
    "norm is narrower": (lambda: attn_res(V, W, W.half()), TypeError, "rms_weight is torch.float16 and must be"),
    "norm is elsewhere": (lambda: attn_res(V, W, W.to("meta")), ValueError, "rms_weight is on meta"),
    "output_rms_weight is too short": (
        lambda: attn_res(V, W, W, output_rms_weight=W[:4]),
        ValueError,
        r"output_rms_weight has shape \(4,\)",
    ),
    "eps is negative": (lambda: attn_res(V, W, W, rms_eps=-1e-6), ValueError, "rms_eps is -1e-06 and must be at least 0"),
    "output_rms_eps is no number": (
        lambda: attn_res(V, W, W, output_rms_eps=float("nan")),
        ValueError,
        "output_rms_eps is nan",
    ),
    "options are keywords": (lambda: attn_res(V, W, W, None, 1e-6, 1.0, True), TypeError, "positional"),
    "queries is a row": (
        lambda: attn_res_phase1(W, V, W),
        ValueError,
        r"queries has shape \(8,\) and must have shape \(S, 8\)",
    ),
    "norms of other layers": (lambda: attn_res_phase1(V[0], V, V[:, 0]), ValueError, r"rms_weight has shape \(3, 8\)"),
    "o is narrower": (lambda: attn_res_merge(V[0].half(), T, V[0], W, W), TypeError, "o is torch.float16 and must be"),
    "lse has another shape": (
        lambda: attn_res_merge(V[0], T[:1], V[0], W, W),
        ValueError,
        r"lse has shape \(1,\)",
    ),
    "prefix is no tensor": (lambda: attn_res_merge(V[0], T, None, W, W), TypeError, "prefix is a NoneType"),
    "output is integer": (
        lambda: attn_res_merge(V[0], T, V[0], W, W, layer_output=V[1].long()),
        TypeError,
        "layer_output is torch.int64 .* must be torch.float32",
    ),
    "residuals is a word": (lambda: attn_res("ab", W, W), TypeError, "residuals is a str and must be a tensor, or a list"),
    "scale is a word": (lambda: attn_res(V, W, W, scale="a"), TypeError, "scale is a str and must be a number"),
    "eps is None": (lambda: attn_res(V, W, W, rms_eps=None), TypeError, "^rms_eps is a NoneType and must be a number.$"),
    "eps is a flag": (lambda: attn_res(V, W, W, rms_eps=True), TypeError, "eps is a bool and must be a number"),
    "output_rms_eps is a word": (
        lambda: attn_res(V, W, W, output_rms_eps="a"),
        TypeError,
        "output_rms_eps is a str and must be a number",
    ),
    "eps of phase 1": (lambda: attn_res_phase1(V[0], V, W, "a"), TypeError, "eps is a str and must be a number"),
    "eps of merge": (lambda: attn_res_merge(V[0], T, V[0], W, W, rms_eps=None), TypeError, "eps is a NoneType"),
    "return_weights": (lambda: attn_res(V, W, W, return_weights=2), TypeError, "return_weights is 2 and must be True or"),
    "hidden_size of a module": (lambda: AttnRes("a"), TypeError, "hidden_size is 'a' and must be a whole number"),
    "eps of a module": (lambda: AttnRes(8, rms_eps=None), TypeError, "eps is a NoneType"),
    "inputs of a model": (
        lambda: BlockAttnRes(8, 0, 1),
        ValueError,
        "n_inputs is 0 and must be a whole number of at least 1",
    ),
    "an input too many": (
        one_too_many,
        ValueError,
        r"^input\(\) was called 2 times and must be called at most n_inputs, 1, t",
    ),
    "an output of other rows": (other_rows, ValueError, r"output has shape \(1, 8\) and must have shape \(2, 8\)"),
    "scale of a module": (lambda: AttnRes(8, scale="a"), TypeError, "scale is a str and must be a number"),
    "blocks of no layers": (
        lambda: BlockAttnRes(8, 2, 0),
        ValueError,
        "block_size is 0 and must be a whole number of at least 1",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    call, error, sentence = REFUSED[what]
    with pytest.raises(error, match=sentence):
        call()


def test_fp64_is_for_the_cpu_alone(device):
    tensors = [tensor.double().to(device.torch) for tensor in (V, W, W)]
    if device.name == "cpu":
        assert attn_res(*tensors).dtype == torch.float64
    else:
        with pytest.raises(TypeError, match="residuals is torch.float64"):
            attn_res(*tensors)
