"""The definition of the loss in plain PyTorch, which runs on a CPU: arithmetic on rows and on chunks of logits.

With z the logits, L = log sum exp z, y the target, e = label_smoothing, V the vocabulary's size, w class weights, w_y the
target's, W the sum of all w, N the rows that are not ignored and S the sum of w_y over them:

    unweighted    row = (1 - e) (L - z_y)     + e L - (e / V) sum z_i
    weighted      row = (1 - e) (L - z_y) w_y + (e / V) L W - (e / V) sum w_i z_i
    z-loss        lse_square_scale L^2
    loss          "mean": sum of row / N (weighted: / S) + z-loss / N      "sum", "none": row + z-loss
    token_scaling multiplies all of a row by exp(z_y - L), as a constant

The gradient of a row's loss with respect to z is exp(z - k) (a + q (z_i - k)) - c w_i - b [i = y] with factors that
`coefficients` gives, 1 / S in a and q, for k the largest z and S = sum exp(z - k); q and a part of a belong to the entropy
H = L - sum p z, p = exp(z - k) / S, whose gradient is -p (z - L + H). Differences from k come first: L is rounded.

All arithmetic is fp32 (fp64 for fp64 input); the gradient of the logits is rounded to x's dtype before it meets x and the
weight, as in the kernels. Source: torch.nn.functional.cross_entropy; for the z-loss, Chowdhery et al., "PaLM", arXiv
2204.02311.
"""
