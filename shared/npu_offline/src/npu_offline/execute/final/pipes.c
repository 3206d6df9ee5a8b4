// Pipes as queues, with vector clocks for their order: flags and barriers inside a core, flags between cores.
#include "survey.h"
#include "operations.h"

// ---- Clocks: up to where each pipe has waited for every other

static void join(clocks *to, const clocks *from) {
  for (int i = 0; i < CLOCKS; i++)
    if (to->epoch[i] < from->epoch[i]) to->epoch[i] = from->epoch[i];
}

static clocks snapshot(core *c, int pipe) {
  clocks now = c->clocks[pipe];
  now.epoch[c->first + pipe] = c->epochs[pipe];
  return now;
}

// ---- Queues of pipes that wait for a flag

enum { INSTRUCTION, SET, WAIT, BARRIER, CROSS };
typedef struct { int kind, source, target; int64_t event; const instruction *instruction; clocks known; view operands[10]; } item;
struct queue { item *items; int first, count, room; };

static int blocked(const core *c, int pipe) { return c->queues[pipe] && c->queues[pipe]->count > c->queues[pipe]->first; }

static item *enqueue(core *c, int pipe, item given) {
  if (!c->queues[pipe]) c->queues[pipe] = calloc(1, sizeof(queue));
  queue *q = c->queues[pipe];
  if (q->count == q->room) q->items = realloc(q->items, sizeof(item) * (size_t)(q->room = q->room * 2 + 8));
  given.known = c->clocks[S];
  q->items[q->count] = given;
  return &q->items[q->count++];
}

static flag *flag_of(core *c, int source, int target, int64_t event) {
  if (event < 0 || event >= EVENTS) fail_text("flag %ld is none of a core's", (long)event);
  return &c->flags[source][target][event];
}

static const char *const pipe_names[] = {"S", "V", "MTE2", "MTE3", "MTE1", "M", "FIX", "all pipes"};

// Whether functions of the compiler's library set the last flag themselves: reservedEventIdNum of AscendNPU-IR's InjectSync, and
// loads that fill elements on the scalar unit (lib/Template/lib/DMA/Ubuf).
static int is_reserved(int source, int target, int64_t event) {
  const int of_library = (source == V && target == S) || (source == S && target == V) || (source == MTE2 && (target == V || target == S));
  return of_library && event == FLAGS - 1;
}

static void check_number(int source, int target, int64_t event) {
  if (event >= FLAGS && event != OWN_EVENT)
    note("flag|flag %ld of %s to %s: a core has the flags 0 to %d", (long)event, pipe_names[source], pipe_names[target], FLAGS - 1);
  else if (is_reserved(source, target, event))
    note("flag|flag %ld of %s to %s is reserved for functions of the compiler's library", (long)event, pipe_names[source], pipe_names[target]);
}

// Snapshots of the clocks at each time that a flag was set and not yet waited for, the oldest first.
static void put(int *count, clocks *snapshots, int most, const clocks *now) {
  if (*count == most) fail_text("a flag was set %d times before anything waited for it", most + 1);
  snapshots[(*count)++] = *now;
}

static clocks take(int *count, clocks *snapshots) {
  clocks first = snapshots[0];
  memmove(snapshots, snapshots + 1, sizeof(clocks) * (size_t)--*count);
  return first;
}

#define PUT(f, now) put(&(f)->count, (f)->snapshots, (int)(sizeof (f)->snapshots / sizeof *(f)->snapshots), now)
#define TAKE(f) take(&(f)->count, (f)->snapshots)

static void run_instruction(core *c, const instruction *i, const view *const *operands, const clocks *known) {
  join(&c->clocks[i->pipe], known);
  account_operands(i, operands, i->pipe, ++c->epochs[i->pipe]);
  i->perform(i, operands);
  for (int k = i->reads + i->writes; k < i->reads + i->writes + i->temporaries; k++) {  // poisoned: their contents are undefined afterwards
    const char *low, *high;
    extent(operands[k], &low, &high);
    if (elements_of(operands[k])) memset((char *)low, (int)(self->launch->poison & 0xff), (size_t)(high - low));
  }
}

static void do_set(core *c, int source, int target, int64_t event, const clocks *known) {
  join(&c->clocks[source], known);
  flag *f = flag_of(c, source, target, event);
  if (f->count) note("flag|flag %ld of %s to %s is set again before anything waited for it", (long)event, pipe_names[source], pipe_names[target]);
  clocks now = snapshot(c, source);
  PUT(f, &now);
}

