"""How far two losses may be apart that come from the same mathematics in fp32."""

_FIRST_STEP = 2e-5
_PER_STEP = 1e-6
_PER_STEP_SQUARED = 2e-8


def tolerance(step: int) -> float:
    """The largest difference allowed at a step, counted from 0, in nats.

    Both runs compute in fp32 and differ in the order of sums alone. That changes a first loss of 5.5 by a unit or two
    in the last place, 5e-7 each, and training amplifies it, about with the square of the steps: measured on a CPU, to
    between 4e-6 and 9e-6 in 300 steps (three seeds), to 4e-4 in 900. The tolerance is 40 units at first and then at
    least 30 times what was measured, since other devices and seeds round otherwise: 1e-3 at step 200.

    What it catches: an input's gradient that is 0.1 % off (2e-4 within 15 steps, 5e-3 within 150), eps of 1e-5 instead
    of 1e-6 (8e-3), results rounded to bf16 (2e-2). What no loss curve shows: a constant factor on the gradient of a
    weight, which AdamW divides out again.
    """
    return _FIRST_STEP + _PER_STEP * step + _PER_STEP_SQUARED * step**2
