// For each byte the last write and the reads since; bytes with the same history are kept as one run. Each new access is compared
// with that history: races between pipes, hazards inside one pipe, reads of overwritten buffers.
#include "machine.h"

enum { PAGE_BITS = 12, PAGE = 1 << PAGE_BITS, READERS = 6, TABLE = 1 << 12 };
enum { NOBODY = -1 };

typedef struct { int8_t clock, temporary; uint16_t instruction; uint32_t epoch; } access_;
typedef struct {
  uint16_t low, high;  // within the page; high is exclusive and may be PAGE
  int16_t readers;
  int32_t owner;       // the buffer that it was written through
  access_ write, read[READERS];
} run_;
typedef struct page { uint64_t number; run_ *runs; int count, room; struct page *next; } page;
struct map { page *table[TABLE]; page *pages; int used, room; uint32_t generation; };

map *new_map(void) { return calloc(1, sizeof(map)); }

void clear_map(map *m) {
  for (int i = 0; i < m->used; i++) {
    page *p = &m->pages[i];
    m->table[p->number & (TABLE - 1)] = NULL;
    p->count = 0;
  }
  m->used = 0;
}

static page *page_of(map *m, uint64_t number) {
  page **head = &m->table[number & (TABLE - 1)];
  for (page *p = *head; p; p = p->next)
    if (p->number == number) return p;
  if (m->used == m->room) {  // realloc moved the pages: link them again
    m->room = m->room ? m->room * 2 : 64;
    m->pages = realloc(m->pages, sizeof(page) * (size_t)m->room);
    memset(m->pages + m->used, 0, sizeof(page) * (size_t)(m->room - m->used));
    memset(m->table, 0, sizeof m->table);
    for (int i = 0; i < m->used; i++) {
      page *p = &m->pages[i];
      p->next = m->table[p->number & (TABLE - 1)];
      m->table[p->number & (TABLE - 1)] = p;
    }
  }
  page *p = &m->pages[m->used++];
  p->number = number, p->count = 0;
  p->next = *head, *head = p;
  return p;
}

static void insert(page *p, int at, run_ r) {
  if (p->count == p->room) p->runs = realloc(p->runs, sizeof(run_) * (size_t)(p->room = p->room * 2 + 4));
  memmove(p->runs + at + 1, p->runs + at, sizeof(run_) * (size_t)(p->count - at));
  p->runs[at] = r;
  p->count++;
}

// The index of the first run that ends after `byte`.
static int position(const page *p, int byte) {
  int low = 0, high = p->count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (p->runs[middle].high <= byte) low = middle + 1;
    else high = middle;
  }
  return low;
}

static void cut(page *p, int at, int byte) {
  if (at < p->count && p->runs[at].low < byte && byte < p->runs[at].high) {
    run_ rest = p->runs[at];
    p->runs[at].high = (uint16_t)byte;
    rest.low = (uint16_t)byte;
    insert(p, at + 1, rest);
  }
}

// ---- Comparison with the history

typedef struct {
  const instruction *instruction;
  const view *view;
  const clocks *known;
  int kind, clock, temporary, only_compares;  // clock: of the pipe that accesses
  uint32_t epoch;
  char *base;       // address of the current page
} accessing;

static const char *const pipe_names[] = {"S", "V", "MTE2", "MTE3", "MTE1", "M", "FIX"};
static const char *const core_names[] = {"", "of vector core 0 ", "of vector core 1 "};

static void conflict(const accessing *a, const access_ *other, int wrote, const run_ *r) {
  if (other->clock == NOBODY || other->epoch <= a->known->epoch[other->clock]) return;
  if (other->clock == a->clock && (other->epoch == a->epoch || a->clock % PIPES == S)) return;
  const int same = other->clock == a->clock, writes = a->kind != LOAD;
  const instruction *before = &CORE->module->instructions[other->instruction];
  char what[200];
  // A pipe starts an instruction only after the one before has read its operands. A library function orders accesses to its
  // own temporaries itself.
  const int weak = same && ((writes && !wrote) || a->temporary || other->temporary);
  note("%s|%s: %s#%d on %s %s %s [%ld, +%ld), which %s#%d on %s %s%s, and nothing orders them", weak ? "weak hazard" : same ? "hazard" : "race",
       writes ? wrote ? "WAW" : "WAR" : "RAW", a->instruction->name, a->instruction->number, pipe_names[a->clock % PIPES],
       writes ? "writes" : "reads", named(a->view, what, sizeof what), (long)(a->base + r->low - a->view->low), (long)(r->high - r->low),
       before->name, before->number, pipe_names[other->clock % PIPES], other->clock / PIPES ? core_names[other->clock / PIPES] : "",
       wrote ? "wrote" : "reads");
}

