"""The operators registered with PyTorch, in its namespace `npu_attn_res`: schema, implementation, fake function.

`attn_res`, `phase1`, `merge` and the gradient of each; kernels on accelerators, reference.py on a CPU. Sources (the argument
`blocks`) come as a list of tensors [..., D], or, `stacked`, as a list of one tensor [N, ..., D]. Statistics have one
dimension for all tokens, T. A result that is not asked for is None, to the dispatcher an empty tensor. autograd.py sets the
gradients.
"""

from . import single, two_phase
from .library import OPERATORS

__all__ = ["OPERATORS", "single", "two_phase"]
