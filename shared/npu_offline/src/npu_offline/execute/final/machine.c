// The cores that run a program: their memories, and the coroutines that they take turns in.
#include <sys/mman.h>
#include "survey.h"

__thread cluster *machine;

int checking(void) { return self->launch->check == CHECKED; }

static void start_core(core *c, const module *m, int position) {
  c->module = m, c->first = position * PIPES, c->finished = 0, c->waits = -1;
  c->step = position != 0;
  c->mask_is_norm = c->ffts_is_set = 0;
  start_pipes(c);
  for (int space = UB; space < SPACES; space++) {
    if (m->sizes[space] == 0) continue;
    if (!c->memory[space] && posix_memalign((void **)&c->memory[space], 64, (size_t)m->sizes[space] + 64)) fail(OUT_OF_MEMORY, LOCAL, LOAD, NULL, m->sizes[space]);
    memset(c->memory[space], (int)(self->launch->poison & 0xff), (size_t)m->used[space]);
    if (!checking()) continue;
    if (!c->maps[space]) c->maps[space] = new_map();
    clear_map(c->maps[space]);
  }
}

static void enter(void) {
  core *c = CORE;
  c->run(machine->slots, machine->program, machine->current - 1);
  c->finished = 1;
  swapcontext(&c->context, &machine->main);
}

static int waits_alone(const core *c) { return !c->finished && c->waits >= 0 && !c->cross[c->waits].count; }

enum { STACK = 1 << 26, PAGE = 1 << 12 };  // bytes; a module has as many views as values, and only pages that it writes are taken

// A coroutine's stack, whose lowest page cannot be written.
static char *new_stack(void) {
  char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED || mprotect(stack, PAGE, PROT_NONE)) fail(OUT_OF_MEMORY, LOCAL, LOAD, NULL, STACK);
  return stack;
}

static void take_turns(void) {
  for (int k = 0; k < machine->count; k++) {
    core *c = &machine->cores[k];
    if (!c->stack) c->stack = new_stack();
    getcontext(&c->context);
    c->context.uc_stack.ss_sp = c->stack;
    c->context.uc_stack.ss_size = STACK;
    c->context.uc_link = NULL;
    makecontext(&c->context, enter, 0);
  }
  for (int moved = 1; moved;) {
    moved = 0;
    for (int k = 0; k < machine->count; k++) {
      core *c = &machine->cores[k];
      if (c->finished || waits_alone(c)) continue;
      machine->current = k;
      moved = 1;
      swapcontext(&machine->main, &c->context);
    }
  }
  for (int k = 0; k < machine->count; k++) {
    machine->current = k;
    if (!machine->cores[k].finished)
      fail_text("deadlock: %s waits for flag %d between cores, which nothing sets", k ? "a vector core" : "the cube core", machine->cores[k].waits);
  }
}

// Runs one program: on a core, or on a cube core and its two vector cores.
void execute(const module *m, const int64_t *slots, int32_t x, int32_t y, int32_t z) {
  if (!self->arena->cores && !(self->arena->cores = calloc(1, sizeof(cluster)))) fail(OUT_OF_MEMORY, LOCAL, LOAD, NULL, sizeof(cluster));
  machine = self->arena->cores;
  const int mixed = m->aic && m->aiv;
  const int32_t *grid = self->launch->grid;
  machine->count = mixed ? 3 : 1, machine->current = 0;
  machine->slots = slots;
  machine->program = ((int64_t)x * grid[1] + y) * grid[2] + z;
  if (checking()) {
    if (!machine->gm) machine->gm = new_map();
    clear_map(machine->gm);
  }
  for (int k = 0; k < machine->count; k++) {
    machine->current = k;
    CORE->run = mixed ? (k ? m->aiv : m->aic) : m->aic ? m->aic : m->aiv;
    start_core(CORE, m, k);
  }
  machine->current = 0;
  if (mixed) take_turns();
  else CORE->run(slots, machine->program, 0);
  if (self->held) fail_text("deadlock: the program ends and holds a lock, for which the next program waits");
  for (int k = 0; k < machine->count; k++) {
    machine->current = k;
    survey_step(STEP_END, k, 0, 0);
    end_pipes(CORE, "the core");
  }
}
