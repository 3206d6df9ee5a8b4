// See survey.h. A program runs its scalar code and issues its instructions, which are performed only where computed values decide
// branches, sizes or addresses. A step is an instruction, the sizes and on-chip addresses of its operands, and the step before.
// Two programs do the same if they have the same steps.
#include "survey.h"

typedef struct { uint64_t count, room, steps[]; } seen;  // a hash table of steps; 0 is a free slot

int surveying(void) { return self->launch->check == SURVEYED; }

static uint64_t mixed(uint64_t hash, int64_t number) {  // splitmix64's last steps
  uint64_t z = (hash ^ (uint64_t)number) + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

static int insert(seen *s, uint64_t step) {
  uint64_t at = step & (s->room - 1);
  while (s->steps[at] && s->steps[at] != step) at = (at + 1) & (s->room - 1);
  if (s->steps[at]) return 0;
  s->steps[at] = step;
  s->count++;
  return 1;
}

static seen *grown(seen *old) {
  const uint64_t room = old ? old->room * 2 : 1 << 12;
  seen *s = calloc(1, sizeof *s + room * sizeof *s->steps);
  if (!s) fail(OUT_OF_MEMORY, LOCAL, LOAD, NULL, (int64_t)room);
  s->room = room;
  for (uint64_t i = 0; old && i < old->room; i++)
    if (old->steps[i]) insert(s, old->steps[i]);
  free(old);
  return s;
}

static void step(uint64_t now) {
  core *c = CORE;
  launch *l = self->launch;
  seen *s = l->seen;
  if (!s || 2 * s->count >= s->room) l->seen = s = grown(s);
  if (insert(s, mixed(c->step, (int64_t)now) | 1)) l->news[self->position] = 1;
  c->step = now;
}

void survey_step(int kind, int64_t a, int64_t b, int64_t number) {
  if (surveying()) step(mixed(mixed(mixed(mixed(1, kind), a), b), number));
}

// Bounds are checked here, as the instruction may not be performed.
static void within(const view *v, int access) {
  const char *low, *high;
  if (v->space != GM || !elements_of(v)) return;
  extent(v, &low, &high);
  for (int axis = 0; axis < v->rank; axis++)
    if (v->s[axis] < 0) return;
  if (low < v->low || high > v->high) fail(OUT_OF_BOUNDS, v->owner, access, low, high - low);
}

int survey_instruction(const instruction *i, const view *const *operands, int count) {
  uint64_t now = mixed(2, i->number);
  for (int k = 0; k < count; k++) {
    const view *v = operands[k];
    now = mixed(mixed(now, v->space), v->type);
    if (v->space == NUMBER) continue;
    for (int axis = 0; axis < v->rank; axis++) now = mixed(mixed(now, v->n[axis]), v->n[axis] == 1 ? 0 : v->s[axis]);
    now = v->space == GM ? mixed(now, v->owner) : mixed(mixed(now, v->p - CORE->memory[(int)v->space]), v->bit);
  }
  step(now);
  if (CORE->module->data_dependent) return 1;
  for (int k = 0; k < i->reads + i->writes; k++) within(operands[k], k < i->reads ? LOAD : STORE);
  return 0;
}
