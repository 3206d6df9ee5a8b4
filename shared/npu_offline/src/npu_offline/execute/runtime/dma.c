// The DMA engine and scalar accesses to global memory.
//
// A compiled kernel calls npu_offline_copy / _move for DMA, and _touch before each scalar access to global memory. An argument
// index says which pointer argument an address was derived from: LOCAL is on-chip memory, UNKNOWN is one of several arguments,
// found by the address.
#include "runtime.h"

static int holds(const range *r, const char *low, const char *high) { return low >= r->low && high <= r->high; }

// The argument that [low, high) belongs to; does not return if it is outside.
static int locate(int argument, int access, const char *low, const char *high) {
  const launch *l = self->launch;
  if (argument == UNKNOWN) {
    for (int i = 0; i < l->pointers; i++)
      if (holds(&l->ranges[i], low, high)) return i;
  } else if (holds(&l->ranges[argument], low, high)) {
    return argument;
  }
  fail(OUT_OF_BOUNDS, argument, access, low, high - low);
  return LOCAL;
}

// Counts one DMA transfer; returns the argument in global memory that it is of, or LOCAL.
static int record_dma(int argument, int access, const char *low, const char *high, int64_t bytes, int64_t pieces) {
  if (argument == LOCAL) return LOCAL;
  argument = locate(argument, access, low, high);
  counts *c = &self->counts[argument];
  if (is_update() && access == LOAD) return argument;  // the chip's L2 reads, not the core
  if (is_update()) c->atomics++;
  c->transfers++;
  c->pieces += pieces;
  int length = 63 - __builtin_clzll((uint64_t)bytes);
  c->lengths[length < LENGTHS ? length : LENGTHS - 1]++;
  const int64_t row = self->launch->watched[argument].row_bytes;
  if (row && bytes / pieces % row == 0) c->whole_rows++;
  if (access == LOAD) c->read += bytes;
  else c->written += bytes;
  return argument;
}

void npu_offline_move(char *to, const char *from, int64_t bytes, int32_t to_argument, int32_t from_argument) {
  if (bytes <= 0) return;
  from_argument = record_dma(from_argument, LOAD, from, from + bytes, bytes, 1);
  to_argument = record_dma(to_argument, STORE, to, to + bytes, bytes, 1);
  if (self->launch->watch && from_argument != LOCAL) watch(from_argument, LOAD, from, bytes);
  if (self->launch->watch && to_argument != LOCAL) watch(to_argument, STORE, to, bytes);
  memmove(to, from, bytes);
}

static void bounds(const memref *m, int64_t rank, int64_t element, const char **low, const char **high) {
  const int64_t *n = m->sizes_strides, *stride = n + rank;
  *low = m->aligned + m->offset * element;
  *high = *low + element;
  for (int64_t i = 0; i < rank; i++) {
    int64_t reach = (n[i] - 1) * stride[i] * element;
    if (reach < 0) *low += reach;
    else *high += reach;
  }
}

static void record_tile(int argument, int access, const memref *m, int64_t rank, int64_t element, int64_t bytes) {
  const char *low, *high;
  int64_t piece;
  if (argument == LOCAL) return;
  bounds(m, rank, element, &low, &high);
  merge(m, rank, element, &piece);
  argument = record_dma(argument, access, low, high, bytes, bytes / piece);
  if (self->launch->watch) watch_tile(argument, access, m, rank, element);
}

static void copy_row(char *to, const char *from, int64_t n, int64_t to_step, int64_t from_step, int64_t run) {
#define COPY(size) for (int64_t i = 0; i < n; i++) memcpy(to + i * to_step, from + i * from_step, size)
  switch (run) {
    case 1: COPY(1); break;
    case 2: COPY(2); break;
    case 4: COPY(4); break;
    case 8: COPY(8); break;
    default: COPY(run);
  }
#undef COPY
}

void npu_offline_copy(int64_t element, const unranked *source, const unranked *target, int32_t from_argument,
                      int32_t to_argument) {
  int64_t rank = source->rank, total = 1, run = element, index[MAX_RANK] = {0};
  const int64_t *n = source->m->sizes_strides, *ss = n + rank, *ts = target->m->sizes_strides + rank;
  for (int64_t i = 0; i < rank; i++) total *= n[i] > 0 ? n[i] : 0;
  if (total == 0) return;
  record_tile(from_argument, LOAD, source->m, rank, element, total * element);
  record_tile(to_argument, STORE, target->m, rank, element, total * element);
  const char *from = source->m->aligned + source->m->offset * element;
  char *to = target->m->aligned + target->m->offset * element;
  while (rank > 0 && (n[rank - 1] == 1 || (ss[rank - 1] * element == run && ts[rank - 1] * element == run)))
    run *= n[--rank];
  if (rank == 0) {
    memcpy(to, from, run);
    return;
  }
  for (rank--;;) {  // rank is now the innermost strided dimension
    const char *f = from;
    char *t = to;
    for (int64_t i = 0; i < rank; i++) f += index[i] * ss[i] * element, t += index[i] * ts[i] * element;
    copy_row(t, f, n[rank], ts[rank] * element, ss[rank] * element, run);
    int64_t i = rank - 1;
    while (i >= 0 && ++index[i] == n[i]) index[i--] = 0;
    if (i < 0) return;
  }
}

void npu_offline_touch(const char *address, int64_t bytes, int32_t access, int32_t argument) {
  argument = locate(argument, access, address, address + bytes);
  counts *c = &self->counts[argument];
  c->scalars++;
  if (access == UPDATE) c->atomics++;
  if (access == LOAD) c->read += bytes;
  else c->written += bytes;
  if (self->launch->watch) watch(argument, access, address, bytes);
}
