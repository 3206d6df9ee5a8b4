"""`npu-offline check`: what a package launches, recorded, compiled for every chip, executed with checks, and linted."""

from .calls import Call, launches_of, load_calls, load_sample
from .compilation import Job, Result, describe, jobs_for, run, run_all

__all__ = ["Call", "Job", "Result", "describe", "jobs_for", "launches_of", "load_calls", "load_sample", "run", "run_all"]
