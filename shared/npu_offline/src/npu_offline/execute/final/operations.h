// What instructions may perform.
#define ACTIONS(each) \
  each(add) each(sub) each(mul) each(div) each(max) each(min) each(mod) each(pow) each(and) each(or) each(xor) each(shl) each(shr) \
  each(exp) each(ln) each(sqrt) each(rsqrt) each(rec) each(tanh) each(sin) each(cos) each(erf) each(abs) each(relu) each(not) \
  each(compare) each(select) each(broadcast) each(copy) each(fill) each(arange) each(cast) each(reduce) each(arg) each(accumulate) \
  each(flip) each(gather) each(sort) each(transpose) each(interleave) each(deinterleave) each(load) each(store) each(lock) each(unlock) each(free_lock) each(nothing) each(take_a) each(take_b) \
  each(multiply) each(nd2nz) each(fixpipe)
#define DECLARE(name) perform do_##name __asm__("npu_offline_do_" #name);
ACTIONS(DECLARE)
#undef DECLARE
