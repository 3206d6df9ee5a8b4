"""What PyTorch writes counts as written under compute-sanitizer, and nothing else."""

from types import SimpleNamespace
from unittest import mock

import npu_tiling
import torch
from npu_rms_norm import rms_norm
from npu_tiling import Kernels
from npu_tiling.launch import kernels_of
from written import MarkWritten, marking

H200 = npu_tiling.GPUS["H200"]


class Noted(MarkWritten):
    """MarkWritten that say which addresses they wrote."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.addresses = set()

    def mark(self, tensor):
        super().mark(tensor)
        step = tensor.element_size()
        self.addresses |= {tensor.data_ptr() + step * place for place in range(tensor.numel())} if tensor.numel() else set()

    def has(self, tensor):
        return {tensor.data_ptr() + tensor.element_size() * place for place in range(tensor.numel())} <= self.addresses


def test_what_pytorch_writes_is_marked_and_what_it_only_allocates_is_not():
    with Noted() as noted:
        allocated = [torch.empty(5), torch.empty_like(torch.empty(5)), torch.empty(7)[:3]]
        written, part = torch.ones(5), torch.empty(2, 5)
        part[1].fill_(2)
        torch.add(written, 1, out=(sums := torch.empty(5)))
        written.requires_grad_()
        (grad,) = torch.autograd.grad((written * 3).sum(), written)
    assert not any(noted.has(tensor) for tensor in (*allocated, part[0]))
    assert all(noted.has(tensor) for tensor in (written, part[1], sums, grad))
    assert torch.equal(grad, torch.full((5,), 3.0)) and torch.equal(sums, torch.full((5,), 2.0))


def test_operators_of_ours_are_seen_through():
    """What they allocate for a kernel stays unwritten, unless the kernel writes it."""
    x = torch.randn(3, 64, dtype=torch.float32)
    with (
        mock.patch.object(Kernels, "launch"),
        npu_tiling.use_device(H200, emulated=True),
        Noted() as noted,
    ):
        y = rms_norm(x, x[0])
    assert not noted.has(y)
    with Noted() as noted:
        y = rms_norm(x, x[0])
    assert noted.has(y)


def test_a_copy_made_inside_of_an_operator_is_marked():
    """There PyTorch's dispatcher calls `contiguous` itself, which returns what may be a view."""
    x, weight = torch.randn(3, 64), torch.randn(128)[::2]
    given = []

    def launch(self, module, kernel, decision, grid, tensors, scalars):
        given.extend(tensor for tensor in tensors if tensor is not None and tensor.shape == weight.shape)

    with (
        mock.patch.object(Kernels, "launch", launch),
        npu_tiling.use_device(H200, emulated=True),
        Noted() as noted,
    ):
        rms_norm(x, weight)
    assert given and given[0].is_contiguous() and all(noted.has(tensor) for tensor in given)


def test_what_a_launch_is_given_as_a_descriptor_is_marked():
    memory, plain = torch.empty(4, 8), torch.empty(4, 8)
    descriptor = SimpleNamespace(base=memory, block_shape=[4, 8])
    noted = Noted()
    with mock.patch.object(Kernels, "launch"), marking(noted):
        kernels, module = kernels_of("npu_fused_linear_cross_entropy.loss.product")
        kernels.launch(module, "cross_entropy_product_kernel", None, 1, (plain, None, descriptor), (4,))
    assert noted.has(memory) and not noted.has(plain)
