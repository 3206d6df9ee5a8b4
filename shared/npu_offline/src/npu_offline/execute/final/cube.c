// Matrix products: operands in L1 as fractals of 16 rows and 32 bytes, results in L0C as fractals of 16 x 16.
//
// On the chip one product is many instructions, in an order that the compiler's library fixes. Here it is three: MTE1 takes both
// operands out of L1, then M multiplies them. Between them are the product's own flags and one flag of this file.
#include "rows.h"
#include "operations.h"

typedef struct { float *a, *b; int64_t room; } taken;
static __thread taken operands_of_product;

static int64_t number(const view *v) {
  int64_t piece[1];
  const row r = {.v = v, .p = (char *)&v->value};
  return *integers(&r, 0, 1, piece);
}

// An element of a matrix in fractals: [columns / c, rows / r, r, c], or transposed.
static char *element(const view *v, int64_t row_, int64_t column) {
  const int64_t r = v->n[2], c = v->n[3];
  const int64_t at = column / c * v->s[0] + row_ / r * v->s[1] + row_ % r * v->s[2] + column % c * v->s[3];
  return v->p + at * element_bytes[(int)v->type];
}

// Elements of a row of a matrix in fractals from a column on, within the fractal that this column is in.
static const float *fractal(const view *v, int64_t row_, int64_t column, int64_t n, float *piece) {
  const row one = {.v = v, .p = element(v, row_, column), .stride = v->s[3]};
  if (v->type != I8) return floats(&one, 0, n, piece);
  for (int64_t c = 0; c < n; c++) piece[c] = *(const int8_t *)(one.p + c * one.stride);
  return piece;
}

static float *room_for(int64_t count) {
  taken *t = &operands_of_product;
  if (count > t->room) {
    t->a = realloc(t->a, sizeof(float) * (size_t)count);
    t->b = realloc(t->b, sizeof(float) * (size_t)count);
    t->room = count;
  }
  return t->a;
}

// The rows and columns that fit in the fractals of both operands.
static int64_t largest(const view *v) { return v->n[0] * v->n[1] * v->n[2] * v->n[3]; }

static void take(const instruction *i, const view *v, float *to, int is_turned) {
  if (v->rank != 4) unknown_text("%s: an operand of %d axes", i->name, v->rank);
  const int64_t rows = v->n[1] * v->n[2], wide = v->n[3], columns = v->n[0] * wide;
  float piece[PIECE];
  if (wide > PIECE) unknown_text("%s: fractals of %ld columns", i->name, (long)wide);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c += wide) {
      const float *from = fractal(v, r, c, wide, piece);
      if (!is_turned) memcpy(to + r * columns + c, from, sizeof(float) * (size_t)wide);
      else for (int64_t k = 0; k < wide; k++) to[(c + k) * rows + r] = from[k];
    }
}

// Operands of take_a and take_b: the matrix, and the other matrix for its size alone (attribute 6). Attribute 1: transposed.
void do_take_a(const instruction *i, const view *const *o) {
  room_for(largest(o[0]) + largest(o[1]));
  take(i, o[0], operands_of_product.a, (int)i->attributes[1]);
}
void do_take_b(const instruction *i, const view *const *o) {
  room_for(largest(o[0]) + largest(o[1]));
  take(i, o[0], operands_of_product.b, (int)i->attributes[1]);
}

// Rows of a times columns of b into L0C, whose elements have this type; float holds every operand exactly.
#define MULTIPLY(type)                                                                          \
  static void multiply_##type(const view *c, const int64_t *sizes, const int64_t *pitches, int overwritten) { \
    const int64_t m = sizes[0], k = sizes[1], n = sizes[2];                                      \
    type *sums = malloc(sizeof(type) * (size_t)(n + 1));                                         \
    for (int64_t r = 0; r < m; r++) {                                                            \
      const float *a = operands_of_product.a + r * pitches[0];                                   \
      type *at = (type *)c->p + r / c->n[2] * c->s[1] + r % c->n[2] * c->s[2];                   \
      for (int64_t q = 0; q < n; q++) sums[q] = overwritten ? 0 : at[q / c->n[3] * c->s[0] + q % c->n[3] * c->s[3]]; \
      for (int64_t p = 0; p < k; p++) {                                                          \
        const type x = (type)a[p];                                                               \
        const float *b = operands_of_product.b + p * pitches[1];                                 \
        for (int64_t q = 0; q < n; q++) sums[q] += x * (type)b[q];                               \
      }                                                                                          \
      for (int64_t q = 0; q < n; q++) at[q / c->n[3] * c->s[0] + q % c->n[3] * c->s[3]] = sums[q]; \
    }                                                                                            \
    free(sums);                                                                                  \
  }
MULTIPLY(float)
MULTIPLY(int32_t)

