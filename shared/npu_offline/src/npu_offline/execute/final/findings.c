// Findings of the checks, a line each: `execute/final/findings.py` reads them.
#include "machine.h"

// Whether a line was noted before; the bytes, which stand in brackets, may differ.
static int noted(const char *lines, const char *text) {
  const char *open = strchr(text, '['), *close = open ? strchr(open, ')') : NULL;
  const size_t head = open ? (size_t)(open - text) : strlen(text);
  for (const char *line = lines; *line; line = strchr(line, '\n') + 1) {
    const char *start = strchr(line, '|') + 1, *end = strchr(line, '\n');
    if ((size_t)(end - start) < head || memcmp(start, text, head)) continue;
    if (!close) {
      if (start + head == end) return 1;
    } else {
      const size_t tail = strlen(close);
      if ((size_t)(end - start) >= head + tail && !memcmp(end - tail, close, tail)) return 1;
    }
  }
  return 0;
}

void note(const char *format, ...) {
  launch *l = self->launch;
  char line[700];
  int length = snprintf(line, sizeof line, "%d %d %d|", self->program[0], self->program[1], self->program[2]);
  const int start = length;
  va_list arguments;
  va_start(arguments, format);
  length += vsnprintf(line + length, sizeof line - (size_t)length, format, arguments);
  va_end(arguments);
  if (length >= (int)sizeof line) length = sizeof line - 1;
  pthread_mutex_lock(&l->findings_lock);
  // The text names instructions, not programs: noting the same text of another program would add nothing.
  if (!noted(l->findings, line + start) && l->findings_length + length + 2 < FINDING_BYTES) {
    memcpy(l->findings + l->findings_length, line, (size_t)length);
    l->findings_length += length;
    l->findings[l->findings_length++] = '\n';
    l->findings[l->findings_length] = 0;
  }
  pthread_mutex_unlock(&l->findings_lock);
}

static void stop(const char *kind, const char *format, va_list arguments) {
  char line[500];
  vsnprintf(line, sizeof line, format, arguments);
  note("%s|%s", kind, line);
  fail(STOPPED, LOCAL, LOAD, NULL, 0);
}

void fail_text(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  stop("stop", format, arguments);
  va_end(arguments);
  __builtin_unreachable();
}

void unknown_text(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  stop("unknown", format, arguments);
  va_end(arguments);
  __builtin_unreachable();
}
