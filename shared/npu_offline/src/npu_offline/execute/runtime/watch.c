// Watches accesses to global memory on demand. The unit is one element of the narrowest argument. Two things are noted: which
// units of each argument were read and written at all, and which programs accessed which address through any argument.
#include "runtime.h"

#include <sys/mman.h>
#include <wchar.h>

// What programs did with one unit of memory: the kind of access in the upper two bits, the program in the others. OWN is a write,
// or a mixture of kinds: no other program may access such a unit.
enum { READ = 1, UPDATED = 2, OWN = 3, WHO_BITS = 30, MANY = (1 << WHO_BITS) - 1 };
enum { LARGE = 4 << 20 };

// A unit's state after one more access, 0 if the access is a race. Several programs may read a unit, or update it atomically;
// any other pair of accesses of two programs is a race. The order of the accesses does not matter.
static uint32_t joined(uint32_t state, uint32_t kind, uint32_t who) {
  if (!state) return kind << WHO_BITS | who;
  uint32_t before = state >> WHO_BITS, whose = state & MANY;
  if (before == kind && kind != OWN) return whose == who ? state : kind << WHO_BITS | MANY;
  return whose == who ? (uint32_t)OWN << WHO_BITS | who : 0;
}

static void join(int argument, int access, uint32_t kind, const char *low, uint32_t *units, int64_t n,
                 pthread_mutex_t *held) {
  uint32_t who = (uint32_t)self->position + 1, common = joined(units[0], kind, who);
  if (common && !memcmp(units, units + 1, (n - 1) * sizeof *units)) {  // all alike, as almost always
    if (common != units[0]) wmemset((wchar_t *)units, (wchar_t)common, n);
    return;
  }
  for (int64_t i = 0; i < n; i++) {
    uint32_t state = joined(units[i], kind, who), before = units[i];
    // The kernel's source says that several programs write the same to this argument.
    if (kind == OWN && before >> WHO_BITS == OWN && self->launch->shared >> argument & 1) state = before | MANY;
    if (!state) {
      static const int accesses[] = {LOAD, LOAD, UPDATE, STORE};
      const int64_t unit_bits = self->launch->unit_bits;
      pthread_mutex_unlock(held);
      const char *unit = (const char *)((((uintptr_t)low >> unit_bits) + i) << unit_bits);
      fail_beside(RACE, argument, access, unit, (int64_t)1 << unit_bits, accesses[before >> WHO_BITS],
                  (before & MANY) == MANY ? -1 : (int64_t)(before & MANY) - 1);
    }
    units[i] = state;
  }
}

// ---- Updates that do not exclude each other: behind different locks of the library, or one of them behind none

// Whether what a program did comes before what this one does: each program takes a lock after those before it have released it.
static int precedes(const latest *a) {
  const int32_t *grid = self->launch->grid;
  return !a->who || a->who == (uint32_t)self->position + 1 ||
         (a->who != MANY && block_of(grid, (int64_t)a->who - 1) < self->block && self->locks & ~a->released);
}

// What this access may come in between of, NULL if nothing. Behind a lock an update is a load and a store, but for those that the
// chip makes by itself.
static const latest *apart(updates *u, int access) {
  const int locked = self->held != 0, stores = access == STORE && !self->atomic;
  const latest *other = NULL;
  if (!precedes(&u->locked) && (locked || u->locked.stored)) other = &u->locked;
  else if (locked && stores && !precedes(&u->bare)) other = &u->bare;
  if (other) return other;
  latest *own = locked ? &u->locked : &u->bare;
  const uint32_t who = (uint32_t)self->position + 1;
  own->who = !locked && own->who && own->who != who ? MANY : who;
  own->released = self->locks & ~self->held;
  own->stored |= stores;
  return NULL;
}

static void compare_locks(int argument, const char *low, updates *of, int access, int64_t n, pthread_mutex_t *held) {
  for (int64_t i = 0; i < n; i++) {
    const latest *found = apart(&of[i], access);
    if (!found) continue;
    const latest other = *found;
    const int64_t unit_bits = self->launch->unit_bits;
    const int is_store = other.stored && found == &of[i].bare;
    pthread_mutex_unlock(held);
    const char *unit = (const char *)((((uintptr_t)low >> unit_bits) + i) << unit_bits);
    fail_beside(APART, argument, self->held || self->atomic ? UPDATE : access, unit, (int64_t)1 << unit_bits, is_store ? STORE : UPDATE,
                other.who == MANY ? -1 : (int64_t)other.who - 1);
  }
}

// ---- Accesses

// The region that an access lies in. Between the tensors of one argument that stands for several there is none.
static const region *region_of(int argument, int access, const char *low, const char *high) {
  const launch *l = self->launch;
  for (int64_t j = 0; j < l->regions; j++)
    if (l->region[j].low <= low && high <= l->region[j].high) return &l->region[j];
  fail(OUT_OF_BOUNDS, argument, access, low, high - low);
  return NULL;
}