static void foreign(const accessing *a, const run_ *r) {
  const instruction *before = &CORE->module->instructions[r->write.instruction];
  char what[200];
  note("plan|%s#%d reads %s [%ld, +%ld), which %s#%d wrote as %s", a->instruction->name, a->instruction->number,
       named(a->view, what, sizeof what), (long)(a->base + r->low - a->view->low), (long)(r->high - r->low), before->name, before->number,
       CORE->module->buffers[r->owner].text);
}

static void read_run(const accessing *a, run_ *r) {
  conflict(a, &r->write, 1, r);
  if (a->view->space != GM && r->owner != NOBODY && r->owner != a->view->owner) foreign(a, r);
  for (int i = 0; i < r->readers; i++)
    if (r->read[i].clock == a->clock) {
      r->read[i].epoch = a->epoch;
      r->read[i].temporary = (int8_t)a->temporary;
      r->read[i].instruction = (uint16_t)a->instruction->number;
      return;
    }
  if (r->readers < READERS) r->read[r->readers++] = (access_){(int8_t)a->clock, (int8_t)a->temporary, (uint16_t)a->instruction->number, a->epoch};
}

static void write_run(const accessing *a, const run_ *r) {
  conflict(a, &r->write, 1, r);
  for (int i = 0; i < r->readers; i++) conflict(a, &r->read[i], 0, r);
}

static void in_page(page *p, accessing *a, int low, int high) {
  int at = position(p, low);
  cut(p, at, low);
  at = position(p, low);
  if (a->kind == LOAD) {
    for (int byte = low; byte < high; at++) {
      if (at == p->count || p->runs[at].low > byte) {
        const int end = at == p->count || p->runs[at].low > high ? high : p->runs[at].low;
        insert(p, at, (run_){(uint16_t)byte, (uint16_t)end, 0, NOBODY, {NOBODY, 0, 0, 0}, {{0}}});
      }
      cut(p, at, high);
      read_run(a, &p->runs[at]);
      byte = p->runs[at].high;
    }
    return;
  }
  int end = at;
  for (; end < p->count && p->runs[end].low < high; end++) {
    cut(p, end, high);
    write_run(a, &p->runs[end]);
  }
  if (a->only_compares) return;
  const run_ now = {(uint16_t)low, (uint16_t)high, 0, a->view->owner, {(int8_t)a->clock, (int8_t)a->temporary, (uint16_t)a->instruction->number, a->epoch}, {{0}}};
  if (end == at) {
    insert(p, at, now);
  } else {
    p->runs[at] = now;
    memmove(p->runs + at + 1, p->runs + end, sizeof(run_) * (size_t)(p->count - end));
    p->count -= end - at - 1;
  }
}

static void bytes(map *m, accessing *a, uint64_t low, uint64_t high) {
  while (low < high) {
    const uint64_t number = low >> PAGE_BITS, end = (number + 1) << PAGE_BITS, last = end < high ? end : high;
    a->base = a->view->space == GM ? (char *)(number << PAGE_BITS) : CORE->memory[(int)a->view->space] + (number << PAGE_BITS);
    in_page(page_of(m, number), a, (int)(low - (number << PAGE_BITS)), (int)(last - (number << PAGE_BITS)));
    low = last;
  }
}

static void out_of_buffer(const accessing *a, const char *low, const char *high) {
  char what[200];
  fail_text("%s#%d %s bytes [%ld, %ld) of %s, which has %ld", a->instruction->name, a->instruction->number, a->kind == LOAD ? "reads" : "writes",
            (long)(low - a->view->low), (long)(high - a->view->low), named(a->view, what, sizeof what), (long)(a->view->high - a->view->low));
}

