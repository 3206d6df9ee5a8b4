"""`python -m npu_tiling`: see `npu_tiling.installation.doctor`."""

import sys

from .installation.doctor import main

sys.exit(main())
