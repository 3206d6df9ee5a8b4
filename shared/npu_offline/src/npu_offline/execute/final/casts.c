// Casts between types, in the rounding modes of the instruction set.
#include "rows.h"
#include "operations.h"

enum { RINT, ROUND, FLOOR, CEIL, TRUNC, ODD, WRAP };  // as the compiler numbers them

static float whole(float x, int mode) {
  switch (mode) {
    case ROUND: return roundf(x);
    case FLOOR: return floorf(x);
    case CEIL: return ceilf(x);
    case TRUNC: case WRAP: return truncf(x);
    case ODD: {
      const float down = truncf(x);
      return down == x || fmodf(down, 2.0f) != 0 ? down : down + copysignf(1, x);
    }
    default: return rintf(x);
  }
}

static int64_t limited(int64_t x, int type) {
  switch (type) {
    case I32: return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : x;
    case I16: return x > INT16_MAX ? INT16_MAX : x < INT16_MIN ? INT16_MIN : x;
    case I8: return x > INT8_MAX ? INT8_MAX : x < INT8_MIN ? INT8_MIN : x;
    case U32: return x > UINT32_MAX ? UINT32_MAX : x < 0 ? 0 : x;
    case U16: return x > UINT16_MAX ? UINT16_MAX : x < 0 ? 0 : x;
    case U8: return x > UINT8_MAX ? UINT8_MAX : x < 0 ? 0 : x;
    default: return x;
  }
}

static int64_t to_integer(float x, int mode, int type) {
  const float rounded = whole(x, mode);
  if (rounded != rounded) return 0;
  const int64_t wide = rounded >= 0x1p63f ? INT64_MAX : rounded < -0x1p63f ? INT64_MIN : (int64_t)rounded;
  return mode == WRAP ? wide : limited(wide, type);
}

// fp32 to a narrow type in a mode other than round-to-nearest: the next representable value below, above, or towards zero.
static uint16_t narrow(float x, int mode, int type) {
  const uint16_t near = type == BF16 ? float_to_bfloat(x) : float_to_half(x);
  const float back = type == BF16 ? bfloat_to_float(near) : half_to_float(near);
  if (mode == RINT || back == x || x != x) return near;
  const uint16_t outer = fabsf(back) > fabsf(x) ? near : (uint16_t)(near + 1), inner = fabsf(back) > fabsf(x) ? (uint16_t)(near - 1) : near;
  const float low = fabsf(type == BF16 ? bfloat_to_float(inner) : half_to_float(inner));
  const float high = fabsf(type == BF16 ? bfloat_to_float(outer) : half_to_float(outer));
  switch (mode) {
    case FLOOR: return x < 0 ? outer : inner;
    case CEIL: return x < 0 ? inner : outer;
    case ROUND: return fabsf(x) - low >= high - fabsf(x) ? outer : inner;
    case ODD: return inner & 1 ? inner : outer;
    default: return inner;
  }
}

static void row_cast(const instruction *i, rows *r) {
  const row *from = &r->rows[0], *to = &r->rows[1];
  const int mode = (int)i->attributes[1] >= 0 ? (int)i->attributes[1] : (int)r->rows[2].v->value;
  for (int64_t at = 0; at < r->n; at += PIECE) {
    const int64_t n = r->n - at < PIECE ? r->n - at : PIECE;
    float x[PIECE];
    int64_t z[PIECE];
    if (is_float(to->v->type)) {
      const float *a = floats(from, at, n, x);
      if (to->v->type == F32 && from->v->type == F32) {
        float y[PIECE];
        for (int64_t k = 0; k < n; k++) y[k] = whole(a[k], mode);
        put_floats(to, at, n, y);
      } else if (to->v->type == F32 || mode == RINT) {
        put_floats(to, at, n, a);
      } else {
        for (int64_t k = 0; k < n; k++) put_raw(to, at + k, narrow(a[k], mode, to->v->type));
      }
    } else if (is_float(from->v->type)) {
      const float *a = floats(from, at, n, x);
      for (int64_t k = 0; k < n; k++) z[k] = to->v->type == I1 ? a[k] != 0 : to_integer(a[k], mode, to->v->type);
      put_integers(to, at, n, z);
    } else {
      const int64_t *a = integers(from, at, n, z);
      int64_t y[PIECE];
      for (int64_t k = 0; k < n; k++) y[k] = to->v->type == I1 ? a[k] != 0 : mode == WRAP ? a[k] : limited(a[k], to->v->type);
      put_integers(to, at, n, y);
    }
  }
}

// Operands: the tile, the mode's number where no attribute gives it, then the result.
void do_cast(const instruction *i, const view *const *o) {
  const view *given[] = {o[0], o[i->reads], i->reads > 1 ? o[1] : o[0]};
  each_row(i, given, i->reads > 1 ? 3 : 2, given[1], row_cast);
}
