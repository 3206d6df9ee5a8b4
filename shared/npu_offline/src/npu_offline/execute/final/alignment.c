// Where vector instructions and DMA touch the Unified Buffer: the chip does it in blocks of 32 bytes.
#include "machine.h"

enum { BLOCK_BITS = 256 };

// The first stride, in bits, between contiguous pieces of a view that is no whole number of blocks; 0 if there is none.
static int64_t uneven_stride(const view *v) {
  const int64_t unit = v->type == I1 ? 1 : element_bytes[(int)v->type] * 8;
  int64_t piece = unit;
  int rank = v->rank;
  while (rank > 0 && (v->n[rank - 1] == 1 || v->s[rank - 1] * unit == piece)) piece *= v->n[--rank];
  for (int axis = 0; axis < rank; axis++)
    if (v->n[axis] > 1 && v->s[axis] * unit % BLOCK_BITS) return v->s[axis] * unit;
  return 0;
}

void check_alignment(const instruction *i, const view *const *o) {
  char what[200];
  if (i->pipe != V && i->pipe != MTE2 && i->pipe != MTE3) return;
  for (int k = 0; k < i->reads + i->writes + i->temporaries; k++) {
    const view *v = o[k];
    if (v->space != UB || elements_of(v) == 0) continue;
    const int64_t start = (v->p - CORE->memory[UB]) * 8 + v->bit, stride = uneven_stride(v);
    if (start % BLOCK_BITS)
      note("alignment|%s#%d: %s begins at byte %g of the Unified Buffer, no multiple of 32", i->name, i->number, named(v, what, sizeof what), (double)start / 8);
    if (stride)
      note("alignment|%s#%d: rows of %s are %g bytes apart, no multiple of 32", i->name, i->number, named(v, what, sizeof what), (double)stride / 8);
  }
}
