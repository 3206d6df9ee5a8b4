// Stands before the functions of the machine that a translated module calls, and notes what it issues, in program order.
#include <stdio.h>
enum { T_INSTRUCTION = 1, T_SET, T_WAIT, T_BARRIER, T_CROSS_SET, T_CROSS_WAIT, T_PROGRAM };
int64_t *npu_trace, npu_trace_length;
static int64_t trace_room;
static void note_word(int64_t word) {
  if (npu_trace_length == trace_room) npu_trace = realloc(npu_trace, sizeof(int64_t) * (size_t)(trace_room = trace_room * 2 + 4096));
  npu_trace[npu_trace_length++] = word;
}
static int note_event(int kind, int64_t a, int64_t b, int64_t c) {
  if (!checking()) return 0;
  note_word(kind), note_word(machine->current), note_word(a), note_word(b), note_word(c);
  return 1;
}
static void note_view(const view *v, int role) {
  static const int bits[] = {32, 16, 16, 64, 32, 16, 8, 1, 32, 16, 8, 64};
  note_word(role), note_word(v->space), note_word(v->space == GM || v->space == NUMBER ? (int64_t)v->p : v->p - CORE->memory[(int)v->space]);
  note_word(v->bit), note_word(v->space == NUMBER ? 0 : bits[(int)v->type]), note_word(v->rank);
  for (int k = 0; k < v->rank; k++) note_word(v->n[k]), note_word(v->s[k]);
}
static void note_instruction(const instruction *i, const view *const *o) {
  const int written = i->reads + i->writes, all = written + i->temporaries;
  if (!note_event(T_INSTRUCTION, i->pipe, i->number, all)) return;
  for (int k = 0; k < all; k++) note_view(o[k], k >= written ? 2 : k >= i->reads ? 1 : i->attributes[6] >> k & 1 ? 3 : 0);
}
static void noted_issue(const instruction *i, const view *const *o) { note_instruction(i, o), issue(i, o); }
static void noted_product(const instruction *i, const view *const *o, const int64_t *f) {
  const int64_t own = 15;  // a flag that no module uses
  if (f && f[0] >= 0) note_event(T_WAIT, MTE2, MTE1, f[0]);
  note_instruction(i + 1, (const view *const[]){o[0], o[1]});
  if (f && f[2] >= 0) note_event(T_SET, MTE1, MTE2, f[2]);
  if (f && f[1] >= 0) note_event(T_WAIT, MTE2, MTE1, f[1]);
  note_instruction(i + 2, (const view *const[]){o[1], o[0]});
  if (f && f[3] >= 0) note_event(T_SET, MTE1, MTE2, f[3]);
  note_event(T_SET, MTE1, M, own), note_event(T_WAIT, MTE1, M, own), note_event(T_BARRIER, M, 0, 0);
  note_instruction(i, o);
  note_event(T_SET, M, MTE1, own), note_event(T_WAIT, M, MTE1, own);
  issue_product(i, o, f);
}
static void noted_set(int a, int b, int64_t e) { note_event(T_SET, a, b, e), set_flag(a, b, e); }
static void noted_wait(int a, int b, int64_t e) { note_event(T_WAIT, a, b, e), wait_flag(a, b, e); }
static void noted_barrier(int pipe) { note_event(T_BARRIER, pipe, 0, 0), barrier(pipe); }
static void noted_cross_set(int pipe, int64_t n) { note_event(T_CROSS_SET, pipe, n, 0), set_cross_flag(pipe, n); }
static void noted_cross_wait(int64_t n) { wait_cross_flag(n), note_event(T_CROSS_WAIT, n, 0, 0); }
static void note_scalar(const instruction *i, const view *v, const int64_t *index, int role) {
  view one = *v;
  int64_t before = 0;
  for (int k = 0; k < v->rank; k++) before += index[k] * v->s[k];
  if (v->type == I1) one.p += (v->bit + before) >> 3, one.bit = (v->bit + before) & 7;
  else one.p += before * element_bytes[(int)v->type];
  one.rank = 0;
  if (note_event(T_INSTRUCTION, S, i->number, 1)) note_view(&one, role);
}
static int64_t noted_load(const instruction *i, const view *v, const int64_t *index) { return note_scalar(i, v, index, 0), load_bits(i, v, index); }
static void noted_store(const instruction *i, int64_t bits, const view *v, const int64_t *index) { note_scalar(i, v, index, 1), store_bits(i, bits, v, index); }
#undef issue
#undef issue_product
#undef set_flag
#undef wait_flag
#undef barrier
#undef set_cross_flag
#undef wait_cross_flag
#undef load_bits
#undef store_bits
#define issue noted_issue
#define issue_product noted_product
#define set_flag noted_set
#define wait_flag noted_wait
#define barrier noted_barrier
#define set_cross_flag noted_cross_set
#define wait_cross_flag noted_cross_wait
#define load_bits noted_load
#define store_bits noted_store
