// What a launch is given and gives back: shared with what launches kernels, which may be C++.
#pragma once
#include <stdint.h>

enum { LENGTHS = 40 };  // powers of two that transfers are counted by
enum { ACCESS_FIELDS = 8 };

typedef struct { char *low, *high; } range;  // the storage behind one pointer argument
typedef struct {
  int64_t read, written, transfers, scalars, atomics, pieces, whole_rows, useful_read, useful_written, lengths[LENGTHS];
} counts;
typedef struct { int64_t reason, argument, access, address, bytes, program[3], other_access, other; } fault;
typedef struct {
  int64_t threads, shuffle, seconds;  // seconds of processor time that a program may take
  uint64_t seed;
  int64_t watch, unit_bits, shared, check, poison;
  const uint32_t *chosen;  // the only programs that run, if there are any
  int64_t chosen_count;
  unsigned char *news;     // of a survey: for each program, whether it does something that none before it does
  unsigned char *issued;   // with checks: for each instruction of the final module, whether a program has issued it
  int64_t *accesses;       // of the Unified Buffer by the first program: their number, then ACCESS_FIELDS of each
  int64_t accesses_room;   // for so many
  const volatile int32_t *late;  // not 0 once the launch has taken too long
} settings;
