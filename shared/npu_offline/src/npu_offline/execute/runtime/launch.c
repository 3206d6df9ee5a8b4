// Runs the programs of a grid on threads, and gives each on-chip tiles: _alloc / _free, as compiled kernels call them.
#include "runtime.h"

#include <stdio.h>

static pthread_mutex_t arenas_lock = PTHREAD_MUTEX_INITIALIZER;
static arena *idle_arenas;

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
  if (self->launch->watch) memset(c + 1, 0xff, bytes);  // NaN: what is read before it is written shows in the results
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

// Ends the worker's program and gives it the next one; 0 if none is left.
static int next_program(worker *w) {
  launch *l = w->launch;
  pthread_mutex_lock(&l->turns);
  const int goes_on = l->next < l->programs && !atomic_load(&l->failed);
  if (goes_on) {
    const int64_t p = l->order ? l->order[l->next] : l->next;
    l->next++;
    w->position = p;
    w->block = block_of(l->grid, p);
    w->turns = w->ends = w->locks = w->held = w->counted = 0;
    w->program[0] = p % l->grid[0];
    w->program[1] = p / l->grid[0] % l->grid[1];
    w->program[2] = p / l->grid[0] / l->grid[1];
  } else {
    w->block = INT64_MAX;
  }
  pthread_cond_broadcast(&l->turned);
  pthread_mutex_unlock(&l->turns);
  return goes_on;
}

// Runs programs until none is left.
static void *work(void *own) {
  worker *w = self = own;
  w->arena = take_arena();
  while (next_program(w)) {
    if (!setjmp(w->leave)) w->launch->kernel(w->launch->arguments, w->program[0], w->program[1], w->program[2]);
    reset(w->arena);
  }
  give_arena(w->arena);
  self = NULL;
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

// Whether a program waits for a lock for ever: one before it never took it, where all of the grid ran.
static int waits_for_ever(launch *l) {
  if (l->programs != (int64_t)l->grid[0] * l->grid[1] * l->grid[2]) return 0;
  for (int lock = 0; lock < LOCKS; lock++) {
    if (!l->lock_takers[lock] || l->lock_takers[lock] > l->lock_last[lock]) continue;
    const int64_t room = FINDING_BYTES - l->findings_length;
    snprintf(l->findings + l->findings_length, (size_t)room, "0 0 0|stop|deadlock: %ld of the programs up to number %ld take lock %d, and the lock counts programs\n",
             (long)l->lock_takers[lock], (long)l->lock_last[lock], lock);
    return 1;
  }
  return 0;
}

// Runs kernel(arguments, x, y, z) for the whole grid, or for the `chosen` programs of the settings alone. `total` receives the
// traffic of each pointer argument, `findings`, of FINDING_BYTES, what the checks found. What is watched lies in `storages`.
// Returns 0, or 1 with `fault` filled in, or 2 when there is no memory for the launch itself.
int npu_offline_launch(void (*kernel)(const void *, int32_t, int32_t, int32_t), const void *arguments,
                       const range *ranges, const int64_t *row_bytes, int64_t pointers, const range *storages,
                       int64_t storage_count, const int32_t *grid, const settings *given, counts *total,
                       fault *fault, char *findings) {
  launch l = {.kernel = kernel, .arguments = arguments, .ranges = ranges, .grid = grid, .pointers = pointers,
              .programs = (int64_t)grid[0] * grid[1] * grid[2], .fault = fault, .watch = given->watch,
              .seconds = given->seconds, .unit_bits = given->unit_bits, .shared = given->shared, .check = given->check, .poison = given->poison,
              .findings = findings, .news = given->news, .issued = given->issued,
              .accesses = given->accesses, .accesses_room = given->accesses_room, .late = given->late};
  pthread_mutex_init(&l.findings_lock, NULL), pthread_mutex_init(&l.turns, NULL), pthread_cond_init(&l.turned, NULL);
  int64_t threads = given->threads;
  uint64_t seed = given->seed;
  if (threads > l.programs) threads = l.programs > 0 ? l.programs : 1;
  const int has_locks = ranges->low < ranges->high;  // the first argument
  uint32_t *order = given->shuffle || has_locks ? malloc(sizeof *order * (l.programs + 1)) : NULL;
  counts *rows = calloc(threads * pointers + 1, sizeof *rows);
  pthread_t *handles = calloc(threads, sizeof *handles);
  l.workers = calloc(threads, sizeof *l.workers), l.threads = threads;
  int result = 2;
  if (start_watching(&l, row_bytes, storages, storage_count) && rows && handles && l.workers && (order || !(given->shuffle || has_locks))) {
    for (int64_t i = 0; has_locks && i < l.programs; i++) order[i] = position_of(grid, i);  // the chip's order: others may wait for ever
    for (int64_t i = 0; order && !has_locks && i < l.programs; i++) {
      int64_t j = next_random(&seed) % (uint64_t)(i + 1);
      order[i] = order[j];
      order[j] = i;
    }
    l.order = given->chosen_count ? given->chosen : order;
    if (given->chosen_count) l.programs = given->chosen_count;
    for (int64_t i = 0; i < threads; i++) l.workers[i] = (worker){.launch = &l, .counts = rows + i * pointers, .block = INT64_MAX};
    int64_t started = 1;
    while (started < threads && !pthread_create(&handles[started], NULL, work, &l.workers[started])) started++;
    heed_interrupt();
    work(l.workers);
    for (int64_t i = 1; i < started; i++) pthread_join(handles[i], NULL);
    forget_interrupt();
    add_rows(rows, started, pointers, total);
    if (l.watch & WATCH_USE) count_use(&l, total);
    result = atomic_load(&l.failed) || waits_for_ever(&l) ? 1 : 0;
  }
  end_watching(&l);
  free(l.seen), free(order), free(rows), free(handles), free(l.workers);
  return result;
}
