"""What the tests of `attn_res_bank` compare with: calls in fp64, and inputs whose unused memory is NaN."""

import depth
import torch
from npu_attn_res import attn_res_bank

WIDTH = 256


def tensors(device, tokens=7, capacity=5, n_blocks=3, width=WIDTH, bank=torch.bfloat16, prefix=torch.bfloat16):
    """A bank whose slots behind its blocks are NaN, a prefix, a layer's output, query, rms_weight, output_rms_weight."""
    case = depth.make(capacity, tokens, width, bank)
    generator = torch.Generator().manual_seed(1)
    randn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    made = case.blocks.movedim(0, -2).contiguous()
    made[..., n_blocks:, :] = float("nan")
    rows = [randn(*case.dh.shape).to(prefix) for _ in range(2)]
    weights = [case.query.to(prefix), case.rms_weight.to(prefix), (1 + 0.3 * randn(width)).to(prefix)]
    return [tensor.to(device.torch) for tensor in (made, *rows, *weights)]


def exact(bank, n_blocks, prefix, x, query, rms_weight, output_rms_weight, upstream, scale=1.0, stored=None):
    """h, RMSNorm(h), and the gradients of all arguments, in fp64; `stored`: h and the prefix that are used, as rounded."""
    given = (bank[..., :n_blocks, :], prefix, x, query, rms_weight, output_rms_weight)
    leaves = [one.detach().cpu().double().requires_grad_() for one in given]
    blocks, prefix, x, query, rms_weight, output_rms_weight = leaves
    joined = prefix + x
    if stored is not None:
        joined = joined + (stored[1].detach().cpu().double() - joined).detach()
    h, _ = depth.formula(torch.stack([*blocks.unbind(-2), joined]), query * scale, rms_weight, 1e-6)
    rounded = h if stored is None else h + (stored[0].detach().cpu().double() - h).detach()
    y = rounded * torch.rsqrt(rounded.square().mean(-1, keepdim=True) + 1e-6) * output_rms_weight
    upstream = [one.cpu().double() for one in upstream]
    return [h.detach(), y.detach()], torch.autograd.grad((h, y, joined), leaves, upstream, materialize_grads=True)


def upstream_of(results):
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in results]
    return [one.to(results[0].device) for one in made]


def check(given, n_blocks, *, counted=False, scale=1.0, fp32=5e-4, **options):
    """Results and gradients of a call against fp64."""
    given = [one.detach().requires_grad_() for one in given]
    bank, prefix, x, *weights = given
    count = torch.tensor(n_blocks, device=bank.device) if counted else n_blocks
    found = attn_res_bank(bank, count, prefix, *weights, scale=scale, layer_output=x, **options)
    results = [found.output, found.normalized, found.prefix]
    upstream = upstream_of(results)
    gradients = torch.autograd.grad(results, given, upstream, materialize_grads=True)
    wanted, wanted_gradients = exact(bank, n_blocks, prefix, x, *weights, upstream, scale, (found.output, found.prefix))
    depth.near(found.output.detach().cpu(), wanted[0], fp32=fp32)
    depth.near(found.normalized.detach().cpu(), wanted[1], fp32=fp32)
    assert not gradients[0][..., n_blocks:, :].any()
    for one, other, of in zip((gradients[0][..., :n_blocks, :], *gradients[1:]), wanted_gradients, given, strict=True):
        assert one.dtype == of.dtype
        depth.near(one.cpu(), other, fp32=fp32)
    return found
