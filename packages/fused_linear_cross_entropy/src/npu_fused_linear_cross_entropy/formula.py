"""Device code of the cross entropy that several kernels share: formulas, each once, and how tiles of logits are loaded.

    t = logit_scale (raw + bias)      z = softcap tanh(t / softcap)      k: a reference of the token, near its largest z
    S = sum exp(z - k)                L = k + log S                      p = exp(z - k) / S
    gradient of z:     dz = exp(z - k) (a + q (z - k)) - c w - b [column = target]
    gradient of raw:   logit_scale dz (1 - (z / softcap)^2)

a, b, c and q are factors of each token (see loss/reference.py), a and q with 1 / S; w is the class weight of a column. L,
rounded, would lose the digits that differ where all z are large: z - k comes first.

Without softcap, smoothing and entropies the gradient of raw is v E, and g more at the target:

    E = exp(z - k'), and 0 at the target     k': a reference that may be an earlier one than k
    v = logit_scale a exp(k' - k)            g = logit_scale (a exp(z - k) - b) at the target

    dx = v (E W) + g W[target]               dW = E^T (v x), then dW[target] += g x

E and v x are rounded to the dtype of products. Where exponentials are kept, dW = (v E)^T x, and v E is rounded. g stays in
fp32: the g x of several tokens may cancel, and the errors of bf16 would remain.

Statistics of a row are maximum and sum of exp; with SMOOTHED the sum of w (z - maximum), w the columns' weights or 1; with
ENTROPY the sum of exp times z; with ARGMAX the place of the first maximum; with SQUARES the sum of exp^2; with SMOOTHED the
sum of w. Functions return all seven in this order, 0 for those not computed.
"""

from npu_tiling.device import load_block, places_below, tl, triton

LOWEST: tl.constexpr = tl.constexpr(-3.0e38)  # finite: LOWEST - LOWEST is 0
VANISHES: tl.constexpr = tl.constexpr(-200.0)  # exp of it is 0 in fp32
SWEEP_LIMIT: tl.constexpr = tl.constexpr(30.0)  # V e^30 and e^-30 neither overflow nor underflow
PRODUCT_LIMIT: tl.constexpr = tl.constexpr(60.0)  # as above; a row that rises further costs a second product
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
ROUND: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 2^23: a smaller number plus this is rounded to an integer
MAX_ROUNDED: tl.constexpr = tl.constexpr(2.0e6)  # ROUND rounds numbers up to this


@triton.jit
def logits_of_raw(b_raw, b_bias, logit_scale, softcap):
    """z of raw products, fp32; None for no bias, no scale, no cap."""
    b_z = b_raw
    if b_bias is not None:
        b_z += b_bias
    if logit_scale is not None:
        b_z *= logit_scale
    if softcap is not None:
        b_e = tl.exp(tl.abs(b_z) * (-2.0 / softcap))
        b_tanh = (1.0 - b_e) / (1.0 + b_e)
        b_z = softcap * tl.where(b_z < 0.0, -b_tanh, b_tanh)
    return b_z


@triton.jit
def at_rate(b_z, b_rate):
    """z [BLOCK_M, BLOCK_N] times the rates of rows, 1 / temperature; None for 1."""
    if b_rate is not None:
        b_z *= b_rate[:, None]
    return b_z


@triton.jit
def gradient_of_raw(b_g, b_z, b_rate, logit_scale, softcap):
    """The gradient of raw products, given that of z; b_rate: as for `at_rate`."""
    if softcap is not None:
        b_t = b_z * (1.0 / softcap)
        if b_rate is not None:
            b_t /= b_rate[:, None]
        b_g *= 1.0 - b_t * b_t
    if logit_scale is not None:
        b_g *= logit_scale
    if b_rate is not None:
        b_g *= b_rate[:, None]
    return b_g


@triton.jit
def merge_statistics(
    b_max, b_sum, b_dot, b_index, b_max2, b_sum2, b_dot2, b_index2, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr
):  # fmt: skip
    """Statistics of two parts of the columns together; of equal maxima, the first part's has the place."""
    b_top = tl.maximum(b_max, b_max2)
    b_d, b_d2 = b_max - b_top, b_max2 - b_top
    b_e, b_e2 = tl.exp(b_d), tl.exp(b_d2)
    if ENTROPY:
        b_dot = b_e * (b_dot + b_d * b_sum) + b_e2 * (b_dot2 + b_d2 * b_sum2)
    if ARGMAX:
        b_index = tl.where(b_max2 > b_max, b_index2, b_index)
    return b_top, b_e * b_sum + b_e2 * b_sum2, b_dot, b_index