static void do_barrier(core *c, int pipe) { c->clocks[pipe].epoch[c->first + pipe] = c->epochs[pipe]; }

static void send_cross(core *c, int pipe, int64_t number);

static void drain(core *c) {
  for (int moved = 1; moved;) {
    moved = 0;
    for (int pipe = 0; pipe < PIPES; pipe++) {
      while (blocked(c, pipe)) {
        queue *q = c->queues[pipe];
        item *next = &q->items[q->first];
        if (next->kind == WAIT) {
          flag *f = flag_of(c, next->source, pipe, next->event);
          if (!f->count) break;
          clocks known = TAKE(f);
          join(&c->clocks[pipe], &known);
        } else if (next->kind == SET) {
          do_set(c, pipe, next->target, next->event, &next->known);
        } else if (next->kind == CROSS) {
          join(&c->clocks[pipe], &next->known);
          send_cross(c, pipe, next->event);
        } else if (next->kind == BARRIER) {
          do_barrier(c, pipe);
        } else {
          const view *operands[10];
          for (int k = 0; k < 10; k++) operands[k] = &next->operands[k];
          run_instruction(c, next->instruction, operands, &next->known);
        }
        q->first++;
        moved = 1;
      }
      if (c->queues[pipe] && !blocked(c, pipe)) c->queues[pipe]->first = c->queues[pipe]->count = 0;
    }
  }
}

static void stuck(core *c, const char *who, const char *what) {
  for (int pipe = 0; pipe < PIPES; pipe++)
    if (blocked(c, pipe)) {
      const item *next = &c->queues[pipe]->items[c->queues[pipe]->first];
      fail_text("deadlock: %s %s, and %s waits for flag %ld of %s, which nothing sets", who, what, pipe_names[pipe], (long)next->event,
                pipe_names[next->source]);
    }
  fail_text("deadlock: %s %s", who, what);
}

// ---- Calls of generated code

void set_mask_norm(void) { CORE->mask_is_norm = 1; }

void set_ffts_base_addr(void) { CORE->ffts_is_set = 1; }

static void need_ffts(void) {
  if (checking() && !CORE->ffts_is_set) note("state|a flag between cores before set_ffts_base_addr: where the flags are is not known");
}

// All vector functions of the compilers' library set the mode that they need, and leave this one; but for comparisons.
static void need_mask(const instruction *i) {
  if (i->perform == do_compare && !CORE->mask_is_norm)
    note("state|%s#%d before set_mask_norm: the mask may count elements, as a launch before has left it", i->name, i->number);
  CORE->mask_is_norm = 1;
}

void issue(const instruction *i, const view *const *operands) {
  mark_issued(i);
  if (i->perform == do_lock || i->perform == do_free_lock) count_lock(operands[0]);
  if (checking() && i->pipe == V) need_mask(i);
  if (!checking()) {
    if (!surveying() || survey_instruction(i, operands, i->reads + i->writes + i->temporaries)) i->perform(i, operands);
    return;
  }
  core *c = CORE;
  if (blocked(c, i->pipe)) {
    item *kept = enqueue(c, i->pipe, (item){.kind = INSTRUCTION, .instruction = i});
    for (int k = 0; k < i->reads + i->writes + i->temporaries; k++) kept->operands[k] = *operands[k];
    return;
  }
  clocks known = c->clocks[S];
  run_instruction(c, i, operands, &known);
}

void set_flag(int source, int target, int64_t event) {
  survey_step(STEP_SET, source, target, event);
  if (!checking()) return;
  core *c = CORE;
  check_number(source, target, event);
  if (blocked(c, source)) {
    enqueue(c, source, (item){.kind = SET, .target = target, .event = event});
    return;
  }
  clocks known = c->clocks[S];
  do_set(c, source, target, event, &known);
  drain(c);
}

void wait_flag(int source, int target, int64_t event) {
  survey_step(STEP_WAIT, source, target, event);
  if (!checking()) return;
  core *c = CORE;
  flag *f = flag_of(c, source, target, event);
  if (!blocked(c, target) && f->count) {
    clocks known = TAKE(f);
    join(&c->clocks[target], &c->clocks[S]);
    join(&c->clocks[target], &known);
  } else if (target == S) {
    char what[80];
    snprintf(what, sizeof what, "waits for flag %ld of %s", (long)event, pipe_names[source]);
    stuck(c, "the scalar unit", what);
  } else {
    enqueue(c, target, (item){.kind = WAIT, .source = source, .event = event});
  }
}

