"""Forks of a process that has imported PyTorch are programs like others."""

import os
import signal
import subprocess
import sys

import pytest

from testing import forks

SAYS = """
import os, sys
print(sys.argv[1:], os.environ["WORD"], os.getcwd(), sys.path[0], "torch" in sys.modules, __name__, sys.stdin.read() == "")
print("npu_tiling" in sys.modules, file=sys.stderr)
sys.exit(3)
"""


def test_a_program_has_its_arguments_environment_folder_and_path_and_nothing_of_the_tests(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SAYS)
    done = forks.run(program, "a", "b", environment={**os.environ, "WORD": "word"}, folder=tmp_path)
    assert done.stdout == f"['a', 'b'] word {tmp_path} {tmp_path} True __main__ True\n"
    assert (done.stderr, done.returncode) == ("False\n", 3)


@pytest.mark.parametrize("code", ["", "raise ValueError('wrong')", "import sys; sys.exit('why')", "import sys; sys.exit(4)"])
def test_it_ends_as_python_ends(code):
    said = "import atexit, sys; atexit.register(print, 'at the end'); "
    fork, python = forks.run("-c", said + code), subprocess.run([sys.executable, "-c", said + code], capture_output=True)
    assert (fork.returncode, fork.stdout) == (python.returncode, python.stdout.decode()) != (0, "")
    assert fork.stderr.splitlines()[-1:] == python.stderr.decode().splitlines()[-1:]


def test_a_signal_is_its_exit_status():
    assert forks.run("-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)").returncode == -signal.SIGSEGV


def test_what_takes_too_long_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run("-c", "import time; time.sleep(60)", timeout=0.5)


def test_sets_of_strings_have_other_orders_where_the_number_differs():
    hashes = [forks.run("-c", "print(hash('a'))", number=number).stdout for number in (0, 0, 1)]
    assert hashes[0] == hashes[1] != hashes[2]
