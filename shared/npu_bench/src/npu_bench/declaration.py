"""What a benchmark script declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .errors import BenchError

MODES = ("forward", "backward", "full", "no-grad-forward", "graph")
"""What of a call is measured; all but the last unless others are asked for."""
_MODES_UNASKED = MODES[:-1]

Outputs = Tensor | tuple[Tensor, ...]
Forward = Callable[..., Outputs]
Error = Callable[[Tensor, Tensor], float]
_CHUNK = 2**24  # elements compared at once: bounds the comparison's own memory


@dataclass(frozen=True)
class Case:
    """One problem size.

    Attributes:
        name: unique in its sweep; what `--cases` takes.
        parameters: sizes, dtypes and whatever else the script's functions read, as `case["width"]`.
        x: where the case stands on the x axis; its name unless given.
    """

    name: str
    parameters: Mapping[str, Any]
    x: float | str | None = None

    def __getitem__(self, parameter: str) -> Any:
        return self.parameters[parameter]

    @property
    def position(self) -> float | str:
        return self.name if self.x is None else self.x


@dataclass(frozen=True)
class Sweep:
    """Cases that share an x axis: its name in records and its label in plots."""

    x_name: str
    x_label: str
    cases: Sequence[Case]


@dataclass(frozen=True)
class Stage:
    """A part of an operator's host time.

    Attributes:
        name: what the stage does.
        call: does it once.
        inner: names of the stages that `call` includes; what remains is the stage's own time.
    """

    name: str
    call: Callable[[], Any]
    inner: Sequence[str] = ()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / (|expected| + rms(expected)); infinite where `actual` has a NaN.

    Elementwise, so that one wrong row in thousands shows; against the tensor's own scale, so that small elements that
    come out of cancellation do not.
    """
    if not expected.numel():
        return 0.0
    scale = expected.square().mean().sqrt()
    worst = torch.zeros((), dtype=expected.dtype, device=expected.device)
    actual, expected = actual.reshape(-1), expected.reshape(-1)
    for start in range(0, expected.numel(), _CHUNK):
        a, e = actual[start : start + _CHUNK], expected[start : start + _CHUNK]
        errors = (a.to(e.dtype) - e).abs() / (e.abs() + scale).clamp_min(torch.finfo(e.dtype).tiny)
        worst = torch.maximum(worst, errors.nan_to_num(nan=torch.inf).max())
    return float(worst)


def error_of_whole(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| in the Euclidean norm of the tensor.

    For results of so many operations one after the other that a few elements of a right one are off by their own size.
    """
    return float((actual.to(expected.dtype) - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Benchmark:
    """An operator's benchmark.

    Attributes:
        name: the operator, as in `packages/<name>`.
        distribution: the pip name of the operator's package, whose version goes into records.
        cases: the named cases.
        inputs: makes a case's tensors on a device, by name; those with `requires_grad` are differentiated. Random
            numbers come from the global generators, which are seeded before the call.
        providers: by name, a function that builds the forward of a case on a device, which is called with the tensors
            of `inputs` in their order; it raises `UnavailableError` where there is none. The first provider is ours;
            one whose name begins with "ours" is no peer.
        reference: the same function of the same tensors in fp64 (fp32 on an NPU).
        traffic: bytes that must move between memory and the chip, for a case and the mode "forward", "backward" or
            "no-grad-forward"; "full" and "graph" are the sum of the first two.
        flops: floating-point operations, likewise; None where they do not count.
        sweeps: further sets of cases, by the name that `--sweep` takes.
        error: of a result that was found and the right one: `npu_bench.relative_error`, of the worst element, or
            `npu_bench.error_of_whole`.
        tolerance: from a case, the largest error of a right result; None for what follows from the narrowest dtype of the
            inputs.
        modes: what is timed unless modes are asked for, which may be any of `MODES`.
        peers: pip names whose versions are reported.
        host_stages: the stages of one call's host time on a device, for `npu-bench stages`.
        host_cases: cases so small that a call of them takes the host longer than the device, for `npu-bench host`.
    """

    name: str
    distribution: str
    cases: Sequence[Case]
    inputs: Callable[[Case, torch.device], Mapping[str, Tensor]]
    providers: Mapping[str, Callable[[Case, torch.device], Forward]]
    reference: Forward
    traffic: Callable[[Case, str], int]
    flops: Callable[[Case, str], int] | None = None
    sweeps: Mapping[str, Sweep] = field(default_factory=dict)
    error: Error = field(default_factory=lambda: relative_error)
    tolerance: Callable[[Case], float | None] = lambda case: None
    modes: Sequence[str] = _MODES_UNASKED
    peers: Sequence[str] = ()
    host_stages: Callable[[torch.device], Sequence[Stage]] | None = None
    host_cases: Sequence[Case] = ()

    def __post_init__(self) -> None:
        if not self.providers:
            raise BenchError(f"benchmark {self.name} declares no provider and must declare at least one.")
        choose("modes", self.modes, MODES)
        for sweep in (self.cases, self.host_cases, *(sweep.cases for sweep in self.sweeps.values())):
            names = [case.name for case in sweep]
            if len(set(names)) < len(names):
                raise BenchError(f"benchmark {self.name} has cases of one name in {names}; names must differ.")

    @property
    def ours(self) -> str:
        return next(iter(self.providers))

    def select(self, sweep: str | None, cases: Sequence[str] | None) -> Sweep:
        """The named cases, or those of a sweep; all of them, or those named in `cases`."""
        if sweep is None:
            chosen = Sweep("case", "case", self.cases)
        elif sweep in self.sweeps:
            chosen = self.sweeps[sweep]
        else:
            known = ", ".join(self.sweeps) or "none: there are none"
            raise BenchError(f"sweep is {sweep!r} and must be one of {known}.")
        names = choose("cases", cases, [case.name for case in chosen.cases])
        return Sweep(chosen.x_name, chosen.x_label, [case for case in chosen.cases if case.name in names])

    def select_modes(self, wanted: Sequence[str] | None) -> list[str]:
        """The wanted ones of `MODES`; those that are timed unasked for None."""
        return list(self.modes) if wanted is None else choose("modes", wanted, MODES)

    def bytes_moved(self, case: Case, mode: str) -> int:
        """`traffic` for any mode."""
        return _for_mode(self.traffic, case, mode)

    def operations(self, case: Case, mode: str) -> int:
        """`flops` for any mode; 0 where they do not count."""
        return 0 if self.flops is None else _for_mode(self.flops, case, mode)


def choose(option: str, wanted: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The wanted names in the order of the known ones; all of them for None.

    Raises:
        BenchError: a name is not known.
    """
    if wanted is None:
        return list(known)
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise BenchError(f"{option} has {', '.join(unknown) or 'nothing'} and must be among {', '.join(known)}.")
    return [name for name in known if name in wanted]


def _for_mode(formula: Callable[[Case, str], int], case: Case, mode: str) -> int:
    if mode in ("full", "graph"):
        return formula(case, "forward") + formula(case, "backward")
    return formula(case, mode)
