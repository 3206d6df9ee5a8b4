// The program that a thread is running: how it stops early, and the lock that its atomic updates hold.
#include "runtime.h"

__thread worker *self;
static pthread_mutex_t atomics = PTHREAD_MUTEX_INITIALIZER;

void fail_beside(int reason, int argument, int access, const char *address, int64_t bytes, int other_access,
                 int64_t other) {
  if (!atomic_exchange(&self->launch->failed, 1)) {
    *self->launch->fault = (fault){reason, argument, access, (int64_t)address, bytes,
                                   {self->program[0], self->program[1], self->program[2]}, other_access, other};
  }
  if (self->atomic) {
    self->atomic = 0;
    pthread_mutex_unlock(&atomics);
  }
  longjmp(self->leave, 1);
}

void fail(int reason, int argument, int access, const char *address, int64_t bytes) {
  fail_beside(reason, argument, access, address, bytes, 0, 0);
}

void npu_offline_atomic_begin(void) {
  pthread_mutex_lock(&atomics);
  self->atomic = 1;
}

void npu_offline_atomic_end(void) {
  self->atomic = 0;
  pthread_mutex_unlock(&atomics);
}
