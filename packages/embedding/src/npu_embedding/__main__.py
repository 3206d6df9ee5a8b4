"""`python -m npu_embedding explain --tokens 32768 --vocabulary 128256 --width 4096 --chip Ascend910B4 --backward`."""

import sys

from npu_tiling.command import main

from .explain import explain

sys.exit(main("npu_embedding", explain, tokens="indices"))