void barrier(int pipe) {
  survey_step(STEP_BARRIER, pipe, 0, 0);
  if (!checking()) return;
  core *c = CORE;
  if (pipe < PIPES) {
    if (blocked(c, pipe)) enqueue(c, pipe, (item){.kind = BARRIER});
    else do_barrier(c, pipe);
    return;
  }
  for (int k = 0; k < PIPES; k++)
    if (blocked(c, k)) stuck(c, "the scalar unit", "waits for all pipes");
  clocks all = {{0}};
  for (int k = 0; k < PIPES; k++) {
    clocks now = snapshot(c, k);
    join(&all, &now);
  }
  for (int k = 0; k < PIPES; k++) c->clocks[k] = all;
}

// ---- Flags between cores: a cube core signals all its vector cores, and waits for all of them

static void send_cross(core *c, int pipe, int64_t number) {
  clocks now = snapshot(c, pipe);
  for (int k = 0; k < machine->count; k++) {
    core *other = &machine->cores[k];
    const int from_cube = c == &machine->cores[0], to_cube = k == 0;
    if (from_cube == to_cube) continue;
    cross_flag *f = &other->cross[number];
    if (!to_cube) {
      PUT(f, &now);
    } else {  // the n-th wait ends when every vector core has signalled n times
      cross_flag *parts = &c->cross_sent[number];
      PUT(parts, &now);
      int whole = 1;
      for (int v = 1; v < machine->count; v++) whole &= machine->cores[v].cross_sent[number].count > 0;
      if (!whole) continue;
      clocks together = {{0}};
      for (int v = 1; v < machine->count; v++) {
        clocks part = TAKE(&machine->cores[v].cross_sent[number]);
        join(&together, &part);
      }
      PUT(f, &together);
    }
  }
}

void set_cross_flag(int pipe, int64_t number) {
  core *c = CORE;
  survey_step(STEP_SET_CROSS, pipe, 0, number);
  if (number < 0 || number >= CROSS_FLAGS) fail_text("flag %ld between cores does not exist", (long)number);
  need_ffts();
  if (blocked(c, pipe)) {
    enqueue(c, pipe, (item){.kind = CROSS, .event = number});
    return;
  }
  join(&c->clocks[pipe], &c->clocks[S]);
  send_cross(c, pipe, number);
}

void wait_cross_flag(int64_t number) {
  core *c = CORE;
  survey_step(STEP_WAIT_CROSS, 0, 0, number);
  if (number < 0 || number >= CROSS_FLAGS) fail_text("flag %ld between cores does not exist", (long)number);
  need_ffts();
  while (!c->cross[number].count) {
    c->waits = (int)number;
    swapcontext(&c->context, &machine->main);
  }
  c->waits = -1;
  clocks known = TAKE(&c->cross[number]);
  join(&c->clocks[S], &known);
}

// ---- Start and end of a program

void start_pipes(core *c) {
  memset(c->clocks, 0, sizeof c->clocks);
  memset(c->epochs, 0, sizeof c->epochs);
  for (int e = 0; e < CROSS_FLAGS; e++) c->cross[e].count = c->cross_sent[e].count = 0;
  for (int pipe = 0; pipe < PIPES; pipe++)
    if (c->queues[pipe]) c->queues[pipe]->first = c->queues[pipe]->count = 0;
  if (checking()) memset(c->flags, 0, sizeof c->flags);
}

void end_pipes(core *c, const char *who) {
  if (!checking()) return;
  for (int pipe = 0; pipe < PIPES; pipe++)
    if (blocked(c, pipe)) stuck(c, who, "has issued everything");
  for (int a = 0; a < PIPES; a++)
    for (int b = 0; b < PIPES; b++)
      for (int e = 0; e < EVENTS; e++)
        if (c->flags[a][b][e].count) note("flag|flag %d of %s to %s is left over", e, pipe_names[a], pipe_names[b]);
  for (int e = 0; e < CROSS_FLAGS; e++)
    if (c->cross[e].count || c->cross_sent[e].count) note("flag|flag %d between cores is left over", e);
}
