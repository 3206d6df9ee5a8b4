// What the files of the runtime share: a launch, the threads that run its programs, and how faults are reported. program.c is
// used by all, watch.c by dma.c and launch.c.
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "launch.h"

enum { LOCAL = -1, UNKNOWN = -2 };
enum { LOAD = 0, STORE = 1, UPDATE = 2 };
enum { OUT_OF_BOUNDS = 1, OUT_OF_MEMORY = 2, RACE = 3, STOPPED = 4, ENDLESS = 5, INTERRUPTED = 6, APART = 7 };
enum { CLASSES = 48, MAX_RANK = 16, STRIPES = 64, STRIPE_BITS = 16 };
enum { WATCH_USE = 1, WATCH_RACES = 2, WATCH_LOCKS = 4 };
enum { LOCKS = 64, FINDING_BYTES = 1 << 16 };

typedef struct { char *base, *aligned; int64_t offset, sizes_strides[]; } memref;
typedef struct { int64_t rank; memref *m; } unranked;

// On-chip tiles are recycled by size class: a kernel allocates the same few tiles again and again. The chunk's header
// keeps its payload aligned to 64 bytes.
typedef struct chunk { struct chunk *next, *next_free; int64_t size_class, in_use; char padding[32]; } chunk;
typedef struct arena { chunk *all, *unused[CLASSES]; struct arena *next; void *cores; } arena;  // cores: of ../final

typedef struct { uint64_t released; uint32_t who, stored; } latest;  // what a program did, the locks that it had released, whether it was a store
typedef struct { latest locked, bare; } updates;                     // of one unit: the last one behind locks, and the last one behind none
typedef struct { char *low, *high; uint32_t *units; updates *updates; int64_t first; } region;  // the union of storages that overlap; see watch.c
typedef struct { unsigned char *read, *written; int64_t row_bytes; } watched;  // per pointer argument

typedef struct launch {
  void (*kernel)(const void *, int32_t, int32_t, int32_t);
  const void *arguments;
  const range *ranges;
  const int32_t *grid;
  const uint32_t *order;
  int64_t programs, pointers, threads, next;
  struct worker *workers;     // one for each thread
  pthread_mutex_t turns;      // of `next` and of what each worker has of locks
  pthread_cond_t turned;      // a program has ended, or released a lock
  atomic_int failed;
  fault *fault;
  int64_t watch, unit_bits, shared, regions, units;
  region *region;
  watched *watched;
  pthread_mutex_t stripes[STRIPES];
  int64_t seconds;             // of processor time that a program may take
  const volatile int32_t *late;  // see settings
  int64_t check, poison;       // how it runs, as in ../final/machine.h; what unwritten bytes of a core are
  int64_t lock_takers[LOCKS], lock_last[LOCKS];  // of each lock: how often it was taken, and the last program that took it
  char *findings;              // of the checks, a line each
  int64_t findings_length;
  pthread_mutex_t findings_lock;
  unsigned char *news;         // of a survey, for each program
  unsigned char *issued;       // for each instruction; NULL without checks
  int64_t *accesses, accesses_room, step;  // see settings; how many instructions the first program has performed
  void *seen;                  // by it so far
} launch;

typedef struct worker {
  launch *launch;
  arena *arena;
  counts *counts;
  int64_t position;    // of the program in the grid, x first
  int64_t block;       // its number on the chip, z first; past all others where there is no program
  int32_t program[3];
  int atomic;
  uint64_t locks, held, counted;  // that the program has taken, of these not released, and asked for; a bit each
  uint64_t turns;      // of the program's loops
  int64_t ends;        // processor time at which the program has taken too long; 0 as long as nothing has looked
  jmp_buf leave;
} worker;

void npu_offline_copy(int64_t element, const unranked *source, const unranked *target, int32_t from_argument,
                      int32_t to_argument);
void npu_offline_touch(const char *address, int64_t bytes, int32_t access, int32_t argument);
void *npu_offline_alloc(int64_t alignment, int64_t bytes);
void npu_offline_free(void *memory);
void npu_offline_atomic_begin(void);
void npu_offline_atomic_end(void);
void npu_offline_turn(void);

#pragma GCC visibility push(hidden)  // other libraries may have functions of these names
extern __thread worker *self;

// Whether what the program accesses now is part of an atomic update.
static inline int is_update(void) { return self->atomic || self->held; }

// Stop the launch: note what happened, unless another program was first, and leave the program. Neither returns.
void fail(int reason, int argument, int access, const char *address, int64_t bytes);
void fail_beside(int reason, int argument, int access, const char *address, int64_t bytes, int other_access, int64_t other);

// The library's lock of a number: programs take it one after another, in the order of their blocks.
void take_lock(int64_t number);
void release_lock(int64_t number);

// The number that the chip gives to a program at a position of the grid, and the position of a number.
static inline int64_t block_of(const int32_t *grid, int64_t position) {
  const int64_t x = position % grid[0], y = position / grid[0] % grid[1], z = position / grid[0] / grid[1];
  return (x * grid[1] + y) * grid[2] + z;
}
static inline int64_t position_of(const int32_t *grid, int64_t block) {
  const int64_t z = block % grid[2], y = block / grid[2] % grid[1], x = block / grid[2] / grid[1];
  return (z * grid[1] + y) * grid[0] + x;
}

// From heed_interrupt to forget_interrupt Ctrl-C stops every launch of this process, beside what it does otherwise.
void heed_interrupt(void);
void forget_interrupt(void);

// The rank that is left when a tile's innermost dimensions are merged into contiguous pieces of `*piece` bytes.
static inline int64_t merge(const memref *m, int64_t rank, int64_t element, int64_t *piece) {
  const int64_t *n = m->sizes_strides, *stride = n + rank;
  for (*piece = element; rank > 0 && (n[rank - 1] == 1 || stride[rank - 1] * element == *piece);) *piece *= n[--rank];
  return rank;
}

// Make room for what is watched; 0 if there is none.
int start_watching(launch *l, const int64_t *row_bytes, const range *storages, int64_t count);
// Note an access to consecutive bytes, or to a tile, of an argument.
void watch(int argument, int access, const char *low, int64_t bytes);
void watch_tile(int argument, int access, const memref *m, int64_t rank, int64_t element);
void count_use(const launch *l, counts *total);
void end_watching(launch *l);
#pragma GCC visibility pop