// Compares an access to a view with those before and records it, in contiguous pieces. DMA writes whole units of 32 bytes of the
// Unified Buffer.
static void account_as(const instruction *i, const view *v, int kind, int pipe, uint32_t epoch, int temporary, int only_compares) {
  core *c = CORE;
  if (v->space == NUMBER || elements_of(v) == 0) return;
  accessing a = {i, v, &c->clocks[pipe], kind, c->first + pipe, temporary, only_compares, epoch, NULL};
  map *m = v->space == GM ? machine->gm : c->maps[(int)v->space];
  const int64_t unit = v->type == I1 ? 1 : element_bytes[(int)v->type] * 8;  // bits
  int64_t piece = unit, rank = v->rank, index[RANK] = {0};
  while (rank > 0 && (v->n[rank - 1] == 1 || v->s[rank - 1] * unit == piece)) piece *= v->n[--rank];
  const char *origin = v->space == GM ? NULL : c->memory[(int)v->space];
  for (;;) {
    int64_t bits = v->bit;
    for (int64_t k = 0; k < rank; k++) bits += index[k] * v->s[k] * unit;
    const char *low = v->p + (bits >> 3), *high = v->p + ((bits + piece + 7) >> 3);
    if (low < v->low || high > v->high) out_of_buffer(&a, low, high);
    if (kind != LOAD && pipe == MTE2 && v->space == UB) {
      const char *whole = origin + ((high - origin + 31) & ~31);
      const char *most = origin + ((v->high - origin + 31) & ~31);
      const char *next = rank ? v->p + ((bits + v->s[rank - 1] * unit) >> 3) : most;
      if (whole <= most && (whole <= next || next <= low)) high = whole;
    }
    bytes(m, &a, (uint64_t)(low - origin), (uint64_t)(high - origin));
    int64_t k = rank - 1;
    while (k >= 0 && ++index[k] == v->n[k]) index[k--] = 0;
    if (k < 0) return;
  }
}

void account(const instruction *i, const view *v, int kind, int pipe, uint32_t epoch) { account_as(i, v, kind, pipe, epoch, 0, 0); }

// ---- Operands of one instruction that overlap

void extent(const view *v, const char **low, const char **high) {
  const int64_t unit = v->type == I1 ? 1 : element_bytes[(int)v->type] * 8;
  int64_t last = v->bit + unit;
  for (int k = 0; k < v->rank; k++) last += (v->n[k] - 1) * v->s[k] * unit;
  *low = v->p, *high = v->p + ((last + 7) >> 3);
}

static int overlap(const view *a, const view *b) {
  if (a->space == NUMBER || a->space != b->space || a->space == GM || !elements_of(a) || !elements_of(b)) return 0;
  const char *low, *high, *other_low, *other_high;
  extent(a, &low, &high), extent(b, &other_low, &other_high);
  return low < other_high && other_low < high;
}

// An instruction that takes its operands in order may write to an operand that it reads, if it has read each byte before it
// writes it.
static int in_place(const view *w, const view *r) {
  if (w->p != r->p || w->bit != r->bit || elements_of(w) != elements_of(r)) return 0;
  const int64_t of_w = w->type == I1 ? 1 : element_bytes[(int)w->type] * 8, of_r = r->type == I1 ? 1 : element_bytes[(int)r->type] * 8;
  for (int k = 0; k < w->rank; k++)
    if (w->n[k] > 1 && (k >= r->rank || w->s[k] * of_w > r->s[k] * of_r)) return 0;
  return of_w <= of_r;
}

void account_operands(const instruction *i, const view *const *o, int pipe, uint32_t epoch) {
  const int written = i->reads + i->writes, all = written + i->temporaries;
  char what[200], other[200];
  check_alignment(i, o);
  note_accesses(i, o, i->reads, all);
  // What is written in place is compared first: the instruction's read takes the place of the pipe's read before it.
  for (int w = i->reads; w < all; w++) {
    int is_read = 0;
    for (int r = 0; r < i->reads; r++) is_read |= overlap(o[w], o[r]);
    if (is_read) account_as(i, o[w], STORE, pipe, epoch, w >= written, 1);
  }
  for (int k = 0; k < i->reads; k++)
    if (!(i->attributes[6] >> k & 1)) account(i, o[k], LOAD, pipe, epoch);  // else only its size is used
  for (int w = i->reads; w < all; w++) {
    for (int r = 0; r < w; r++) {
      if (!overlap(o[w], o[r])) continue;
      if (w < written && r < i->reads && in_place(o[w], o[r])) continue;
      if (w < written && i->attributes[7]) continue;  // the operation allows it
      note("alias|%s#%d: %s %s overlaps its operand %s", i->name, i->number, w < written ? "output" : "temporary", named(o[w], what, sizeof what),
           named(o[r], other, sizeof other));
    }
    account_as(i, o[w], STORE, pipe, epoch, w >= written, 0);
  }
}
