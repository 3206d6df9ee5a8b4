// Roundings to bf16 that LLVM calls where it widens a tile of it: libgcc has them from version 13 on. The result is the low half of
// a vector register, as that of a function that returns float is.
#include <math.h>
#include <stdint.h>
#include <string.h>

float __truncsfbf2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  bits = x != x ? (bits >> 16) | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  memcpy(&x, &bits, 4);
  return x;
}

float __truncdfbf2(double x) {
  float narrow = (float)x;
  if (isfinite(narrow) && (double)narrow != x) {  // to odd, so that the second rounding sees what the first has dropped
    uint32_t bits;
    memcpy(&bits, &narrow, 4);
    bits = (fabs((double)narrow) > fabs(x) ? bits - 1 : bits) | 1;
    memcpy(&narrow, &bits, 4);
  }
  return __truncsfbf2(narrow);
}
