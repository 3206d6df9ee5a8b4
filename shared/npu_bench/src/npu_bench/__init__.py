"""Benchmarks of PyTorch operators: a script declares shapes, providers, formulas and a reference; the rest is here."""

from .checks import Verdict
from .cli import main
from .declaration import MODES, Benchmark, Case, Stage, Sweep, error_of_whole, relative_error
from .devices import Accelerator, Cpu, Device, open_device, over_stand_in
from .errors import BenchError, UnavailableError
from .host import HostRun
from .records import Record, append, load, records_of
from .runner import Row, Run, run
from .timing import Quantiles

__all__ = [
    "MODES",
    "Accelerator",
    "BenchError",
    "Benchmark",
    "Case",
    "Cpu",
    "Device",
    "HostRun",
    "Quantiles",
    "Record",
    "Row",
    "Run",
    "Stage",
    "Sweep",
    "UnavailableError",
    "Verdict",
    "append",
    "error_of_whole",
    "load",
    "main",
    "open_device",
    "over_stand_in",
    "records_of",
    "relative_error",
    "run",
]
