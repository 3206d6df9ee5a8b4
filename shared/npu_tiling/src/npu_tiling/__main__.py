"""`python -m npu_tiling`: see `npu_tiling.installation.doctor`."""

import sys

from .installation.doctor import command_line

sys.exit(command_line())
