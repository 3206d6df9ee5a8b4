// Locks that programs take turns by. The library's lock counts programs: it waits until as many have released it as the program's
// number says. So every program before the last that takes it must take it, and none can take it twice.
#include "machine.h"
#include "operations.h"

static int64_t number_of(const view *lock) {
  const int64_t number = (lock->p - lock->low) / 8;
  if (number >= LOCKS) fail_text("lock %ld: a program has %d here", (long)number, LOCKS);
  return number;
}

void count_lock(const view *lock) {
  const int64_t number = number_of(lock);
  launch *l = self->launch;
  pthread_mutex_lock(&l->findings_lock);
  l->lock_takers[number]++;
  if (machine->program > l->lock_last[number]) l->lock_last[number] = machine->program;
  pthread_mutex_unlock(&l->findings_lock);
}

void do_lock(const instruction *i, const view *const *o) {
  const int64_t number = number_of(o[0]);
  if (holds_atomic_lock()) fail_text("%s#%d: the program holds another lock", i->name, i->number);
  if (self->locks >> number & 1)
    fail_text("deadlock: %s#%d takes lock %ld a second time in one program, and the lock counts programs", i->name, i->number, (long)number);
  self->locks |= 1ull << number;
  npu_offline_atomic_begin();
}

void do_unlock(const instruction *i, const view *const *o) {
  (void)o;
  if (!holds_atomic_lock()) fail_text("%s#%d: the program holds no lock", i->name, i->number);
  npu_offline_atomic_end();
}