@triton.jit
def merge_squares(b_max, b_squares, b_max2, b_squares2):
    """Sums of exp^2 of earlier columns and of later ones together."""
    b_top = tl.maximum(b_max, b_max2)
    b_e, b_e2 = tl.exp(b_max - b_top), tl.exp(b_max2 - b_top)
    return b_e * b_e * b_squares + b_e2 * b_e2 * b_squares2


@triton.jit
def merge_totals(b_max, b_total, b_weight, b_max2, b_total2, b_weight2):
    """Sums of w (z - largest) of earlier columns and of later ones together; b_weight, b_weight2: sums of w."""
    b_top = tl.maximum(b_max, b_max2)
    return (b_total + (b_max - b_top) * b_weight) + (b_total2 + (b_max2 - b_top) * b_weight2)


@triton.jit
def row_coefficients(
    b_main, b_of_z_loss, b_weight, p_total_weight, b_reference, b_sum, b_z, smoothing, per_column, z_scale,
    WEIGHTED: tl.constexpr, TOKEN_SCALING: tl.constexpr
):  # fmt: skip
    """a, still without 1 / S, b and c [rows] of a loss.

    Args:
        b_main, b_of_z_loss: [rows], factors of the losses and z-losses; 0 for a row without a target.
        b_weight: [rows], the class weight of the target; with WEIGHTED.
        p_total_weight: the sum of the class weights, one number; with WEIGHTED and a smoothing.
        b_reference, b_sum, b_z: [rows], k, S and the target's z; with a z-loss and TOKEN_SCALING.
        smoothing, z_scale: None: there is none; c is then not to be read.
        per_column: the smoothing divided by the size of the vocabulary.
    """
    b_a, b_b, b_c = b_main, b_main, b_main
    if smoothing is not None:
        b_b = b_main * (1.0 - smoothing)
        b_c = b_main * per_column
    if WEIGHTED:
        b_b *= b_weight
        b_a = b_b
        if smoothing is not None:
            b_a = b_b + b_c * tl.load(p_total_weight)
    if z_scale is not None:
        b_a += b_of_z_loss * (2.0 * z_scale) * (b_reference + tl.log(b_sum))
    if TOKEN_SCALING:
        # A row without a target has z 0, and L may be below.
        b_probability = tl.exp(tl.minimum((b_z - b_reference) - tl.log(b_sum), 0.0))
        b_a, b_b, b_c = b_a * b_probability, b_b * b_probability, b_c * b_probability
    return b_a, b_b, b_c


@triton.jit
def raise_reference(b_reference, b_top):
    """References [rows] for a tile with maxima b_top, rounded to multiples of ln 2.

    So exponentials that are rescaled later are multiplied by about a power of two, which rounds no bf16. fp16 has no range
    for them.
    """
    b_rounded = ((b_top * LOG2E + ROUND) - ROUND) * LN2
    b_rounded = tl.where(tl.abs(b_top) < MAX_ROUNDED, b_rounded, b_top)
    return tl.where(b_top > b_reference + SWEEP_LIMIT, b_rounded, b_reference)


@triton.jit
def inside(b_tile, other, COLUMNS: tl.constexpr):
    """A tile [BLOCK_M, BLOCK_N], and `other` behind its COLUMNS columns."""
    if b_tile.shape[1] != COLUMNS:
        b_tile = tl.where((tl.arange(0, b_tile.shape[1]) < COLUMNS)[None, :], b_tile, other)
    return b_tile


@triton.jit
def exponentials_of(b_z, b_reference, b_sum, COLUMNS: tl.constexpr):
    """The exponentials of a tile; the references and the running sums of its rows, [rows]."""
    b_seen = inside(b_z, LOWEST, COLUMNS)
    b_raised = raise_reference(b_reference, tl.max(b_seen, axis=1))
    b_e = tl.exp(b_seen - b_raised[:, None])
    b_sum = b_sum * tl.exp(b_reference - b_raised) + tl.sum(b_e, axis=1)
    return b_e, b_raised, b_sum


PAST_ALL_COLUMNS: tl.constexpr = tl.constexpr(1.0e9)


