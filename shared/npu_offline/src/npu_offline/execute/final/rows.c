// See rows.h.
#include "rows.h"

static int64_t stride_of(const view *v, const view *shape, int axis) {
  if (v->rank == 0) return 0;
  if (v->rank != shape->rank) unknown_text("operands have %d and %d axes", v->rank, shape->rank);
  if (v->n[axis] == 1) return 0;
  if (v->n[axis] != shape->n[axis]) fail_text("operands have sizes %ld and %ld", (long)v->n[axis], (long)shape->n[axis]);
  return v->s[axis];
}

void each_row(const instruction *i, const view *const *o, int count, const view *shape, each *what) {
  int64_t strides[OPERANDS][RANK], n[RANK], index[RANK] = {0};
  int rank = 0;
  if (elements_of(shape) == 0) return;
  for (int axis = 0; axis < shape->rank; axis++) {
    if (shape->n[axis] == 1 && axis + 1 < shape->rank) continue;
    int64_t now[OPERANDS];
    int follows = rank > 0;
    for (int k = 0; k < count; k++) {
      now[k] = stride_of(o[k], shape, axis);
      follows = follows && strides[k][rank - 1] == now[k] * shape->n[axis];
    }
    if (follows) {
      n[rank - 1] *= shape->n[axis];
    } else {
      n[rank] = shape->n[axis];
      rank++;
    }
    for (int k = 0; k < count; k++) strides[k][rank - 1] = now[k];
  }
  if (rank == 0) {
    n[0] = 1, rank = 1;
    for (int k = 0; k < count; k++) strides[k][0] = 0;
  }
  rows r = {.count = count, .n = n[rank - 1]};
  for (;;) {
    for (int k = 0; k < count; k++) {
      int64_t offset = 0;
      for (int axis = 0; axis + 1 < rank; axis++) offset += index[axis] * strides[k][axis];
      row *one = &r.rows[k];
      *one = (row){.v = o[k], .stride = strides[k][rank - 1]};
      if (o[k]->space == NUMBER) one->p = (char *)&o[k]->value;
      else if (o[k]->type == I1) one->p = o[k]->p, one->bit = o[k]->bit + offset;
      else one->p = o[k]->p + offset * element_bytes[(int)o[k]->type];
    }
    what(i, &r);
    int axis = rank - 2;
    while (axis >= 0 && ++index[axis] == n[axis]) index[axis--] = 0;
    if (axis < 0) return;
  }
}

#define GET(type, expression)                                          \
  for (int64_t k = 0; k < n; k++) {                                    \
    type x;                                                            \
    memcpy(&x, p + k * step, sizeof x);                                \
    piece[k] = (expression);                                           \
  }                                                                    \
  break

const float *floats(const row *r, int64_t at, int64_t n, float *piece) {
  const int type = r->v->type;
  if (type == F32 && r->stride == 1) return (const float *)r->p + at;
  const int64_t step = r->stride * element_bytes[type];
  const char *p = r->p + at * step;
  if (r->stride == 0 && n > 1) {
    const float one = *floats(r, at, 1, piece);
    for (int64_t k = 0; k < n; k++) piece[k] = one;
    return piece;
  }
  switch (type) {
    case F32: GET(float, x);
    case F16:
      if (step == 2) {
        for (int64_t k = 0; k < n; k++) piece[k] = half_to_float(((const uint16_t *)p)[k]);
        break;
      }
      GET(uint16_t, half_to_float(x));
    case BF16:
      if (step == 2) {
        for (int64_t k = 0; k < n; k++) piece[k] = bfloat_to_float(((const uint16_t *)p)[k]);
        break;
      }
      GET(uint16_t, bfloat_to_float(x));
    default: {
      int64_t whole[PIECE];
      const int64_t *x = integers(r, at, n, whole);
      for (int64_t k = 0; k < n; k++) piece[k] = (float)x[k];
    }
  }
  return piece;
}

