// The machine that final modules run on: cores with memories at fixed addresses, views of them, instructions on pipes.
//
// Generated code makes views and issues instructions in program order. Without checks an instruction is performed when it is
// issued. With checks, vector clocks follow the order of the pipes, and every access is compared with those before.
#include "../runtime/runtime.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <ucontext.h>

// Symbols that kernels are linked with: other libraries may have functions of these names.
#define checking npu_offline_checking
#define make_buffer npu_offline_make_buffer
#define make_argument npu_offline_make_argument
#define make_number npu_offline_make_number
#define subview npu_offline_subview
#define keep_axes npu_offline_keep_axes
#define reinterpret npu_offline_reinterpret
#define collapse npu_offline_collapse
#define expand npu_offline_expand
#define view_bytes npu_offline_view_bytes
#define retype npu_offline_retype
#define load_bits npu_offline_load_bits
#define store_bits npu_offline_store_bits
#define issue npu_offline_issue
#define issue_product npu_offline_issue_product
#define set_flag npu_offline_set_flag
#define wait_flag npu_offline_wait_flag
#define barrier npu_offline_barrier
#define set_cross_flag npu_offline_set_cross_flag
#define wait_cross_flag npu_offline_wait_cross_flag
#define set_mask_norm npu_offline_set_mask_norm
#define set_ffts_base_addr npu_offline_set_ffts_base_addr
#define execute npu_offline_execute
#define machine npu_offline_machine

enum { F32, F16, BF16, I64, I32, I16, I8, I1, U32, U16, U8, F64 };                 // types of elements
enum { GM, UB, L1, L0A, L0B, L0C, SPACES, NUMBER = SPACES };                        // where a view is; a number has its value
enum { S, V, MTE2, MTE3, MTE1, M, FIX, PIPES };                                     // of one core
enum { PLAIN, CHECKED, SURVEYED };                                                  // how a launch runs
enum { RANK = 12, CORES = 3, CLOCKS = PIPES * CORES, CROSS_FLAGS = 16 };
enum { FLAGS = 8, EVENTS = 16, OWN_EVENT = EVENTS - 1 };  // FLAGS of two pipes: EVENT_ID0 to 7 of the dialect; OWN_EVENT: cube.c's
enum { CROSS_SETS = 15 };  // the most that a counter between cores counts: the manual of CrossCoreWaitFlag, CANN 8.5

typedef struct {
  char *p;                    // address of the first element; of the byte that contains it, for bits
  int64_t n[RANK], s[RANK];   // sizes and strides, in elements
  int64_t bit, value;         // of the first element, for bits; a number's own bytes
  char *base;                 // offsets of new views of the same memory start here
  char *low, *high;           // of the buffer, or of the argument's storage
  int32_t owner;              // which buffer, or argument
  int8_t space, type, rank;
} view;

typedef struct instruction instruction;
typedef void perform(const instruction *, const view *const *);
struct instruction {
  const char *name;
  int number, pipe, reads, writes, temporaries;  // operands come in this order
  perform *perform;
  int64_t attributes[8];
};

typedef struct { const char *text; } buffer_name;
typedef struct {
  const char *name;
  const instruction *instructions;
  const buffer_name *buffers;
  int64_t workspace;                                // bytes for each program
  int64_t sizes[SPACES], used[SPACES];              // bytes of each memory of a core, and how many the plan uses
  int data_dependent;                               // computed values decide branches, sizes or addresses
  void (*aic)(const int64_t *, int64_t, int64_t);   // slots, program, vector core
  void (*aiv)(const int64_t *, int64_t, int64_t);
} module;

typedef struct { uint32_t epoch[CLOCKS]; } clocks;
typedef struct map map;
typedef struct queue queue;
typedef struct { int count; clocks snapshots[4]; } flag;
typedef struct { int count; clocks snapshots[CROSS_SETS]; } cross_flag;

