// What the C of a translated module uses beside the machine.
static inline int64_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
static inline float bits_float(int64_t bits) {
  uint32_t low = (uint32_t)bits;
  float x;
  memcpy(&x, &low, 4);
  return x;
}
static inline int64_t quotient(int64_t a, int64_t b) { return b == 0 ? 0 : b == -1 ? (int64_t)(0 - (uint64_t)a) : a / b; }
static inline int64_t remainder_of(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }
static inline int64_t floor_quotient(int64_t a, int64_t b) {
  const int64_t q = quotient(a, b);
  return b && a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}
static inline int64_t saturated(float x, int width) {
  const double most = ldexp(1, width - 1);
  if (x != x) return 0;
  return x >= most ? (int64_t)((1ULL << (width - 1)) - 1) : x < -most ? -(int64_t)((1ULL << (width - 1)) - 1) - 1 : (int64_t)x;
}
static inline int64_t elements_before(const view *v) {
  return v->type == I1 ? (v->p - v->base) * 8 + v->bit : (v->p - v->base) / element_bytes[(int)v->type];
}