@triton.jit
def tile_of_rows(p_logits, i_tile, n_rows, s_logits, BLOCK_M: tl.constexpr):
    """A tile's first row, the number of rows from it on, their mask, and the pointer to the first."""
    i_row = i_tile * BLOCK_M
    n_left = n_rows - i_row
    m_row = tl.arange(0, BLOCK_M) < n_left
    return i_row, n_left, m_row, p_logits + i_row.to(tl.int64) * s_logits


@triton.jit
def logits_mask(n_rows, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which elements of a tile are in its first `n_rows` rows, or in any for None, and in its COLUMNS columns."""
    if COLUMNS == BLOCK_N:
        m_tile = (tl.arange(0, BLOCK_M) < n_rows)[:, None]
    elif (BLOCK_M > 1) and (n_rows is not None):
        m_tile = (tl.arange(0, BLOCK_M) < n_rows)[:, None] & (tl.arange(0, BLOCK_N) < COLUMNS)[None, :]
    else:
        m_tile = (tl.arange(0, BLOCK_N) < COLUMNS)[None, :]
    return m_tile


@triton.jit
def load_columns(p_vector, i_col, COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr):
    """fp32 [1, BLOCK_N] of a vector over the vocabulary, from i_col on."""
    o_col = i_col + tl.arange(0, BLOCK_N)
    b_vector = load_block(p_vector + o_col, m_block=places_below(o_col, i_col + COLUMNS, COLUMNS == BLOCK_N))
    return b_vector.to(tl.float32)[None, :]


@triton.jit
def load_logits(
    p_row, i_col, s_row, n_rows, p_bias, logit_scale, softcap, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    """z, fp32 [BLOCK_M, BLOCK_N], of COLUMNS columns from i_col on; elements outside are finite.

    n_rows: how many rows there are; None where the memory has whole tiles. A masked load fills its
    tile with zeros first; compiled by CANN 8.5 it then waits for all arithmetic before it. Without a mask there is no fill.
    """
    p_tile = p_row + (tl.arange(0, BLOCK_M)[:, None] * s_row + (i_col + tl.arange(0, BLOCK_N))[None, :])
    if (COLUMNS == BLOCK_N) and ((n_rows is None) or (BLOCK_M == 1)):
        b_raw = tl.load(p_tile)
    else:
        b_raw = tl.load(p_tile, mask=logits_mask(n_rows, COLUMNS, BLOCK_M, BLOCK_N), other=0.0)
    b_bias = None
    if p_bias is not None:
        b_bias = load_columns(p_bias, i_col, COLUMNS, BLOCK_N)
    return logits_of_raw(b_raw.to(tl.float32), b_bias, logit_scale, softcap)


@triton.jit
def load_tail(
    p_row, s_row, n_rows, p_bias, logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL_N: tl.constexpr
):  # fmt: skip
    """z of the columns behind the last whole block, [BLOCK_M, TAIL_N]; a number where there are none."""
    b_tail = 0.0
    if TAIL_N > 0:
        b_tail = load_logits(
            p_row, N // BLOCK_N * BLOCK_N, s_row, n_rows, p_bias, logit_scale, softcap, N % BLOCK_N, BLOCK_M, TAIL_N
        )
    return b_tail


@triton.jit
def target_column(b_column, N: tl.constexpr):
    """Whether int32 columns [BLOCK_M] are in the chunk, and the columns clamped to it."""
    b_number = b_column.to(tl.float32)  # compares of integers are loops over elements on Ascend; exact below 2^24
    return (b_number >= 0.0) & (b_number < N), tl.minimum(tl.maximum(b_column, 0), N - 1)


@triton.jit
def target_logit(p_row, m_here, b_safe, s_row, n_rows, p_bias, logit_scale, softcap):
    """z of the rows' targets, [BLOCK_M], 0 outside the chunk; m_here, b_safe: as `target_column` returns."""
    # One load for each row; a row whose target is outside loads another column and drops it.
    b_raw = tl.load(p_row + tl.minimum(tl.arange(0, m_here.shape[0]), n_rows - 1) * s_row + b_safe).to(tl.float32)
    b_bias = None
    if p_bias is not None:
        b_bias = tl.load(p_bias + b_safe).to(tl.float32)
    return tl.where(m_here, logits_of_raw(b_raw, b_bias, logit_scale, softcap), 0.0)


@triton.jit
def store_tile(p_row, b_tile, i_col, s_row, n_rows, COLUMNS: tl.constexpr, BARRIER: tl.constexpr):
    """Stores a tile [BLOCK_M, BLOCK_N] at COLUMNS columns from i_col on, in the pointer's dtype."""
    BLOCK_M: tl.constexpr = b_tile.shape[0]
    BLOCK_N: tl.constexpr = b_tile.shape[1]
    p_tile = p_row + (tl.arange(0, BLOCK_M)[:, None] * s_row + (i_col + tl.arange(0, BLOCK_N))[None, :])
    b_tile = b_tile.to(p_row.dtype.element_ty)
    if BARRIER:
        tl.debug_barrier()  # other threads may still have to load the elements that this thread overwrites
    if (BLOCK_M == 1) and (COLUMNS == BLOCK_N):
        tl.store(p_tile, b_tile)
    else:
        tl.store(p_tile, b_tile, mask=logits_mask(n_rows, COLUMNS, BLOCK_M, BLOCK_N))


@triton.jit
def is_column(b_place, BLOCK_N: tl.constexpr):
    """[BLOCK_M, BLOCK_N], whether a column is at its row's place, [BLOCK_M], counted from the first column."""
    # Compares of integers are loops over elements on Ascend. fp32 is exact below 2^24, and never rounds a larger distance to
    # a column's number.
    return b_place[:, None].to(tl.float32) == tl.arange(0, BLOCK_N)[None, :].to(tl.float32)


@triton.jit
def gradient_of_logits(
    b_z, b_reference, b_a, b_b, b_c, b_q, b_column, i_col, p_class_weight, COLUMNS: tl.constexpr
):  # fmt: skip
    """exp(z - k) (a + q (z - k)) - c w - b [column = target] of a tile; None for no c, no q, no class weights w."""
    b_d = b_z - b_reference[:, None]
    b_g = tl.exp(b_d)
    if b_q is not None:
        b_g *= b_a[:, None] + b_q[:, None] * tl.maximum(b_d, VANISHES)  # 0 times minus infinity is no number
    else:
        b_g *= b_a[:, None]
    if b_c is not None:
        if p_class_weight is not None:
            b_g -= b_c[:, None] * load_columns(p_class_weight, i_col, COLUMNS, b_z.shape[1])
        else:
            b_g -= b_c[:, None]
    return tl.where(is_column(b_column - i_col, b_z.shape[1]), b_g - b_b[:, None], b_g)


@triton.jit
def tile_statistics(
    b_z, i_col, p_class_weight, COLUMNS: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr,
    SQUARES: tl.constexpr
):  # fmt: skip
    """Statistics [BLOCK_M] of one tile."""
    BLOCK_N: tl.constexpr = b_z.shape[1]
    b_dot, b_total, b_index, b_squares, b_weight = 0.0, 0.0, 0.0, 0.0, 0.0
    b_seen = inside(b_z, LOWEST, COLUMNS)
    b_max = tl.maximum(tl.max(b_seen, axis=1), LOWEST)
    b_d = b_seen - b_max[:, None]
    b_e = tl.exp(b_d)
    b_sum = tl.sum(b_e, axis=1)
    if ENTROPY:
        b_dot = tl.sum(b_e * tl.maximum(b_d, VANISHES), axis=1)
    if SQUARES:
        b_squares = tl.sum(b_e * b_e, axis=1)
    if SMOOTHED:
        b_weight = 1.0 * COLUMNS
        if p_class_weight is not None:
            b_w = load_columns(p_class_weight, i_col, COLUMNS, BLOCK_N)
            b_weight = tl.sum(b_w + tl.zeros(b_z.shape, tl.float32), axis=1)
            b_d *= b_w
        b_total = tl.sum(inside(b_d, 0.0, COLUMNS), axis=1)
    if ARGMAX:
        b_col = i_col + tl.arange(0, BLOCK_N)[None, :].to(tl.float32) + tl.zeros(b_z.shape, tl.float32)
        b_index = tl.min(tl.where(b_seen == b_max[:, None], b_col, PAST_ALL_COLUMNS), axis=1)
    return b_max, b_sum, b_total, b_dot, b_index, b_squares, b_weight


@triton.jit
def sweep_statistics(
    p_row, i_end, s_row, n_rows, b_rate, p_bias, p_class_weight, logit_scale, softcap, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr, SQUARES: tl.constexpr
):  # fmt: skip
    """Statistics [BLOCK_M] of the columns before i_end, a multiple of BLOCK_N; one exp for each logit."""
    b_maxima = tl.full([BLOCK_M, BLOCK_N], LOWEST, tl.float32)
    b_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b_dot, b_total, b_index, b_squares, b_weight = 0.0, 0.0, 0.0, 0.0, 0.0
    if ENTROPY:
        b_dots = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SQUARES:
        b_sums_of_squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if SMOOTHED:
        b_totals = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_weights = 0.0  # of the columns before, for each lane
        if p_class_weight is not None:
            b_weights = tl.zeros([1, BLOCK_N], tl.float32)
    if ARGMAX:
        b_places = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # in blocks
    for i_col in tl.range(0, i_end, BLOCK_N):
        b_z = load_logits(p_row, i_col, s_row, n_rows, p_bias, logit_scale, softcap, BLOCK_N, BLOCK_M, BLOCK_N)
        b_z = at_rate(b_z, b_rate)
        b_d = b_z - b_maxima
        b_e = tl.exp(-tl.abs(b_d))
        m_above = b_d > 0.0
        if SMOOTHED:
            if p_class_weight is not None:
                b_w = load_columns(p_class_weight, i_col, BLOCK_N, BLOCK_N)
                b_totals += b_d * tl.where(m_above, -b_weights, b_w)
                b_weights += b_w
            else:
                b_totals += b_d * tl.where(m_above, -b_weights, 1.0)
                b_weights += 1.0
        if ENTROPY:
            b_dots = tl.where(m_above, b_e * (b_dots - b_d * b_sums), b_dots + b_e * tl.maximum(b_d, VANISHES))
        b_sums = tl.where(m_above, b_sums * b_e + 1.0, b_sums + b_e)
        if SQUARES:
            b_e *= b_e
            b_sums_of_squares = tl.where(m_above, b_sums_of_squares * b_e + 1.0, b_sums_of_squares + b_e)
        if ARGMAX:
            # Not m_above: CUDA may fuse the product that z is into the difference, which then is none of equal numbers.
            b_places = tl.where(b_z > b_maxima, i_col.to(tl.float32), b_places)
        b_maxima = tl.where(m_above, b_z, b_maxima)  # tl.maximum minds NaN: two compares more on Ascend
    b_max = tl.max(b_maxima, axis=1)
    b_d = b_maxima - b_max[:, None]
    b_e = tl.exp(b_d)
    b_sum = tl.sum(b_e * b_sums, axis=1)
    if ENTROPY:
        b_dot = tl.sum(b_e * (b_dots + b_d * b_sums), axis=1)
    if SQUARES:
        b_squares = tl.sum(b_e * b_e * b_sums_of_squares, axis=1)
    if SMOOTHED:
        b_total = tl.sum(b_totals + b_d * b_weights, axis=1)
        b_weight = 1.0 * i_end
        if p_class_weight is not None:
            b_weight = tl.sum(b_weights + tl.zeros([BLOCK_M, BLOCK_N], tl.float32), axis=1)
    if ARGMAX:
        b_col = b_places + tl.arange(0, BLOCK_N)[None, :].to(tl.float32)
        b_index = tl.min(tl.where(b_maxima == b_max[:, None], b_col, PAST_ALL_COLUMNS), axis=1)
    return b_max, b_sum, b_total, b_dot, b_index, b_squares, b_weight


@triton.jit
def statistics_of_rows(
    p_row, b_tail, s_row, n_rows, b_rate, p_bias, p_class_weight, logit_scale, softcap, N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr,
    SQUARES: tl.constexpr
):  # fmt: skip
    """Statistics [BLOCK_M] of a tile of rows, whose columns behind the last whole block b_tail has."""
    N_FULL: tl.constexpr = N // BLOCK_N * BLOCK_N
    if N > N_FULL:
        b_max, b_sum, b_total, b_dot, b_index, b_squares, b_weight = tile_statistics(
            b_tail, N_FULL, p_class_weight, N - N_FULL, SMOOTHED, ENTROPY, ARGMAX, SQUARES
        )
    if N_FULL > 0:
        b_max1, b_sum1, b_total1, b_dot1, b_index1, b_squares1, b_weight1 = sweep_statistics(
            p_row, N_FULL, s_row, n_rows, b_rate, p_bias, p_class_weight, logit_scale, softcap, BLOCK_M, BLOCK_N, SMOOTHED,
            ENTROPY, ARGMAX, SQUARES
        )  # fmt: skip
        if N > N_FULL:
            if SQUARES:
                b_squares = merge_squares(b_max1, b_squares1, b_max, b_squares)
            if SMOOTHED:
                b_total = merge_totals(b_max1, b_total1, b_weight1, b_max, b_total, b_weight)
                b_weight += b_weight1
            b_max, b_sum, b_dot, b_index = merge_statistics(
                b_max1, b_sum1, b_dot1, b_index1, b_max, b_sum, b_dot, b_index, ENTROPY, ARGMAX
            )
        else:
            b_max, b_sum, b_total, b_dot, b_index, b_squares = b_max1, b_sum1, b_total1, b_dot1, b_index1, b_squares1
            b_weight = b_weight1
    return b_max, b_sum, b_total, b_dot, b_index, b_squares, b_weight


@triton.jit
def log_sum_exp(
    p_row, b_tail, s_row, n_rows, p_bias, logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr
):  # fmt: skip
    """The largest z and log sum exp(z - largest), [BLOCK_M], of a tile of rows; b_tail: as in `statistics_of_rows`."""
    b_max, b_sum, _, _, _, _, _ = statistics_of_rows(
        p_row, b_tail, s_row, n_rows, None, p_bias, None, logit_scale, softcap, N, BLOCK_M, BLOCK_N, False, False, False,
        False
    )  # fmt: skip
    return b_max, tl.log(b_sum)


@triton.jit
def store_statistics(
    p_row, p_statistics, b_tail, b_column, i_row, m_row, s_row, s_out, n_rows, n_left, p_bias, p_class_weight, first,
    logit_scale, softcap, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MERGE: tl.constexpr,
    SMOOTHED: tl.constexpr, ENTROPY: tl.constexpr, ARGMAX: tl.constexpr
):  # fmt: skip
    """Stores the statistics of a tile of rows and their targets' z, and returns some of them.

    Args:
        p_statistics: of a tensor [7, rows].
        b_column: the targets' columns, of these or of others.
        MERGE: merged with the statistics of earlier columns, which are there already.

    Returns:
        Maximum, sum of exp, the target's z, whether the target is a column of this chunk, and that column or another one.
    """
    b_max, b_sum, b_total, b_dot, b_index, _, b_weight = statistics_of_rows(
        p_row, b_tail, s_row, n_rows, None, p_bias, p_class_weight, logit_scale, softcap, N, BLOCK_M, BLOCK_N, SMOOTHED,
        ENTROPY, ARGMAX, False
    )  # fmt: skip
    m_here, b_safe = target_column(b_column, N)
    b_z = target_logit(p_row, m_here, b_safe, s_row, n_left, p_bias, logit_scale, softcap)
    if ARGMAX:
        b_index += first.to(tl.float32)
    p_out = p_statistics + i_row + tl.arange(0, BLOCK_M)
    if MERGE:
        b_max0 = tl.load(p_out, mask=m_row, other=0.0)
        b_sum0 = tl.load(p_out + s_out, mask=m_row, other=1.0)
        b_z += tl.load(p_out + 2 * s_out, mask=m_row, other=0.0)
        b_dot0, b_index0 = 0.0, 0.0
        if SMOOTHED:
            b_total0 = tl.load(p_out + 3 * s_out, mask=m_row, other=0.0)
            b_weight0 = tl.load(p_out + 6 * s_out, mask=m_row, other=0.0)
            b_total = merge_totals(b_max0, b_total0, b_weight0, b_max, b_total, b_weight)
            b_weight += b_weight0
        if ENTROPY:
            b_dot0 = tl.load(p_out + 4 * s_out, mask=m_row, other=0.0)
        if ARGMAX:
            b_index0 = tl.load(p_out + 5 * s_out, mask=m_row, other=0.0)
        b_max, b_sum, b_dot, b_index = merge_statistics(
            b_max0, b_sum0, b_dot0, b_index0, b_max, b_sum, b_dot, b_index, ENTROPY, ARGMAX
        )
    tl.store(p_out, b_max, mask=m_row)
    tl.store(p_out + s_out, b_sum, mask=m_row)
    tl.store(p_out + 2 * s_out, b_z, mask=m_row)
    if SMOOTHED:
        tl.store(p_out + 3 * s_out, b_total, mask=m_row)
        tl.store(p_out + 6 * s_out, tl.zeros([BLOCK_M], tl.float32) + b_weight, mask=m_row)
    if ENTROPY:
        tl.store(p_out + 4 * s_out, b_dot, mask=m_row)
    if ARGMAX:
        tl.store(p_out + 5 * s_out, b_index, mask=m_row)
    return b_max, b_sum, b_z, m_here, b_safe
