// Locks that programs take turns by. The library's lock is a number in global memory: a program waits until it is the program's own,
// and stores the next one to release it. So every program before the last that takes it must take it, and none can take it twice.
#include "machine.h"
#include "operations.h"

static int64_t number_of(const view *lock) {
  const int64_t number = (lock->p - lock->low) / 8;
  if (number >= LOCKS) unknown_text("lock %ld: a program has %d here", (long)number, LOCKS);
  return number;
}

void count_lock(const view *lock) {
  const int64_t number = number_of(lock);
  launch *l = self->launch;
  if (self->counted >> number & 1) return;
  self->counted |= 1ull << number;
  pthread_mutex_lock(&l->findings_lock);
  l->lock_takers[number]++;
  if (machine->program > l->lock_last[number]) l->lock_last[number] = machine->program;
  pthread_mutex_unlock(&l->findings_lock);
}

void do_lock(const instruction *i, const view *const *o) {
  const int64_t number = number_of(o[0]);
  if (self->locks >> number & 1)
    fail_text("deadlock: %s#%d takes lock %ld a second time in one program, and the lock counts programs", i->name, i->number, (long)number);
  take_lock(number);
}

// At a program's end, for those after it: takes and releases the lock, unless the program has done so. Here the end does.
void do_free_lock(const instruction *i, const view *const *o) { (void)i, (void)o; }

void do_unlock(const instruction *i, const view *const *o) {
  const int64_t number = number_of(o[0]);
  if (!(self->held >> number & 1)) fail_text("%s#%d: the program does not hold lock %ld", i->name, i->number, (long)number);
  release_lock(number);
}
