// What vector instructions compute, element by element, and by row.
#include "rows.h"
#include "operations.h"

#define PIECES(at, count) \
  for (int64_t at = 0, count; at < r->n && (count = r->n - at < PIECE ? r->n - at : PIECE) > 0; at += count)

// An instruction of two operands, from an expression for fp32 and one for integers.
#define BINARY(name, in_floats, in_integers)                                                                  \
  static void row_##name(const instruction *i, rows *r) {                                                     \
    (void)i;                                                                                                  \
    if (is_float(r->rows[2].v->type)) {                                                                       \
      float x[PIECE], y[PIECE], z[PIECE];                                                                     \
      PIECES(at, n) {                                                                                         \
        const float *a_ = floats(&r->rows[0], at, n, x), *b_ = floats(&r->rows[1], at, n, y);                 \
        float *to = float_target(&r->rows[2], at, z);                                                         \
        for (int64_t k = 0; k < n; k++) {                                                                     \
          const float a = a_[k], b = b_[k];                                                                   \
          to[k] = in_floats;                                                                                  \
        }                                                                                                     \
        put_floats(&r->rows[2], at, n, to);                                                                   \
      }                                                                                                       \
    } else {                                                                                                  \
      int64_t x[PIECE], y[PIECE], z[PIECE];                                                                   \
      PIECES(at, n) {                                                                                         \
        const int64_t *a_ = integers(&r->rows[0], at, n, x), *b_ = integers(&r->rows[1], at, n, y);           \
        for (int64_t k = 0; k < n; k++) {                                                                     \
          const int64_t a = a_[k], b = b_[k];                                                                 \
          z[k] = in_integers;                                                                                 \
        }                                                                                                     \
        put_integers(&r->rows[2], at, n, z);                                                                  \
      }                                                                                                       \
    }                                                                                                         \
  }                                                                                                           \
  void do_##name(const instruction *i, const view *const *o) { each_row(i, o, 3, o[2], row_##name); }

static float no_float(void) { unknown_text("such an operation of floating-point numbers"); }
static int64_t no_integer(void) { unknown_text("such an operation of integers"); }
static int64_t quotient(int64_t a, int64_t b) { return b == 0 ? 0 : b == -1 ? (int64_t)(0 - (uint64_t)a) : a / b; }

BINARY(add, a + b, a + b)
BINARY(sub, a - b, a - b)
BINARY(mul, a * b, a * b)
BINARY(div, a / b, quotient(a, b))
BINARY(max, a != a ? a : b != b ? b : a > b ? a : b, a > b ? a : b)
BINARY(min, a != a ? a : b != b ? b : a < b ? a : b, a < b ? a : b)
BINARY(mod, fmodf(a, b), b == 0 ? a : a - b * quotient(a, b))
BINARY(pow, powf(a, b), no_integer())
BINARY(and, no_float(), a & b)
BINARY(or, no_float(), a | b)
BINARY(xor, no_float(), a ^ b)
BINARY(shl, no_float(), (int64_t)((uint64_t)a << (b & 63)))
BINARY(shr, no_float(), a >> (b & 63))

#define UNARY(name, in_floats, in_integers)                                                                   \
  static void row_##name(const instruction *i, rows *r) {                                                     \
    (void)i;                                                                                                  \
    if (is_float(r->rows[1].v->type)) {                                                                       \
      float x[PIECE], z[PIECE];                                                                               \
      PIECES(at, n) {                                                                                         \
        const float *a_ = floats(&r->rows[0], at, n, x);                                                      \
        float *to = float_target(&r->rows[1], at, z);                                                         \
        for (int64_t k = 0; k < n; k++) {                                                                     \
          const float a = a_[k];                                                                              \
          to[k] = in_floats;                                                                                  \
        }                                                                                                     \
        put_floats(&r->rows[1], at, n, to);                                                                   \
      }                                                                                                       \
    } else {                                                                                                  \
      int64_t x[PIECE], z[PIECE];                                                                             \
      PIECES(at, n) {                                                                                         \
        const int64_t *a_ = integers(&r->rows[0], at, n, x);                                                  \
        for (int64_t k = 0; k < n; k++) {                                                                     \
          const int64_t a = a_[k];                                                                            \
          z[k] = in_integers;                                                                                 \
        }                                                                                                     \
        put_integers(&r->rows[1], at, n, z);                                                                  \
      }                                                                                                       \
    }                                                                                                         \
  }                                                                                                           \
  void do_##name(const instruction *i, const view *const *o) { each_row(i, o, 2, o[1], row_##name); }

UNARY(exp, expf(a), no_integer())
UNARY(ln, logf(a), no_integer())
UNARY(sqrt, sqrtf(a), no_integer())
UNARY(rsqrt, 1.0f / sqrtf(a), no_integer())
UNARY(rec, 1.0f / a, no_integer())
UNARY(tanh, tanhf(a), no_integer())
UNARY(sin, sinf(a), no_integer())
UNARY(cos, cosf(a), no_integer())
UNARY(erf, erff(a), no_integer())
UNARY(abs, fabsf(a), a < 0 ? -a : a)
UNARY(relu, a != a ? a : a > 0 ? a : 0, a > 0 ? a : 0)
UNARY(not, no_float(), ~a)

