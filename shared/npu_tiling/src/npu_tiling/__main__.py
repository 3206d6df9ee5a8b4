"""`python -m npu_tiling`: see `npu_tiling.doctor`."""

import sys

from .doctor import main

sys.exit(main())
