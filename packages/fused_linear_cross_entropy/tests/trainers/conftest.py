"""Trainers run where a user's would: on the GPU of this machine, or on its CPU if it has none."""

import pytest
import torch


@pytest.fixture(autouse=True)
def device():
    """Tensors and models of a test that names no device are made here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        yield device
