"""`python -m npu_rms_norm explain --tokens 32768 --width 4096 --chip Ascend910B4 --backward`."""

import sys

from npu_tiling.command import main

from .explain import explain

sys.exit(main("npu_rms_norm", explain))
