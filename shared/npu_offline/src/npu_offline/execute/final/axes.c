// Instructions along an axis: reductions, argmax and argmin, cumulative sums, sorting, flips, transposes, interleaving.
#include "rows.h"
#include "operations.h"

enum { SUM, PROD, MAX, MIN, ANY, ALL, XORI, ORI, ANDI };

static float combined(float a, float b, int64_t kind) {
  switch (kind) {
    case SUM: return a + b;
    case PROD: return a * b;
    case MAX: return a != a ? a : b != b ? b : a > b ? a : b;
    default: return a != a ? a : b != b ? b : a < b ? a : b;
  }
}

static int64_t combined_integers(int64_t a, int64_t b, int64_t kind) {
  switch (kind) {
    case SUM: return a + b;
    case PROD: return a * b;
    case MAX: return a > b ? a : b;
    case MIN: return a < b ? a : b;
    case XORI: return a ^ b;
    case ANY: case ORI: return a | b;
    default: return a & b;
  }
}

// A view with the reduced axes (bits of `axes`) of size one, and one that walks over these alone.
static void split(const view *v, int64_t axes, view *kept, view *reduced) {
  *kept = *v, *reduced = *v;
  for (int axis = 0; axis < v->rank; axis++) (axes >> axis & 1 ? kept : reduced)->n[axis] = 1;
}

typedef struct { view one; int64_t index[RANK]; } walk;

// Steps to the next element of a view; false after the last one.
static int next(walk *w, const view *over) {
  int axis = over->rank - 1;
  while (axis >= 0 && ++w->index[axis] == over->n[axis]) w->index[axis--] = 0;
  return axis >= 0;
}

static int64_t offset_of(const walk *w, const view *v) {
  int64_t offset = 0;
  for (int axis = 0; axis < v->rank; axis++) offset += w->index[axis] * (v->n[axis] == 1 ? 0 : v->s[axis]);
  return offset;
}

static row at_offset(const view *v, int64_t offset, int64_t stride) {
  row r = {.v = v, .p = v->p, .stride = stride, .bit = v->bit};
  if (v->type == I1) r.bit += offset;
  else r.p += offset * element_bytes[(int)v->type];
  return r;
}

// Reduces the elements of the innermost reduced axis into the result so far.
static void run(const row *from, int64_t n, int64_t kind, int is_first, float *f, int64_t *w) {
  for (int64_t at = 0; at < n; at += PIECE) {
    const int64_t count = n - at < PIECE ? n - at : PIECE;
    if (is_float(from->v->type)) {
      float piece[PIECE];
      const float *x = floats(from, at, count, piece);
      float sum = *f;
      int64_t k = 0;
      if (is_first && at == 0) sum = kind == SUM ? 0.0f : x[k++];
      if (kind == SUM) for (; k < count; k++) sum += x[k];
      else for (; k < count; k++) sum = combined(sum, x[k], kind);
      *f = sum;
    } else {
      int64_t piece[PIECE];
      const int64_t *x = integers(from, at, count, piece);
      int64_t k = 0;
      if (is_first && at == 0) *w = x[k++];
      for (; k < count; k++) *w = combined_integers(*w, x[k], kind);
    }
  }
}

// The innermost axis is kept: it is contiguous, and is reduced as a whole row at a time.
static void over_rows(const view *from, const view *to, int64_t axes, int64_t kind) {
  const int last = from->rank - 1;
  view kept, reduced;
  split(from, axes, &kept, &reduced);
  const int64_t n = from->n[last];
  kept.n[last] = 1;
  walk outer = {{0}, {0}};
  do {
    walk inner = {{0}, {0}};
    const row target = at_offset(to, offset_of(&outer, to), to->n[last] == 1 ? 0 : to->s[last]);
    int is_first = 1;
    float *sums = malloc(sizeof(float) * (size_t)n);
    do {
      const row source = at_offset(from, offset_of(&outer, from) + offset_of(&inner, from), from->s[last]);
      for (int64_t at = 0; at < n; at += PIECE) {
        const int64_t count = n - at < PIECE ? n - at : PIECE;
        float piece[PIECE];
        const float *x = floats(&source, at, count, piece);
        float *s = sums + at;
        if (is_first) for (int64_t k = 0; k < count; k++) s[k] = kind == SUM ? 0.0f + x[k] : x[k];
        else if (kind == SUM) for (int64_t k = 0; k < count; k++) s[k] += x[k];
        else for (int64_t k = 0; k < count; k++) s[k] = combined(s[k], x[k], kind);
      }
      is_first = 0;
    } while (next(&inner, &reduced));
    put_floats(&target, 0, n, sums);
    free(sums);
  } while (next(&outer, &kept));
}

