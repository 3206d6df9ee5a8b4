// The machine that emulated kernels run on: a grid runner, the DMA engine, scalar accesses and on-chip memory.
//
// A compiled kernel calls npu_offline_copy / _move (DMA), _touch (before each scalar access to global memory),
// _alloc / _free (on-chip tiles) and _atomic_begin / _end. An argument index tells which pointer argument an address was
// derived from: LOCAL is on-chip memory, UNKNOWN is one of several arguments and is looked up by address.
#include "runtime.h"

__thread worker *self;
static pthread_mutex_t atomics = PTHREAD_MUTEX_INITIALIZER, arenas_lock = PTHREAD_MUTEX_INITIALIZER;
static arena *idle_arenas;

void fail_beside(int reason, int argument, int access, const char *address, int64_t bytes, int other_access,
                 int64_t other) {
  if (!atomic_exchange(&self->launch->failed, 1)) {
    *self->launch->fault = (fault){reason, argument, access, (int64_t)address, bytes,
                                   {self->program[0], self->program[1], self->program[2]}, other_access, other};
  }
  if (self->atomic) {
    self->atomic = 0;
    pthread_mutex_unlock(&atomics);
  }
  longjmp(self->leave, 1);
}

void fail(int reason, int argument, int access, const char *address, int64_t bytes) {
  fail_beside(reason, argument, access, address, bytes, 0, 0);
}

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

int64_t merge(const memref *m, int64_t rank, int64_t element, int64_t *piece) {
  const int64_t *n = m->sizes_strides, *stride = n + rank;
  for (*piece = element; rank > 0 && (n[rank - 1] == 1 || stride[rank - 1] * element == *piece);) *piece *= n[--rank];
  return rank;
}

