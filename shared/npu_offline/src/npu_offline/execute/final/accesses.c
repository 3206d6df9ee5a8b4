// What the first program reads and writes in the Unified Buffer, instruction by instruction: pictures are drawn from it.
#include "machine.h"

void note_accesses(const instruction *i, const view *const *o, int reads, int all) {
  launch *l = self->launch;
  if (!l->accesses || self->program[0] || self->program[1] || self->program[2]) return;
  for (int k = 0; k < all; k++) {
    const view *v = o[k];
    if (v->space != UB || elements_of(v) == 0 || *l->accesses == l->accesses_room) continue;
    const char *origin = CORE->memory[UB];
    const int64_t fields[ACCESS_FIELDS] = {l->step, i->number, i->pipe, machine->current, v->owner, v->low - origin, v->high - origin, k >= reads};
    memcpy(l->accesses + 1 + ACCESS_FIELDS * (*l->accesses)++, fields, sizeof fields);
  }
  l->step++;
}
