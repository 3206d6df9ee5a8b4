// A survey of a launch: which of its programs do something that none before them does.
#include "machine.h"

enum { STEP_SET = 1, STEP_WAIT, STEP_BARRIER, STEP_SET_CROSS, STEP_WAIT_CROSS, STEP_END };  // steps that are no instruction

#pragma GCC visibility push(hidden)
int surveying(void);
// Notes a step that is no instruction; does nothing outside a survey.
void survey_step(int step, int64_t a, int64_t b, int64_t c);
// Notes an instruction; returns whether it is to be performed, because what it computes decides what programs do.
int survey_instruction(const instruction *i, const view *const *operands, int count);
#pragma GCC visibility pop