// Operands: a, b, whether the results are overwritten, m, k, n, the results. Attributes 1 and 2: a and b are transposed.
void do_multiply(const instruction *i, const view *const *o) {
  const view *c = o[i->reads];
  const int64_t sizes[] = {number(o[3]), number(o[4]), number(o[5])};
  const int64_t pitches[] = {
    i->attributes[1] ? o[0]->n[1] * o[0]->n[2] : o[0]->n[0] * o[0]->n[3],
    i->attributes[2] ? o[1]->n[1] * o[1]->n[2] : o[1]->n[0] * o[1]->n[3],
  };
  const int overwritten = (int)number(o[2]) & 1, of_integers = o[0]->type == I8 && o[1]->type == I8;
  if (c->type == F32 && !of_integers) multiply_float(c, sizes, pitches, overwritten);
  else if (c->type == I32 && of_integers) multiply_int32_t(c, sizes, pitches, overwritten);
  else unknown_text("%s: products of these types", i->name);
}

static void wait_if(int source, int target, int64_t event) { if (event >= 0) wait_flag(source, target, event); }
static void set_if(int source, int target, int64_t event) { if (event >= 0) set_flag(source, target, event); }

// The three instructions; `i` is the product, which take_a and take_b follow in the module's table.
void issue_product(const instruction *i, const view *const *o, const int64_t *flags) {
  const int64_t none[] = {-1, -1, -1, -1};
  if (!flags) flags = none;
  wait_if(MTE2, MTE1, flags[0]);
  issue(i + 1, (const view *const[]){o[0], o[1]});
  set_if(MTE1, MTE2, flags[2]);
  wait_if(MTE2, MTE1, flags[1]);
  issue(i + 2, (const view *const[]){o[1], o[0]});
  set_if(MTE1, MTE2, flags[3]);
  set_flag(MTE1, M, OWN_EVENT);
  wait_flag(MTE1, M, OWN_EVENT);
  barrier(M);  // products into one accumulator run in order
  issue(i, o);
  set_flag(M, MTE1, OWN_EVENT);  // the halves of L0 that it used are free again
  wait_flag(M, MTE1, OWN_EVENT);
}

static view tile_of(const view *like, int64_t rows, int64_t columns, int type) {
  view t = {.space = UB, .type = (int8_t)type, .rank = 2, .n = {rows, columns}, .s = {columns, 1}, .owner = like->owner};
  t.p = t.low = malloc((size_t)(rows * columns * element_bytes[type] + 1));
  t.high = t.p + rows * columns * element_bytes[type];
  return t;
}

// A matrix from global memory into fractals in L1; the last columns are padded with zeros to 32 bytes.
void do_nd2nz(const instruction *i, const view *const *o) {
  const view *from = o[0], *to = o[i->reads];
  if (from->rank != 2 || to->rank != 4) unknown_text("%s of %d into %d axes", i->name, from->rank, to->rank);
  const int64_t rows = from->n[0], columns = from->n[1], r = to->n[2], c = to->n[3];
  const size_t bytes = (size_t)element_bytes[(int)from->type];
  if (rows > to->n[1] * r || columns > to->n[0] * c) fail_text("%s of %ld x %ld into too few fractals", i->name, (long)rows, (long)columns);
  view tile = tile_of(from, rows, columns, from->type);
  transfer(from, &tile);
  if (to->s[3] != 1) unknown_text("%s into fractals whose rows have strides", i->name);
  for (int64_t row_ = 0; row_ < rows; row_++)
    for (int64_t column = 0; column < columns; column += c) {
      char *at = element(to, row_, column);
      const int64_t n = columns - column < c ? columns - column : c;
      memcpy(at, tile.p + (row_ * columns + column) * (int64_t)bytes, (size_t)n * bytes);
      memset(at + n * (int64_t)bytes, 0, (size_t)(c - n) * bytes);
    }
  free(tile.low);
}

// Results from fractals in L0C to global memory, cast to its type.
void do_fixpipe(const instruction *i, const view *const *o) {
  const view *from = o[0], *to = o[i->reads];
  const int integers = from->type == I32 && to->type == I32;
  if (from->rank != 4 || to->rank != 2 || !(integers || (from->type == F32 && is_float(to->type))))
    unknown_text("%s from %d into %d axes, of these types", i->name, from->rank, to->rank);
  const int64_t rows = to->n[0], columns = to->n[1], wide = from->n[3];
  if (from->s[3] != 1 || wide > PIECE) unknown_text("%s of fractals whose rows have strides, or %ld columns", i->name, (long)wide);
  view tile = tile_of(to, rows, columns, to->type);
  const row out = {.v = &tile, .p = tile.p, .stride = 1};
  float piece[PIECE];
  for (int64_t row_ = 0; row_ < rows; row_++)
    for (int64_t column = 0; column < columns; column += wide) {
      const int64_t number_ = row_ * columns + column, n = columns - column < wide ? columns - column : wide;
      if (integers) memcpy(tile.p + number_ * 4, element(from, row_, column), (size_t)n * 4);
      else put_floats(&out, number_, n, fractal(from, row_, column, n, piece));
    }
  transfer(&tile, to);
  free(tile.low);
}
