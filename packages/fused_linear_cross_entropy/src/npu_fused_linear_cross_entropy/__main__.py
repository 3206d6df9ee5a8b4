"""`python -m npu_fused_linear_cross_entropy explain --tokens 8192 --width 4096 --vocabulary 128256 --chip H200`."""

import sys

from npu_tiling.command import main

from .explain import explain

sys.exit(main("npu_fused_linear_cross_entropy", explain))
