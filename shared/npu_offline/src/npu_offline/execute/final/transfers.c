// DMA between global memory and a core, and atomic updates.
#include "rows.h"
#include "operations.h"

typedef struct { char *base, *aligned; int64_t offset, sizes_strides[2 * RANK]; } plain;

static void describe(plain *m, const view *v) {
  m->base = m->aligned = v->p;
  m->offset = 0;
  for (int axis = 0; axis < v->rank; axis++) m->sizes_strides[axis] = v->n[axis], m->sizes_strides[v->rank + axis] = v->s[axis];
}

void transfer(const view *from, const view *to) {
  if (from->rank != to->rank) unknown_text("a transfer's two sides have %d and %d axes", from->rank, to->rank);
  for (int axis = 0; axis < from->rank; axis++)
    if (from->n[axis] != to->n[axis]) fail_text("a transfer's two sides have sizes %ld and %ld", (long)from->n[axis], (long)to->n[axis]);
  if (from->type == I1) unknown_text("a transfer of bits");
  plain a, b;
  describe(&a, from), describe(&b, to);
  const unranked source = {from->rank, (memref *)&a}, target = {to->rank, (memref *)&b};
  npu_offline_copy(element_bytes[(int)from->type], &source, &target, from->space == GM ? from->owner : LOCAL, to->space == GM ? to->owner : LOCAL);
}

// Fills the padding that DMA writes beside the data, up to whole units of 32 bytes: with a number, or as unwritten memory.
static void pad(const view *v, const view *number, int64_t before) {
  const int bytes = element_bytes[(int)v->type];
  const char *origin = CORE->memory[(int)v->space];
  int64_t index[RANK] = {0};
  if (v->rank == 0 || v->s[v->rank - 1] != 1 || elements_of(v) == 0) return;
  const int last = v->rank - 1;
  for (;;) {
    char *row = v->p;
    for (int axis = 0; axis < last; axis++) row += index[axis] * v->s[axis] * bytes;
    char *end = row + v->n[last] * bytes, *whole = (char *)origin + ((end - origin + 31) & ~31);
    const char *most = origin + ((v->high - origin + 31) & ~31);
    const int is_last = last == 0 || index[last - 1] + 1 == v->n[last - 1];
    const int apart = is_last || v->s[last - 1] * bytes >= whole - row;
    for (char *p = end; apart && whole <= most && p + bytes <= whole; p += bytes) {
      if (number) memcpy(p, &number->value, (size_t)bytes);
      else if (checking()) memset(p, (int)(self->launch->poison & 0xff), (size_t)bytes);
    }
    for (int64_t k = 1; number && k <= before && row - k * bytes >= v->low; k++) memcpy(row - k * bytes, &number->value, (size_t)bytes);
    int axis = last - 1;
    while (axis >= 0 && ++index[axis] == v->n[axis]) index[axis--] = 0;
    if (axis < 0) return;
  }
}

// Operands: the tensor; then, if they are operands, the kind of padding, its value and the number of elements before the data.
// Attribute 0: the kind otherwise. Attributes 1 and 2: which operands are the value and the count.
void do_load(const instruction *i, const view *const *o) {
  const view *to = o[i->reads];
  const int64_t number = i->attributes[1], before = i->attributes[2];
  const int64_t kind = i->attributes[0] >= 0 ? i->attributes[0] : o[1]->value;
  transfer(o[0], to);
  if (to->space != UB || (kind != 0 && kind != 2)) {
    if (kind) unknown_text("%s pads in this way", i->name);
    return;
  }
  pad(to, kind == 2 && number ? o[number] : NULL, before ? o[before]->value : 0);
}

// Attribute 0: the kind of atomic update; -1: the second operand says it.
void do_store(const instruction *i, const view *const *o) {
  static perform *const updates[] = {NULL, do_add, do_max, do_min};
  const view *to = o[i->reads];
  const int64_t kind = i->attributes[0] >= 0 ? i->attributes[0] : o[1]->value;
  if (kind == 0) {
    transfer(o[0], to);
    return;
  }
  if (kind < 0 || kind > 3) unknown_text("%s updates in this way", i->name);
  view tile = *to;
  int64_t stride = 1;
  for (int axis = tile.rank - 1; axis >= 0; axis--) tile.s[axis] = stride, stride *= tile.n[axis];
  if (elements_of(&tile) == 0) return;
  tile.space = UB, tile.p = npu_offline_alloc(64, stride * element_bytes[(int)tile.type]);
  npu_offline_atomic_begin();
  transfer(to, &tile);
  updates[kind](i, (const view *const[]){&tile, o[0], &tile});
  transfer(&tile, to);
  npu_offline_atomic_end();
  npu_offline_free(tile.p);
}

void do_nothing(const instruction *i, const view *const *o) { (void)i, (void)o; }
