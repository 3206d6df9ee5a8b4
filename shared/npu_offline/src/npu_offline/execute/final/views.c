// Views of memory: a buffer of a core, or an argument in global memory, with an offset, sizes and strides.
#include "survey.h"

static void row_major(view *v, int rank, const int64_t *n) {
  int64_t stride = 1;
  v->rank = (int8_t)rank;
  for (int i = rank - 1; i >= 0; i--) v->n[i] = n[i], v->s[i] = stride, stride *= n[i];
}

int64_t elements_of(const view *v) {
  int64_t total = 1;
  for (int i = 0; i < v->rank; i++) total *= v->n[i] > 0 ? v->n[i] : 0;
  return total;
}

static void move(view *v, int64_t elements) {
  if (v->type == I1) {
    int64_t bit = v->bit + elements;
    v->p += bit >> 3;
    v->bit = bit & 7;
  } else {
    v->p += elements * element_bytes[v->type];
  }
}

void make_buffer(view *v, int space, int64_t address, int type, int owner, int rank, const int64_t *n) {
  v->space = (int8_t)space, v->type = (int8_t)type, v->owner = owner, v->bit = 0;
  row_major(v, rank, n);
  int64_t bytes = elements_of(v);
  bytes = type == I1 ? (bytes + 7) / 8 : bytes * element_bytes[type];
  if (address < 0 || address + bytes > CORE->module->sizes[space])
    fail_text("buffer %s lies outside the core's memory", CORE->module->buffers[owner].text);
  v->p = v->base = v->low = CORE->memory[space] + address;
  v->high = v->low + bytes;
}

void make_argument(view *v, const int64_t *slots, int slot, int argument, int type) {
  const range *r = &self->launch->ranges[argument];
  *v = (view){.space = GM, .type = (int8_t)type, .owner = argument, .rank = 1, .n = {INT64_MAX}, .s = {1}};
  v->p = v->base = (char *)slots[slot + 1] + slots[slot + 2] * element_bytes[type];
  v->low = r->low, v->high = r->high;
}

void make_number(view *v, int type, int64_t bits) {
  *v = (view){.space = NUMBER, .type = (int8_t)type, .rank = 0, .value = bits, .owner = -1};
}

void subview(view *v, const view *of, const int64_t *offsets, const int64_t *n, const int64_t *s) {
  *v = *of;
  int64_t elements = 0;
  for (int i = 0; i < of->rank; i++) {
    elements += offsets[i] * of->s[i];
    v->n[i] = n[i];
    v->s[i] = of->s[i] * s[i];
  }
  move(v, elements);
}

void keep_axes(view *v, const view *of, int rank, const int *axes) {
  view from = *of;
  *v = from;
  v->rank = (int8_t)rank;
  for (int i = 0; i < rank; i++) v->n[i] = from.n[axes[i]], v->s[i] = from.s[axes[i]];
}

void reinterpret(view *v, const view *of, int64_t offset, int rank, const int64_t *n, const int64_t *s) {
  *v = *of;
  v->p = v->base, v->bit = 0;
  v->rank = (int8_t)rank;
  for (int i = 0; i < rank; i++) v->n[i] = n[i], v->s[i] = s[i];
  move(v, offset);
}

void collapse(view *v, const view *of, int rank, const int *ends) {
  view from = *of;
  *v = from;
  v->rank = (int8_t)rank;
  for (int i = 0, axis = 0; i < rank; i++) {
    int64_t size = 1, stride = -1, expected = -1;
    for (; axis < ends[i]; axis++) size *= from.n[axis];
    for (int k = axis - 1, first = i ? ends[i - 1] : 0; k >= first; k--) {
      if (from.n[k] == 1) continue;
      if (stride < 0) stride = from.s[k];
      else if (from.s[k] != expected) unknown_text("axes that do not follow each other are collapsed");
      expected = from.s[k] * from.n[k];
    }
    v->n[i] = size;
    v->s[i] = stride < 0 ? (axis ? from.s[axis - 1] : 1) : stride;
  }
}

void expand(view *v, const view *of, const int *ends, int rank, const int64_t *n) {
  view from = *of;
  *v = from;
  v->rank = (int8_t)rank;
  for (int i = 0; i < from.rank; i++) {
    int64_t stride = from.s[i];
    for (int k = ends[i] - 1, first = i ? ends[i - 1] : 0; k >= first; k--) v->n[k] = n[k], v->s[k] = stride, stride *= n[k];
  }
}

void view_bytes(view *v, const view *of, int64_t offset, int type, int rank, const int64_t *n) {
  *v = *of;
  v->p += offset;
  v->base = v->p;
  v->type = (int8_t)type;
  row_major(v, rank, n);
}

void retype(view *v, const view *of, int type) {
  *v = *of;
  v->type = (int8_t)type;
}

const char *named(const view *v, char *text, size_t size) {
  static const char *const spaces[] = {"global memory", "UB", "L1", "L0A", "L0B", "L0C"};
  if (v->space == NUMBER) snprintf(text, size, "a number");
  else if (v->space == GM) snprintf(text, size, "argument %d", v->owner);
  else snprintf(text, size, "%s of %s", spaces[v->space], CORE->module->buffers[v->owner].text);
  return text;
}

static view element(const view *v, const int64_t *index) {
  view e = *v;
  int64_t elements = 0;
  for (int i = 0; i < v->rank; i++) elements += index[i] * v->s[i];
  move(&e, elements);
  e.rank = 0;
  return e;
}

static void scalar_access(const instruction *i, const view *e, int access) {
  mark_issued(i);
  if (surveying()) survey_instruction(i, &e, 1);
  if (e->space == GM) npu_offline_touch(e->p, element_bytes[(int)e->type], access, e->owner);
  else if (e->p < e->low || e->p + element_bytes[(int)e->type] > e->high)
    fail_text("%s of an element outside its buffer, %s", i->name, CORE->module->buffers[e->owner].text);
  if (checking()) {
    note_accesses(i, (const view *const[]){e}, access == LOAD, 1);
    account(i, e, access, S, ++CORE->epochs[S]);
  }
}

int64_t load_bits(const instruction *i, const view *v, const int64_t *index) {
  view e = element(v, index);
  int64_t bits = 0;
  scalar_access(i, &e, LOAD);
  if (e.type == I1) return *e.p >> e.bit & 1;
  memcpy(&bits, e.p, (size_t)element_bytes[(int)e.type]);
  return bits;
}

void store_bits(const instruction *i, int64_t bits, const view *v, const int64_t *index) {
  view e = element(v, index);
  scalar_access(i, &e, STORE);
  if (surveying() && e.space == GM && !CORE->module->data_dependent) return;
  if (e.type == I1) *e.p = (char)((*e.p & ~(1 << e.bit)) | (bits & 1) << e.bit);
  else memcpy(e.p, &bits, (size_t)element_bytes[(int)e.type]);
}
