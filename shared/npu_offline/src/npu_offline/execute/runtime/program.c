// The program that a thread is running: how it stops early, the mutex that its atomic updates hold, and the locks that it takes.
#include "runtime.h"

#include <signal.h>
#include <time.h>

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

// ---- Locks that programs take turns by

static int is_taken_before(const launch *l, uint64_t lock) {
  for (int64_t i = 0; i < l->threads; i++) {
    const worker *w = &l->workers[i];
    if (w->block < self->block && !(w->locks & ~w->held & lock)) return 1;
  }
  return 0;
}

// Waits until every program before this one has released the lock, or has ended. Programs start in the order of their blocks.
void take_lock(int64_t number) {
  launch *l = self->launch;
  const uint64_t lock = 1ull << number;
  pthread_mutex_lock(&l->turns);
  while (is_taken_before(l, lock) && !atomic_load(&l->failed)) pthread_cond_wait(&l->turned, &l->turns);
  self->locks |= lock, self->held |= lock;
  pthread_mutex_unlock(&l->turns);
  if (atomic_load(&l->failed)) fail(STOPPED, LOCAL, LOAD, NULL, 0);
}

void release_lock(int64_t number) {
  launch *l = self->launch;
  pthread_mutex_lock(&l->turns);
  self->held &= ~(1ull << number);
  pthread_cond_broadcast(&l->turned);
  pthread_mutex_unlock(&l->turns);
}

// ---- Loops that do not end

enum { TURNS_BETWEEN_LOOKS = 1024 };
static volatile sig_atomic_t interrupted;
static struct sigaction before;
static int heeding;
static pthread_mutex_t handlers = PTHREAD_MUTEX_INITIALIZER;

static void interrupt(int signal) {
  interrupted = 1;
  if (before.sa_handler != SIG_DFL) before.sa_handler(signal);  // Python's: it raises KeyboardInterrupt after the launch
}

void heed_interrupt(void) {
  pthread_mutex_lock(&handlers);
  if (!heeding++) {
    struct sigaction own = {.sa_handler = interrupt, .sa_flags = SA_RESTART};
    interrupted = 0;
    if (!sigaction(SIGINT, NULL, &before) && before.sa_handler != SIG_IGN && !(before.sa_flags & SA_SIGINFO)) sigaction(SIGINT, &own, NULL);
  }
  pthread_mutex_unlock(&handlers);
}

void forget_interrupt(void) {
  pthread_mutex_lock(&handlers);
  if (!--heeding) {
    struct sigaction now;
    if (!sigaction(SIGINT, NULL, &now) && now.sa_handler == interrupt) sigaction(SIGINT, &before, NULL);
  }
  pthread_mutex_unlock(&handlers);
}

static int64_t processor_time(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec * 1000000000 + t.tv_nsec;
}

// Compiled kernels call this at each turn of a loop.
void npu_offline_turn(void) {
  if (interrupted) fail(INTERRUPTED, LOCAL, LOAD, NULL, 0);
  if (self->launch->late && *self->launch->late) fail(ENDLESS, LOCAL, LOAD, NULL, 0);
  if (++self->turns % TURNS_BETWEEN_LOOKS) return;
  if (atomic_load(&self->launch->failed)) fail(STOPPED, LOCAL, LOAD, NULL, 0);  // it may wait for the program that failed
  const int64_t now = processor_time();
  if (!self->ends) self->ends = now + self->launch->seconds * 1000000000;
  else if (now > self->ends) fail(ENDLESS, LOCAL, LOAD, NULL, 0);
}
