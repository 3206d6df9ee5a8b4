"""A program with a kernel that does what compute-sanitizer finds: finding nothing elsewhere means something."""

import torch
import triton
import triton.language as tl
from written import MarkWritten


@triton.jit
def planted_kernel(p_in, p_out, n_past):
    o_col = tl.arange(0, 64)
    tl.store(p_out + o_col, tl.load(p_in + n_past + o_col) + 1.0)


def main() -> None:
    """Reads what nobody has written, then past the end of a tensor."""
    device = torch.device("cuda")
    with MarkWritten(device):
        out = torch.zeros(64, device=device)
        for values, past in ((torch.empty(64, device=device), 0), (torch.ones(64, device=device), 2**20)):
            planted_kernel[(1,)](values, out, past)
            torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
