// A survey of a launch: which of its programs do something that none before them does.
#include "machine.h"

enum { STEP_SET = 1, STEP_WAIT, STEP_BARRIER, STEP_SET_CROSS, STEP_WAIT_CROSS, STEP_END };  // steps that are no instruction

#pragma GCC visibility push(hidden)
int surveying(void);
// Records a step other than an instruction; does nothing outside a survey.
void survey_step(int step, int64_t a, int64_t b, int64_t c);
// Records an instruction; returns whether it must be performed because computed values decide what the program does.
int survey_instruction(const instruction *i, const view *const *operands, int count);
#pragma GCC visibility pop