typedef struct {
  int first;                       // of this core's clocks among all
  const module *module;
  char *memory[SPACES];
  map *maps[SPACES];
  clocks clocks[PIPES];
  uint32_t epochs[PIPES];
  flag flags[PIPES][PIPES][EVENTS];
  queue *queues[PIPES];            // of pipes that wait for a flag
  int finished, waits;             // for a cross-core flag; -1 for none
  int mask_is_norm, ffts_is_set;   // by the program: launches before may have left anything
  cross_flag cross[CROSS_FLAGS], cross_sent[CROSS_FLAGS];
  ucontext_t context;
  char *stack;
  uint64_t step;                   // hash of the steps so far, in a survey
  void (*run)(const int64_t *, int64_t, int64_t);
} core;

typedef struct {
  core cores[CORES];
  int count, current;
  map *gm;
  ucontext_t main;
  const int64_t *slots;
  int64_t program, memory_of_cores;
} cluster;

extern __thread cluster *machine;
#define CORE (&machine->cores[machine->current])
int checking(void);

// Generated code calls these.
void make_buffer(view *v, int space, int64_t address, int type, int owner, int rank, const int64_t *n);
void make_argument(view *v, const int64_t *slots, int slot, int argument, int type);
void make_number(view *v, int type, int64_t bits);
void subview(view *v, const view *of, const int64_t *offsets, const int64_t *n, const int64_t *s);
void keep_axes(view *v, const view *of, int rank, const int *axes);
void reinterpret(view *v, const view *of, int64_t offset, int rank, const int64_t *n, const int64_t *s);
void collapse(view *v, const view *of, int rank, const int *ends);
void expand(view *v, const view *of, const int *ends, int rank, const int64_t *n);
void view_bytes(view *v, const view *of, int64_t offset, int type, int rank, const int64_t *n);
void retype(view *v, const view *of, int type);
int64_t load_bits(const instruction *i, const view *v, const int64_t *index);
void store_bits(const instruction *i, int64_t bits, const view *v, const int64_t *index);
void issue(const instruction *i, const view *const *operands);
void issue_product(const instruction *i, const view *const *operands, const int64_t *flags);  // flags: of a, of b, freed by a, by b; or none
void set_flag(int source, int target, int64_t event);
void wait_flag(int source, int target, int64_t event);
void barrier(int pipe);  // PIPES for all
void set_cross_flag(int pipe, int64_t number);
void wait_cross_flag(int64_t number);
void set_mask_norm(void);
void set_ffts_base_addr(void);
void execute(const module *m, const int64_t *slots, int32_t x, int32_t y, int32_t z);

// Helpers of every file.
#pragma GCC visibility push(hidden)
static const int element_bytes[] = {4, 2, 2, 8, 4, 2, 1, 1, 4, 2, 1, 8};
int64_t elements_of(const view *v);
void extent(const view *v, const char **low, const char **high);  // first and last byte of all that a view has
void count_lock(const view *lock);
void note_accesses(const instruction *i, const view *const *operands, int reads, int all);  // of the Unified Buffer, for pictures
static inline void mark_issued(const instruction *i) { if (self->launch->issued) self->launch->issued[i->number] = 1; }
void transfer(const view *from, const view *to);                   // DMA to or from global memory
void fail_text(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));     // the module is wrong
void unknown_text(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));  // this machine does not know it
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
const char *named(const view *v, char *text, size_t size);
map *new_map(void);
void clear_map(map *m);
void start_pipes(core *c);
void end_pipes(core *c, const char *who);
void account(const instruction *i, const view *v, int access, int pipe, uint32_t epoch);
void check_alignment(const instruction *i, const view *const *operands);
void account_operands(const instruction *i, const view *const *operands, int pipe, uint32_t epoch);
static inline float half_to_float(uint16_t h) {
  _Float16 f;
  memcpy(&f, &h, 2);
  return (float)f;
}
static inline uint16_t float_to_half(float x) {
  _Float16 f = (_Float16)x;
  uint16_t h;
  memcpy(&h, &f, 2);
  return h;
}
static inline float bfloat_to_float(uint16_t b) {
  uint32_t u = (uint32_t)b << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline uint16_t float_to_bfloat(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if (x != x) return (uint16_t)(u >> 16 | 0x40);
  return (uint16_t)((u + (0x7fff + (u >> 16 & 1))) >> 16);
}
#pragma GCC visibility pop
