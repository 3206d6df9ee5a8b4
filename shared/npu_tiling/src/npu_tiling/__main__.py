"""`python -m npu_tiling`: see `npu_tiling.doctor`."""

import sys

from .doctor import command_line

sys.exit(command_line())