void do_reduce(const instruction *i, const view *const *o) {
  const view *from = o[0], *to = o[i->reads];
  const int64_t axes = i->attributes[2], kind = i->attributes[0];
  if (from->rank != to->rank) unknown_text("%s: operands have %d and %d axes", i->name, from->rank, to->rank);
  if (elements_of(from) == 0) return;
  const int last = from->rank - 1;
  if (!(axes >> last & 1) && is_float(from->type)) {
    over_rows(from, to, axes, kind);
    return;
  }
  view kept, reduced;
  split(from, axes, &kept, &reduced);
  const int inner_axis = axes >> last & 1 ? last : 31 - __builtin_clz((unsigned)axes);
  const int64_t n = from->n[inner_axis];
  reduced.n[inner_axis] = 1;
  walk outer = {{0}, {0}};
  do {
    walk inner = {{0}, {0}};
    float sum = 0;
    int64_t whole = 0;
    int is_first = 1;
    do {
      const row source = at_offset(from, offset_of(&outer, from) + offset_of(&inner, from), from->s[inner_axis]);
      run(&source, n, kind, is_first, &sum, &whole);
      is_first = 0;
    } while (next(&inner, &reduced));
    const row target = at_offset(to, offset_of(&outer, to), 0);
    if (is_float(to->type)) put_floats(&target, 0, 1, &sum);
    else put_integers(&target, 0, 1, &whole);
  } while (next(&outer, &kept));
}

// Calls `line` for each line along the axis, with the rows of all operands and the number of elements.
static void each_line(const instruction *i, const view *const *o, int count, void (*line)(const instruction *, const row *, int64_t)) {
  const int axis = 31 - __builtin_clz((unsigned)i->attributes[2]);
  view kept, reduced;
  split(o[0], i->attributes[2], &kept, &reduced);
  if (elements_of(o[0]) == 0) return;
  walk outer = {{0}, {0}};
  do {
    row rows[OPERANDS];
    for (int k = 0; k < count; k++) {
      if (o[k]->rank != o[0]->rank) unknown_text("%s: operands have %d and %d axes", i->name, o[k]->rank, o[0]->rank);
      rows[k] = at_offset(o[k], offset_of(&outer, o[k]), o[k]->s[axis]);
    }
    line(i, rows, o[0]->n[axis]);
  } while (next(&outer, &kept));
}

static float one_float(const row *r, int64_t at) {
  float piece[1];
  return *floats(r, at, 1, piece);
}

static int64_t one_integer(const row *r, int64_t at) {
  int64_t piece[1];
  return *integers(r, at, 1, piece);
}

// The extreme and its position. Attribute 0: MAX or MIN. Attribute 3: of equal extremes the last one counts, not the first.
static void line_arg(const instruction *i, const row *r, int64_t n) {
  int64_t best = 0;
  for (int64_t k = 1; k < n; k++) {
    int better, equal;
    if (is_float(r[0].v->type)) {
      const float x = one_float(&r[0], k), y = one_float(&r[0], best);
      better = i->attributes[0] == MAX ? x > y : x < y, equal = x == y;
    } else {
      const int64_t x = one_integer(&r[0], k), y = one_integer(&r[0], best);
      better = i->attributes[0] == MAX ? x > y : x < y, equal = x == y;
    }
    if (better || (equal && i->attributes[3])) best = k;
  }
  put_raw(&r[1], 0, raw(&r[0], best));
  put_raw(&r[2], 0, best);
}
void do_arg(const instruction *i, const view *const *o) { each_line(i, o, 3, line_arg); }

static void line_accumulate(const instruction *i, const row *r, int64_t n) {
  float sum = 0;
  int64_t whole = 0;
  for (int64_t step = 0; step < n; step++) {
    const int64_t k = i->attributes[3] ? n - 1 - step : step;
    if (is_float(r[1].v->type)) {
      const float x = one_float(&r[0], k);
      sum = step ? combined(sum, x, i->attributes[0]) : x;
      put_floats(&r[1], k, 1, &sum);
    } else {
      const int64_t x = one_integer(&r[0], k);
      whole = step ? combined_integers(whole, x, i->attributes[0]) : x;
      put_integers(&r[1], k, 1, &whole);
    }
  }
}
void do_accumulate(const instruction *i, const view *const *o) { each_line(i, o, 2, line_accumulate); }

static void line_flip(const instruction *i, const row *r, int64_t n) {
  (void)i;
  int64_t *bits = malloc(sizeof(int64_t) * (size_t)n);
  for (int64_t k = 0; k < n; k++) bits[k] = raw(&r[0], k);
  for (int64_t k = 0; k < n; k++) put_raw(&r[1], n - 1 - k, bits[k]);
  free(bits);
}
void do_flip(const instruction *i, const view *const *o) { each_line(i, o, 2, line_flip); }