// Compares two operands into bits: attribute 0 is the comparison, in the order of COMPARISONS in module/operations.py.
#define COMPARE(type, a_, b_)                                                                                 \
  switch (i->attributes[0]) {                                                                                 \
    case 0: for (int64_t k = 0; k < n; k++) z[k] = a_[k] == b_[k]; break;                                     \
    case 1: for (int64_t k = 0; k < n; k++) z[k] = a_[k] != b_[k]; break;                                     \
    case 2: for (int64_t k = 0; k < n; k++) z[k] = a_[k] < b_[k]; break;                                      \
    case 3: for (int64_t k = 0; k < n; k++) z[k] = a_[k] <= b_[k]; break;                                     \
    case 4: for (int64_t k = 0; k < n; k++) z[k] = a_[k] > b_[k]; break;                                      \
    default: for (int64_t k = 0; k < n; k++) z[k] = a_[k] >= b_[k];                                           \
  }

static void row_compare(const instruction *i, rows *r) {
  int64_t z[PIECE];
  const int in_floats = is_float(r->rows[0].v->type) || is_float(r->rows[1].v->type);
  PIECES(at, n) {
    if (in_floats) {
      float x[PIECE], y[PIECE];
      const float *a = floats(&r->rows[0], at, n, x), *b = floats(&r->rows[1], at, n, y);
      COMPARE(float, a, b)
    } else {
      int64_t x[PIECE], y[PIECE];
      const int64_t *a = integers(&r->rows[0], at, n, x), *b = integers(&r->rows[1], at, n, y);
      COMPARE(int64_t, a, b)
    }
    put_integers(&r->rows[2], at, n, z);
  }
}
void do_compare(const instruction *i, const view *const *o) { each_row(i, o, 3, o[2], row_compare); }

static void row_select(const instruction *i, rows *r) {
  (void)i;
  PIECES(at, n) {
    int64_t condition[PIECE];
    const int64_t *c = integers(&r->rows[0], at, n, condition);
    if (r->rows[3].v->type == F32) {
      float x[PIECE], y[PIECE], z[PIECE];
      const float *a = floats(&r->rows[1], at, n, x), *b = floats(&r->rows[2], at, n, y);
      float *to = float_target(&r->rows[3], at, z);
      for (int64_t k = 0; k < n; k++) to[k] = c[k] ? a[k] : b[k];
      put_floats(&r->rows[3], at, n, to);
    } else {
      for (int64_t k = 0; k < n; k++) put_raw(&r->rows[3], at + k, raw(&r->rows[c[k] ? 1 : 2], at + k));
    }
  }
}
void do_select(const instruction *i, const view *const *o) { each_row(i, o, 4, o[3], row_select); }

// Broadcasts of numbers and tiles, and copies: bits are kept.
static void row_broadcast(const instruction *i, rows *r) {
  (void)i;
  const row *from = &r->rows[0], *to = &r->rows[1];
  const size_t bytes = (size_t)element_bytes[(int)to->v->type];
  if (to->v->type == I1) {
    for (int64_t k = 0; k < r->n; k++) put_raw(to, k, raw(from, k));
  } else if (to->stride == 1 && from->stride == 1) {
    memmove(to->p, from->p, bytes * (size_t)r->n);
  } else if (to->stride == 1 && from->stride == 0 && r->n > 0) {
    memmove(to->p, from->p, bytes);
    for (size_t done = 1, all = (size_t)r->n; done < all; done *= 2)
      memcpy(to->p + done * bytes, to->p, bytes * (all - done < done ? all - done : done));
  } else {
    for (int64_t k = 0; k < r->n; k++) memcpy(to->p + k * to->stride * (int64_t)bytes, from->p + k * from->stride * (int64_t)bytes, bytes);
  }
}
void do_broadcast(const instruction *i, const view *const *o) { each_row(i, o, 2, o[1], row_broadcast); }
void do_copy(const instruction *i, const view *const *o) { each_row(i, o, 2, o[1], row_broadcast); }
void do_fill(const instruction *i, const view *const *o) { each_row(i, o, 2, o[1], row_broadcast); }

// Numbers that count up. Operands: the first, then the step along each axis.
void do_arange(const instruction *i, const view *const *o) {
  const view *to = o[i->reads];
  int64_t index[RANK] = {0};
  if (elements_of(to) == 0) return;
  for (;;) {
    int64_t value = o[0]->value, offset = 0;
    for (int axis = 0; axis < to->rank; axis++) {
      value += index[axis] * (1 + axis < i->reads ? o[1 + axis]->value : 1);
      offset += index[axis] * to->s[axis];
    }
    const row one = {.v = to, .p = to->p, .stride = 1, .bit = to->bit};
    if (is_float(to->type)) put_floats(&one, offset, 1, &(float){(float)value});
    else put_integers(&one, offset, 1, &value);
    int axis = to->rank - 1;
    while (axis >= 0 && ++index[axis] == to->n[axis]) index[axis--] = 0;
    if (axis < 0) return;
  }
}
