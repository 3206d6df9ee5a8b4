// tl.device_print: a line for each call of a program, "program (0, 0, 0) PREFIX VALUES", cut where it is long.
#include "runtime.h"

#include <stdio.h>

enum { LINE = 512 };
static __thread char line[LINE];
static __thread int length;

static void add(const char *format, double real, long integer, int is_real) {
  if (!length) length = snprintf(line, LINE, "program (%d, %d, %d)", self->program[0], self->program[1], self->program[2]);
  if (length >= LINE - 1) return;
  length += is_real ? snprintf(line + length, (size_t)(LINE - length), format, real)
                    : snprintf(line + length, (size_t)(LINE - length), format, integer);
}

// Eight characters, the first in the lowest byte.
void npu_offline_print_text(int64_t text) {
  add("", 0, 0, 0);
  for (int i = 0; i < 8 && length < LINE - 1 && (text >> 8 * i & 0xff); i++) line[length++] = (char)(text >> 8 * i & 0xff);
  if (length < LINE) line[length] = 0;
}

void npu_offline_print_integer(int64_t value) { add(" %ld", 0, (long)value, 0); }
void npu_offline_print_real(double value) { add(" %g", value, 0, 1); }

void npu_offline_print_end(void) {
  printf("%s%s\n", line, length >= LINE ? " ..." : "");
  fflush(stdout);
  length = 0;
}