const int64_t *integers(const row *r, int64_t at, int64_t n, int64_t *piece) {
  const int type = r->v->type;
  if (type == I64 && r->stride == 1) return (const int64_t *)r->p + at;
  const int64_t step = r->stride * element_bytes[type];
  const char *p = r->p + at * step;
  switch (type) {
    case I64: GET(int64_t, x);
    case I32: GET(int32_t, x);
    case I16: GET(int16_t, x);
    case I8: GET(int8_t, x);
    case U32: GET(uint32_t, x);
    case U16: GET(uint16_t, x);
    case U8: GET(uint8_t, x);
    case I1:
      for (int64_t k = 0; k < n; k++) {
        const int64_t bit = r->bit + (at + k) * r->stride;
        piece[k] = (uint8_t)r->p[bit >> 3] >> (bit & 7) & 1;
      }
      break;
    default: unknown_text("numbers of type %d are not integers", type);
  }
  return piece;
}

float *float_target(const row *r, int64_t at, float *piece) {
  return r->v->type == F32 && r->stride == 1 ? (float *)r->p + at : piece;
}

#define PUT(type, expression)                                          \
  for (int64_t k = 0; k < n; k++) {                                    \
    type x = (expression);                                             \
    memcpy(p + k * step, &x, sizeof x);                                \
  }                                                                    \
  break

void put_floats(const row *r, int64_t at, int64_t n, const float *from) {
  const int type = r->v->type;
  const int64_t step = r->stride * element_bytes[type];
  char *p = r->p + at * step;
  if (type == F32 && (const char *)from == p) return;  // computed in place
  switch (type) {
    case F32: PUT(float, from[k]);
    case F16:
      if (step == 2) {
        for (int64_t k = 0; k < n; k++) ((uint16_t *)p)[k] = float_to_half(from[k]);
        break;
      }
      PUT(uint16_t, float_to_half(from[k]));
    case BF16:
      if (step == 2) {
        for (int64_t k = 0; k < n; k++) ((uint16_t *)p)[k] = float_to_bfloat(from[k]);
        break;
      }
      PUT(uint16_t, float_to_bfloat(from[k]));
    default: unknown_text("floating-point numbers are written as type %d", type);
  }
}

void put_integers(const row *r, int64_t at, int64_t n, const int64_t *from) {
  const int type = r->v->type;
  const int64_t step = r->stride * element_bytes[type];
  char *p = r->p + at * step;
  switch (type) {
    case I64: PUT(int64_t, from[k]);
    case I32: case U32: PUT(uint32_t, (uint32_t)from[k]);
    case I16: case U16: PUT(uint16_t, (uint16_t)from[k]);
    case I8: case U8: PUT(uint8_t, (uint8_t)from[k]);
    case I1:
      for (int64_t k = 0; k < n; k++) {
        const int64_t bit = r->bit + (at + k) * r->stride;
        char *byte = &r->p[bit >> 3];
        *byte = (char)((*byte & ~(1 << (bit & 7))) | (int)(from[k] & 1) << (bit & 7));
      }
      break;
    default: unknown_text("integers are written as type %d", type);
  }
}

int64_t raw(const row *r, int64_t at) {
  if (r->v->type == I1) {
    const int64_t bit = r->bit + at * r->stride;
    return (uint8_t)r->p[bit >> 3] >> (bit & 7) & 1;
  }
  int64_t bits = 0;
  const int bytes = element_bytes[(int)r->v->type];
  memcpy(&bits, r->p + at * r->stride * bytes, (size_t)bytes);
  return bits;
}

void put_raw(const row *r, int64_t at, int64_t bits) {
  if (r->v->type == I1) {
    const int64_t bit = r->bit + at * r->stride;
    char *byte = &r->p[bit >> 3];
    *byte = (char)((*byte & ~(1 << (bit & 7))) | (int)(bits & 1) << (bit & 7));
    return;
  }
  const int bytes = element_bytes[(int)r->v->type];
  memcpy(r->p + at * r->stride * bytes, &bits, (size_t)bytes);
}