// Counts one DMA transfer; returns the argument in global memory that it is of, or LOCAL.
static int record_dma(int argument, int access, const char *low, const char *high, int64_t bytes, int64_t pieces) {
  if (argument == LOCAL) return LOCAL;
  argument = locate(argument, access, low, high);
  counts *c = &self->counts[argument];
  if (self->atomic && access == LOAD) return argument;  // the chip's L2 reads, not the core
  if (self->atomic) c->atomics++;
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

void npu_offline_atomic_begin(void) {
  pthread_mutex_lock(&atomics);
  self->atomic = 1;
}

void npu_offline_atomic_end(void) {
  self->atomic = 0;
  pthread_mutex_unlock(&atomics);
}

void *npu_offline_alloc(int64_t alignment, int64_t bytes) {
  (void)alignment;  // always 64
  int64_t size_class = bytes <= 64 ? 6 : 64 - __builtin_clzll((uint64_t)bytes - 1);
  arena *a = self->arena;
  chunk *c = size_class < CLASSES ? a->unused[size_class] : NULL;
  if (c) {
    a->unused[size_class] = c->next_free;
  } else {
    void *memory = NULL;
    if (size_class >= CLASSES || posix_memalign(&memory, 64, sizeof(chunk) + ((size_t)1 << size_class)))
      fail(OUT_OF_MEMORY, LOCAL, LOAD, NULL, bytes);
    c = memory;
    c->size_class = size_class;
    c->next = a->all;
    a->all = c;
  }
  c->in_use = 1;
  return c + 1;
}

void npu_offline_free(void *memory) {
  chunk *c = (chunk *)memory - 1;
  if (!memory || !c->in_use) return;
  c->in_use = 0;
  c->next_free = self->arena->unused[c->size_class];
  self->arena->unused[c->size_class] = c;
}

static void reset(arena *a) {
  memset(a->unused, 0, sizeof a->unused);
  for (chunk *c = a->all; c; c = c->next) {
    c->in_use = 0;
    c->next_free = a->unused[c->size_class];
    a->unused[c->size_class] = c;
  }
}

static arena *take_arena(void) {
  pthread_mutex_lock(&arenas_lock);
  arena *a = idle_arenas;
  if (a) idle_arenas = a->next;
  pthread_mutex_unlock(&arenas_lock);
  return a ? a : calloc(1, sizeof(arena));
}

static void give_arena(arena *a) {
  pthread_mutex_lock(&arenas_lock);
  a->next = idle_arenas;
  idle_arenas = a;
  pthread_mutex_unlock(&arenas_lock);
}

// Runs programs until none is left; `counts` is this worker's own row of counters.
static void work(launch *l, counts *own) {
  worker w = {.launch = l, .arena = take_arena(), .counts = own};
  self = &w;
  for (;;) {
    int64_t position = atomic_fetch_add(&l->next, 1);
    if (position >= l->programs || atomic_load(&l->failed)) break;
    int64_t p = l->order ? l->order[position] : position;
    w.position = p;
    w.program[0] = p % l->grid[0];
    w.program[1] = p / l->grid[0] % l->grid[1];
    w.program[2] = p / l->grid[0] / l->grid[1];
    if (!setjmp(w.leave)) l->kernel(l->arguments, w.program[0], w.program[1], w.program[2]);
    reset(w.arena);
  }
  give_arena(w.arena);
  self = NULL;
}

typedef struct { launch *launch; counts *counts; } task;

static void *run(void *t) {
  work(((task *)t)->launch, ((task *)t)->counts);
  return NULL;
}

static uint64_t next_random(uint64_t *state) {  // splitmix64
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

static void add_rows(const counts *rows, int64_t started, int64_t pointers, counts *total) {
  const int64_t *from = (const int64_t *)rows;
  const int64_t fields = pointers * (int64_t)(sizeof(counts) / sizeof(int64_t));
  for (int64_t i = 0; i < started * fields; i++) ((int64_t *)total)[i % fields] += from[i];
}

// `findings`, of FINDING_BYTES, receives what checks found. Where programs are `chosen`, no others run.
// Runs kernel(arguments, x, y, z) for the whole grid; `total` receives the traffic of each pointer argument. What is watched
// lies in `storages`. Returns 0, or
// 1 with `fault` filled in, or 2 when there is no memory for the launch itself.
int npu_offline_launch(void (*kernel)(const void *, int32_t, int32_t, int32_t), const void *arguments,
                       const range *ranges, const int64_t *row_bytes, int64_t pointers, const range *storages,
                       int64_t storage_count, const int32_t *grid, const settings *given, counts *total,
                       fault *fault, char *findings) {
  launch l = {.kernel = kernel, .arguments = arguments, .ranges = ranges, .grid = grid, .pointers = pointers,
              .programs = (int64_t)grid[0] * grid[1] * grid[2], .fault = fault, .watch = given->watch,
              .unit_bits = given->unit_bits, .shared = given->shared, .check = given->check, .poison = given->poison,
              .findings = findings, .news = given->news};
  pthread_mutex_init(&l.findings_lock, NULL);
  int64_t threads = given->threads;
  uint64_t seed = given->seed;
  if (threads > l.programs) threads = l.programs > 0 ? l.programs : 1;
  uint32_t *order = given->shuffle ? malloc(sizeof *order * (l.programs + 1)) : NULL;
  counts *rows = calloc(threads * pointers + 1, sizeof *rows);
  pthread_t *handles = calloc(threads, sizeof *handles);
  task *tasks = calloc(threads, sizeof *tasks);
  int result = 2;
  if (start_watching(&l, row_bytes, storages, storage_count) && rows && handles && tasks && (order || !given->shuffle)) {
    for (int64_t i = 0; order && i < l.programs; i++) {
      int64_t j = next_random(&seed) % (uint64_t)(i + 1);
      order[i] = order[j];
      order[j] = i;
    }
    l.order = given->chosen_count ? given->chosen : order;
    if (given->chosen_count) l.programs = given->chosen_count;
    int64_t started = 1;
    for (; started < threads; started++) {
      tasks[started] = (task){&l, rows + started * pointers};
      if (pthread_create(&handles[started], NULL, run, &tasks[started])) break;
    }
    work(&l, rows);
    for (int64_t i = 1; i < started; i++) pthread_join(handles[i], NULL);
    add_rows(rows, started, pointers, total);
    if (l.watch & WATCH_USE) count_use(&l, total);
    result = atomic_load(&l.failed) ? 1 : 0;
  }
  end_watching(&l);
  free(l.seen), free(order), free(rows), free(handles), free(tasks);
  return result;
}