void watch(int argument, int access, const char *low, int64_t bytes) {
  launch *l = self->launch;
  const region *r = region_of(argument, access, low, low + bytes);
  const uint32_t kind = is_update() || access == UPDATE ? UPDATED : access == LOAD ? READ : OWN;
  for (const char *end = low + bytes; low < end;) {
    uintptr_t stripe = (uintptr_t)low >> STRIPE_BITS;
    const char *limit = (const char *)((stripe + 1) << STRIPE_BITS), *high = limit < end ? limit : end;
    int64_t first = (uintptr_t)low >> l->unit_bits, n = ((uintptr_t)(high - 1) >> l->unit_bits) - first + 1;
    int64_t start = first - ((uintptr_t)r->low >> l->unit_bits);
    pthread_mutex_t *lock = &l->stripes[stripe % STRIPES];
    pthread_mutex_lock(lock);
    if (l->watch & WATCH_USE)
      memset((kind == READ ? l->watched[argument].read : l->watched[argument].written) + r->first + start, 1, n);
    if (r->units) join(argument, access, kind, low, r->units + start, n, lock);
    if (r->updates && kind != READ) compare_locks(argument, low, r->updates + start, access, n, lock);
    pthread_mutex_unlock(lock);
    low = high;
  }
}

void watch_tile(int argument, int access, const memref *m, int64_t rank, int64_t element) {
  const int64_t *n = m->sizes_strides, *stride = n + rank;
  int64_t piece, index[MAX_RANK] = {0}, outer = merge(m, rank, element, &piece);
  for (;;) {
    const char *low = m->aligned + m->offset * element;
    for (int64_t i = 0; i < outer; i++) low += index[i] * stride[i] * element;
    watch(argument, access, low, piece);
    int64_t i = outer - 1;
    while (i >= 0 && ++index[i] == n[i]) index[i--] = 0;
    if (i < 0) return;
  }
}

// Zeros, on pages that the kernel makes when they are touched. That is most of the cost of watching: large pages cost less.
static void *zeros(size_t bytes) {
  void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return NULL;
  if (bytes >= LARGE) madvise(memory, bytes, MADV_HUGEPAGE);
  return memory;
}

void end_watching(launch *l) {
  for (int64_t i = 0; l->watched && i < l->pointers; i++) {
    if (l->watched[i].read) munmap(l->watched[i].read, l->units);
    if (l->watched[i].written) munmap(l->watched[i].written, l->units);
  }
  if (l->regions && l->region[0].units) munmap(l->region[0].units, l->units * sizeof(uint32_t));
  if (l->regions && l->region[0].updates) munmap(l->region[0].updates, l->units * sizeof(updates));
  for (int i = 0; i < STRIPES; i++) pthread_mutex_destroy(&l->stripes[i]);
  free(l->watched), free(l->region);
}

// The regions that storages make up where they overlap, and where the units of each begin among all units.
static void find_regions(launch *l, const range *storages, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    region all = {storages[i].low, storages[i].high, NULL, NULL, 0};
    int64_t kept = 0;
    for (int64_t j = 0; j < l->regions; j++) {
      region r = l->region[j];
      if (r.low < all.high && all.low < r.high) {
        if (r.low < all.low) all.low = r.low;
        if (r.high > all.high) all.high = r.high;
      } else {
        l->region[kept++] = r;
      }
    }
    l->region[kept] = all;
    l->regions = kept + 1;
  }
  for (int64_t j = 0; j < l->regions; j++) {
    region *r = &l->region[j];
    r->first = l->units;
    l->units += ((uintptr_t)r->high >> l->unit_bits) - ((uintptr_t)r->low >> l->unit_bits) + 1;
  }
}

int start_watching(launch *l, const int64_t *row_bytes, const range *storages, int64_t count) {
  for (int i = 0; i < STRIPES; i++) pthread_mutex_init(&l->stripes[i], NULL);
  l->watched = calloc(l->pointers + 1, sizeof *l->watched);
  if (!l->watched) return 0;
  for (int64_t i = 0; i < l->pointers; i++) l->watched[i].row_bytes = row_bytes[i];
  if (!l->watch || !count) return 1;
  if (!(l->region = calloc(count, sizeof *l->region))) return 0;
  find_regions(l, storages, count);
  for (int64_t i = 0; l->watch & WATCH_USE && i < l->pointers; i++) {
    l->watched[i].read = zeros(l->units);
    l->watched[i].written = zeros(l->units);
    if (!l->watched[i].read || !l->watched[i].written) return 0;
  }
  if (l->watch & WATCH_RACES) {
    uint32_t *units = zeros(l->units * sizeof *units);
    for (int64_t j = 0; units && j < l->regions; j++) l->region[j].units = units + l->region[j].first;
    if (!units) return 0;
  }
  if (l->watch & WATCH_LOCKS) {
    updates *all = zeros(l->units * sizeof *all);
    for (int64_t j = 0; all && j < l->regions; j++) l->region[j].updates = all + l->region[j].first;
    return all != NULL;
  }
  return 1;
}

void count_use(const launch *l, counts *total) {
  for (int64_t i = 0; i < l->pointers; i++)
    for (int64_t j = 0; j < l->regions; j++) {
      const region *r = &l->region[j];
      if (r->high <= l->ranges[i].low || l->ranges[i].high <= r->low) continue;
      const int64_t end = j + 1 < l->regions ? r[1].first : l->units;
      for (int64_t u = r->first; u < end; u++) {
        total[i].useful_read += (int64_t)l->watched[i].read[u] << l->unit_bits;
        total[i].useful_written += (int64_t)l->watched[i].written[u] << l->unit_bits;
      }
    }
}