// Along the last axis the elements whose positions the second operand has.
void do_gather(const instruction *i, const view *const *o) {
  const view *to = o[i->reads];
  const int last = to->rank - 1;
  if (o[0]->rank != to->rank || o[1]->rank != to->rank) unknown_text("%s: operands of different axes", i->name);
  if (elements_of(to) == 0) return;
  walk w = {{0}, {0}};
  do {
    const row place = at_offset(o[1], offset_of(&w, o[1]), 0), target = at_offset(to, offset_of(&w, to), 0);
    const int64_t position = one_integer(&place, 0);
    if (position < 0 || position >= o[0]->n[last])
      fail_text("%s#%d: position %ld of %ld elements", i->name, i->number, (long)position, (long)o[0]->n[last]);
    walk source = w;
    source.index[last] = position;
    const row from = at_offset(o[0], offset_of(&source, o[0]), 0);
    put_raw(&target, 0, raw(&from, 0));
  } while (next(&w, to));
}

typedef struct { double value; int64_t bits; } sorted;
static int ascending(const void *a, const void *b) {
  const double x = ((const sorted *)a)->value, y = ((const sorted *)b)->value;
  return (x > y) - (x < y);
}
static int descending(const void *a, const void *b) { return ascending(b, a); }

static void sort_line(const instruction *i, const row *source, const row *target, int64_t n, int down) {
  sorted *all = malloc(sizeof(sorted) * (size_t)(n + 1));
  for (int64_t k = 0; k < n; k++) {
    all[k] = (sorted){is_float(source->v->type) ? (double)one_float(source, k) : (double)one_integer(source, k), raw(source, k)};
    if (all[k].value != all[k].value) {
      free(all);
      fail_text("%s#%d: number %ld is NaN, and nothing says where NaN comes in a sorted row", i->name, i->number, (long)k);
    }
  }
  qsort(all, (size_t)n, sizeof *all, down ? descending : ascending);
  for (int64_t k = 0; k < n; k++) put_raw(target, k, all[k].bits);
  free(all);
}

// Attribute 3: descending order; -1: an operand says it.
void do_sort(const instruction *i, const view *const *o) {
  const view *from = o[0], *to = o[i->reads];
  const int down = (int)(i->attributes[3] < 0 ? o[1]->value & 1 : i->attributes[3]);
  const int last = from->rank - 1;
  if (to->rank != from->rank) unknown_text("%s: operands have %d and %d axes", i->name, from->rank, to->rank);
  if (elements_of(from) == 0) return;
  view kept, line;
  split(from, 1 << last, &kept, &line);
  walk outer = {{0}, {0}};
  do {
    const row source = at_offset(from, offset_of(&outer, from), from->s[last]);
    const row target = at_offset(to, offset_of(&outer, to), to->s[last]);
    sort_line(i, &source, &target, from->n[last], down);
  } while (next(&outer, &kept));
}

// Axis k of the result is axis attributes[3 + k] of the operand.
void do_transpose(const instruction *i, const view *const *o) {
  view turned = *o[0];
  for (int axis = 0; axis < turned.rank; axis++) {
    turned.n[axis] = o[0]->n[i->attributes[3 + axis]];
    turned.s[axis] = o[0]->s[i->attributes[3 + axis]];
  }
  walk w = {{0}, {0}};
  if (elements_of(o[1]) == 0) return;
  do {
    int64_t from = 0, to = 0;
    for (int axis = 0; axis < turned.rank; axis++) from += w.index[axis] * turned.s[axis], to += w.index[axis] * o[1]->s[axis];
    const row source = at_offset(o[0], from, 0), target = at_offset(o[1], to, 0);
    put_raw(&target, 0, raw(&source, 0));
  } while (next(&w, o[1]));
}

// Elements of the operands in turns.
void do_interleave(const instruction *i, const view *const *o) {
  const view *to = o[i->reads];
  for (int part = 0; part < i->reads; part++) {
    const row source = at_offset(o[part], 0, o[part]->s[0]), target = at_offset(to, part * to->s[0], to->s[0] * i->reads);
    for (int64_t k = 0; k < o[part]->n[0]; k++) put_raw(&target, k, raw(&source, k));
  }
}

// Along the last axis every n-th element, starting with the one that attribute 4 names; n is the ratio of both sizes.
void do_deinterleave(const instruction *i, const view *const *o) {
  const view *to = o[i->reads];
  const int last = to->rank - 1;
  if (o[0]->rank != to->rank) unknown_text("%s of %d axes into %d", i->name, o[0]->rank, to->rank);
  if (elements_of(to) == 0) return;
  const int64_t ratio = o[0]->n[last] / to->n[last];
  walk w = {{0}, {0}};
  do {
    int64_t from = i->attributes[4] * o[0]->s[last], at = 0;
    for (int axis = 0; axis < to->rank; axis++) {
      from += w.index[axis] * o[0]->s[axis] * (axis == last ? ratio : 1);
      at += w.index[axis] * to->s[axis];
    }
    const row source = at_offset(o[0], from, 0), target = at_offset(to, at, 0);
    put_raw(&target, 0, raw(&source, 0));
  } while (next(&w, to));
}
