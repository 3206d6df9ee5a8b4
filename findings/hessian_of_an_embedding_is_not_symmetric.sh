#!/usr/bin/env bash
# torch.func: F.embedding's padding_idx and scale_grad_by_freq exist in reverse mode alone; the Hessian of a model with either is lopsided.
#
# Versions: torch 2.13.0 (a CPU build is enough), numpy 2.4.6, Python 3.11.
# Input: float64 table [4, 3], indices 0, 1, 1, 2 of which 1 is padding; the loss is the square of a sum over all rows that were looked up.
# Expected: jacfwd and jacrev of one function agree, and a Hessian is symmetric: "entries at padding_idx do not contribute to the gradient"
#   has no exception for a way to compute it.
# Seen on 2026-11-30, without an error or a warning:
#     padding_idx=1            row 1 of the gradient: jacrev 0, jacfwd not; hessian: column 1 is there, row 1 is 0
#     scale_grad_by_freq=True  row 1: jacfwd twice jacrev; hessian: column 1 is twice row 1, for an index that occurs twice
#     neither                  equal, and symmetric; sparse, an option of the gradient too, changes nothing
#   hessian is jacfwd(jacrev(f)), and each of the two leaves out other things. Newton steps, conjugate gradients and Lanczos' method, which
#   need a symmetric matrix, get another one; products with the Hessian by jvp of grad and by two backward passes differ.
# A way round: no such option under torch.func; the gradient's rows scaled, or set to zero, by hand. For padding_idx jacrev(jacrev(f)) is
#   symmetric.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work"
"$work/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6

cat >"$work/embedding.py" <<'PYTHON'
import torch
import torch.nn.functional as F
from torch.func import hessian, jacfwd, jacrev

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
table, factors, index = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, 1, 1, 2])


def seen(**options):
    """Row 1 of the gradient in both modes, and of two Hessians how far row 1 is from column 1."""

    def loss(table):
        return (F.embedding(index, table, **options) * factors).sum().square()

    def lopsided(matrix):
        return (matrix[1, :, 0] - matrix[0, :, 1].T).abs().max().item() > 1e-9

    modes = [way(loss)(table)[1] for way in (jacrev, jacfwd)]
    ratio = "none" if not modes[0].any() else round((modes[1] / modes[0]).mean().item(), 3)
    return bool(modes[1].any()), ratio, lopsided(hessian(loss)(table)), lopsided(jacrev(jacrev(loss))(table))


found = {name: seen(**{name: value}) for name, value in {"padding_idx": 1, "scale_grad_by_freq": True, "sparse": False}.items()}
for name, (is_there, ratio, both, reverse) in found.items():
    print(f"{name}: jacfwd has row 1: {is_there}, over jacrev's: {ratio}, hessian lopsided: {both}, jacrev(jacrev): {reverse}")
expected = {"padding_idx": (True, "none", True, False), "scale_grad_by_freq": (True, 2.0, True, True)}
if found != expected | {"sparse": (True, 1.0, False, False)}:
    raise SystemExit("changed")
PYTHON
"$work/bin/python" "$work/embedding.py"
