"""Device code of both chips: where rows of dy lie."""

import triton
import triton.language as tl


@triton.jit
def dy_offset(i_dy, n_part, s_part, s_dy, IN_PARTS: tl.constexpr):
    """Where row `i_dy` of dy begins; IN_PARTS: of parts of `n_part` rows."""
    if IN_PARTS:
        i_part = i_dy // n_part
        return i_part.to(tl.int64) * s_part + (i_dy - i_part * n_part).to(tl.int64) * s_dy
    else:
        return i_dy.to(tl.int64) * s_dy
