"""Bad input is refused with one sentence that names the argument, what it was and what it must be."""

import torch
from npu_attn_res import AttnRes, BlockAttnRes, attn_res, attn_res_merge, attn_res_phase1

from testing.operators import *  # noqa: F403
from testing.operators import Wide

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
    ValueError: {
        r"given to add\(\) before the first input\(\) and must be": output_before_input,
        "residuals is empty and must have at least one": lambda: attn_res([], W, W),
        r"residuals has shape \(0, 2, 8\)": lambda: attn_res(V[:0], W, W),
        r"residuals has shape \(8,\) and must have shape \(N, ..., D\)": lambda: attn_res(W, W, W),
        r"residuals\[1\] has shape \(1, 8\) and must have shape \(2, 8\)": lambda: attn_res([V[0], V[1, :1]], W, W),
        r"residuals\[1\] is on meta": lambda: attn_res([V[0], V[1].to("meta")], W, W),
        "must have a last dimension of at least 1": lambda: attn_res(V[..., :0], W, W),
        r"query has shape \(9,\) .* \(8,\)": lambda: attn_res(V, torch.ones(9), W),
        "rms_weight is on meta": lambda: attn_res(V, W, W.to("meta")),
        r"output_rms_weight has shape \(4,\)": lambda: attn_res(V, W, W, output_rms_weight=W[:4]),
        "rms_eps is -1e-06 and must be at least 0": lambda: attn_res(V, W, W, rms_eps=-1e-6),
        "output_rms_eps is nan": lambda: attn_res(V, W, W, output_rms_eps=float("nan")),
        r"queries has shape \(8,\) and must have shape \(S, 8\)": lambda: attn_res_phase1(W, V, W),
        r"rms_weight has shape \(3, 8\)": lambda: attn_res_phase1(V[0], V, V[:, 0]),
        r"lse has shape \(1,\)": lambda: attn_res_merge(V[0], T[:1], V[0], W, W),
        "n_inputs is 0 and must be a whole number of at least 1": lambda: BlockAttnRes(8, 0, 1),
        r"^input\(\) was called 2 times and must be called at most n_inputs, 1, t": one_too_many,
        r"output has shape \(1, 8\) and must have shape \(2, 8\)": other_rows,
        "block_size is 0 and must be a whole number of at least 1": lambda: BlockAttnRes(8, 2, 0),
    },
    TypeError: {
        "residuals is a int and must be a tensor, or a list": lambda: attn_res(3, W, W),
        r"residuals\[1\] is a float and must be a tensor": lambda: attn_res([V[0], 1.0], W, W),
        r"residuals\[1\] is torch.float16": lambda: attn_res([V[0], V[1].half()], W, W),
        "residuals is torch.int64 .* must be torch.float32": lambda: attn_res(V.long(), W, W),
        "query is a NoneType and must be a tensor": lambda: attn_res(V, None, W),
        "rms_weight is torch.float16 and must be": lambda: attn_res(V, W, W.half()),
        "positional": lambda: attn_res(V, W, W, None, 1e-6, 1.0, True),
        "o is torch.float16 and must be": lambda: attn_res_merge(V[0].half(), T, V[0], W, W),
        "prefix is a NoneType": lambda: attn_res_merge(V[0], T, None, W, W),
        "layer_output is torch.int64 .* must be torch.float32": lambda: attn_res_merge(
            V[0], T, V[0], W, W, layer_output=V[1].long()
        ),
        "residuals is a str and must be a tensor, or a list": lambda: attn_res("ab", W, W),
        "scale is a str and must be a number": lambda: attn_res(V, W, W, scale="a"),
        "^rms_eps is a NoneType and must be a number.$": lambda: attn_res(V, W, W, rms_eps=None),
        "eps is a bool and must be a number": lambda: attn_res(V, W, W, rms_eps=True),
        "output_rms_eps is a str and must be a number": lambda: attn_res(V, W, W, output_rms_eps="a"),
        "eps is a str and must be a number": lambda: attn_res_phase1(V[0], V, W, "a"),
        "eps is a NoneType": lambda: attn_res_merge(V[0], T, V[0], W, W, rms_eps=None),
        "return_weights is 2 and must be True or": lambda: attn_res(V, W, W, return_weights=2),
        "hidden_size is 'a' and must be a whole number": lambda: AttnRes("a"),
        "^rms_eps is a NoneType and must be a number": lambda: AttnRes(8, rms_eps=None),
        "^scale is a str and must be a number": lambda: AttnRes(8, scale="a"),
    },
}
WIDE = (Wide("residuals", attn_res, (V, W, W)),)
