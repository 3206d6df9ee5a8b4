"""The operators registered with PyTorch, in its namespace `npu_attn_res`: one forward and one backward a function.

`attn_res` is in attn_res.py, with the same operator for arguments that it writes to, `attn_res_update`; `phase1` and `merge`
are in two_phase.py. Each file has schemas, what runs, shapes of results and autograd. Kernels run on accelerators (launch),
the definition on a CPU (cpu.py). Blocks come as a list of tensors [..., D], or, `stacked`, as a list of one tensor
[N, ..., D]. Statistics have one dimension for all tokens, T. A result that is not asked for is None.
"""

from . import attn_res, two_phase
from .library import OPERATORS

__all__ = ["OPERATORS", "attn_res", "two_phase"]
