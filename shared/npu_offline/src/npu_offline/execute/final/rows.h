// Operands of vector instructions, a piece of a row at a time, as fp32, as 64-bit integers or as one byte per bit.
#include "machine.h"

enum { PIECE = 512, OPERANDS = 5 };

typedef struct { const view *v; char *p; int64_t stride, bit; } row;  // stride in elements
typedef struct { int count; int64_t n; row rows[OPERANDS]; } rows;
typedef void each(const instruction *, rows *);

#pragma GCC visibility push(hidden)
// Calls `what` for each row of operands whose sizes are those of `shape`, or 1.
void each_row(const instruction *i, const view *const *o, int count, const view *shape, each *what);
const float *floats(const row *r, int64_t at, int64_t n, float *piece);
const int64_t *integers(const row *r, int64_t at, int64_t n, int64_t *piece);
float *float_target(const row *r, int64_t at, float *piece);
void put_floats(const row *r, int64_t at, int64_t n, const float *from);
void put_integers(const row *r, int64_t at, int64_t n, const int64_t *from);
int64_t raw(const row *r, int64_t at);
void put_raw(const row *r, int64_t at, int64_t bits);
static inline int is_float(int type) { return type == F32 || type == F16 || type == BF16; }
#pragma GCC visibility pop
