"""Ranks meet, and one that fails or hangs ends the test with what it said."""

import os
import time

import pytest

from testing import forks, ranks

pytestmark = pytest.mark.skipif(ranks.why_not() is not None, reason=str(ranks.why_not()))

MEETING = """
import sys
import torch
import torch.distributed as dist
from testing import ranks
with ranks.join() as rank:
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value)
    print(rank, value.item(), torch.get_num_threads(), *sys.argv[1:])
"""
# What Python runs while it shuts down, threads of gloo still at work, would end this process with another status.
ENDING = """
import atexit, os, sys
import torch.distributed as dist
from testing import ranks
atexit.register(os.abort)
with ranks.join() as rank:
    print("said", end="")
    if str(rank) in sys.argv[1:]:
        raise ValueError("gave up")
    if sys.argv[1:]:
        dist.barrier()  # for ever: the other one does not come
"""
# No torch: what a rank's failure does to the others is about processes alone.
HANGING = """
import os, sys, time
print("soon", flush=True)
if os.environ["RANK"] == sys.argv[1]:
    sys.exit("gave up")
time.sleep(60)
"""


@pytest.fixture
def worker(tmp_path):
    def write(source):
        path = tmp_path / "worker.py"
        path.write_text(source)
        return path

    return write


@pytest.mark.slow
def test_ranks_meet_and_are_given_the_arguments(worker):
    said = ranks.run(worker(MEETING), 2, "a", "b")
    assert [line.split() for line in said] == [["0", "3.0", "1", "a", "b"], ["1", "3.0", "1", "a", "b"]]


def test_first_failure_ends_the_others_and_is_shown(worker):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 of 3 ended with status 1:\nsoon\ngave up"):
        ranks.run(worker(HANGING), 3, "1", timeout=50)
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_a_rank_ends_with_its_block(worker):
    assert ranks.run(worker(ENDING), 2) == ["said", "said"]


@pytest.mark.slow
def test_a_rank_whose_block_raises_is_shown_and_ends_the_one_that_waits_for_it(worker):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 ended with status 1:\nsaid.*ValueError: gave up\n$"):
        ranks.run(worker(ENDING), 2, "1", timeout=200)
    assert time.monotonic() - start < 150


def test_ranks_that_take_too_long_are_ended(worker):
    source = "import os, pathlib\npathlib.Path(__file__).with_suffix('.' + os.environ['RANK']).write_text(str(os.getpid()))"
    path = worker(source + HANGING)
    with pytest.raises(RuntimeError, match="rank 0 of 2 was not done in time"):
        ranks.run(path, 2, "none", timeout=2)
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.with_suffix(f".{rank}").read_text()), 0)


def test_worker_started_alone_says_who_must_start_it(worker):
    assert "must be started by testing.ranks.run" in forks.run(worker(MEETING)).stderr
