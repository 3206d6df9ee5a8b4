"""`python -m npu_attn_res explain --tokens 8192 --blocks 8 --width 4096 --chip Ascend910B4 --backward`."""

import sys

from npu_tiling.command import main

from .explain import explain

sys.exit(main("npu_attn_res", explain))
