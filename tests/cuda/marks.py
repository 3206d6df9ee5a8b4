"""`cuda`: skips a test without a CUDA device, and leaves it to nightly runs with one."""

import pytest
import torch

# On a CUDA device alone, and there among the nightly ones: they take minutes.
cuda = pytest.mark.nightly if torch.cuda.is_available() else pytest.mark.skip(reason="torch has no CUDA device")
