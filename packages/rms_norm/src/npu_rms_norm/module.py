"""RMSNorm as a module, with the settings that well-known models use."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from npu_tiling import arguments
from torch import Tensor, nn

from .api import AddedRMSNorm, add_rms_norm, gated_rms_norm, rms_norm
from .call import CASTING_MODES
from .reference import ACTIVATIONS


class _Norm(nn.Module):
    """The parameters of both modules, and the options that both have."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        offset: float,
        casting_mode: str,
        elementwise_affine: bool,
        bias: bool,
        heads: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.hidden_size = arguments.whole("hidden_size", hidden_size, least=1)
        self.heads = arguments.whole("heads", heads, least=1, or_none=True)
        arguments.flags(elementwise_affine=elementwise_affine, bias=bias)
        arguments.one_of("casting_mode", casting_mode, CASTING_MODES)
        self.eps = arguments.number("eps", eps, least=0, finite=False)
        self.offset = arguments.number("offset", offset)
        self.casting_mode = casting_mode
        shape = (hidden_size,) if heads is None else (heads, hidden_size)
        for name, wanted in (("weight", elementwise_affine), ("bias", bias)):
            parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, parameter)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Makes offset + weight one, and the bias zero."""
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def _options(self) -> dict[str, Any]:
        return {"bias": self.bias, "offset": self.offset, "casting_mode": self.casting_mode}

    def extra_repr(self) -> str:
        parameters = {} if self.heads is None else {"heads": self.heads}
        parameters |= {"elementwise_affine": self.weight is not None} | ({} if self.bias is None else {"bias": True})
        options = {"eps": self.eps, **self._options()}
        del options["bias"]
        options |= parameters
        return ", ".join([str(self.hidden_size), *(f"{name}={value!r}" for name, value in options.items())])


class RMSNorm(_Norm):
    """`rms_norm` over the last dimension, with a learned weight.

    The parameter is `weight` [hidden_size], as in torch.nn.RMSNorm and the models of Hugging Face, and, if there is a bias,
    `bias`, as in torch.nn.LayerNorm.

    Args:
        hidden_size: D, the size of the last dimension.
        eps: added to the mean square.
        offset: added to the weight; the weight is initialised so that offset + weight is 1.
        casting_mode: "llama", "gemma" or "none"; see `rms_norm`.
        in_place: see `rms_norm`.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias; it starts at zero.
        heads: H, for x [..., H, D] and parameters [H, D], for each head its own; None: [D].
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = False,
        elementwise_affine: bool = True,
        bias: bool = False,
        heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, elementwise_affine, bias, heads, device, dtype)
        arguments.flags(in_place=in_place)
        self.in_place = in_place

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | AddedRMSNorm:
        """y for x [..., D]; with a residual, y and the new residual of `add_rms_norm`."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps, **self._options())
        return add_rms_norm(x, residual, self.weight, self.eps, **self._options())

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "in_place": self.in_place}


class _OfModel(RMSNorm):
    """The offset and the casting mode are a model's."""

    _variant: ClassVar[dict[str, Any]]

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, **self._variant, device=device, dtype=dtype)


class LlamaRMSNorm(_OfModel):
    """As Llama, Mistral, Qwen2 and Phi-3 have it."""

    _variant = {"casting_mode": "llama"}


class Qwen3RMSNorm(LlamaRMSNorm):
    """As Qwen3 has it, for hidden states and, over the head dimension, for queries and keys."""


class GemmaRMSNorm(_OfModel):
    """As Gemma 1, 2 and 3 have it: weights around zero, nothing rounded before the result."""

    _variant = {"offset": 1.0, "casting_mode": "gemma"}


class Olmo2RMSNorm(_OfModel):
    """As OLMo 2 has it: weighted in fp32 and rounded once, weights around one."""

    _variant = {"casting_mode": "gemma"}


class GatedRMSNorm(_Norm):
    """`gated_rms_norm` over the last dimension, with a learned weight.

    The parameter is `weight` [hidden_size], as in the models of Hugging Face.

    Args:
        activation: of the gate, "silu" or "sigmoid".
        norm_before_gate: whether the weighted norm is gated, or x; see `gated_rms_norm`.
        hidden_size, eps, offset, casting_mode, elementwise_affine, bias, heads, device, dtype: as of `RMSNorm`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float = 0.0,
        casting_mode: str = "llama",
        activation: str = "silu",
        norm_before_gate: bool = True,
        elementwise_affine: bool = True,
        bias: bool = False,
        heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, elementwise_affine, bias, heads, device, dtype)
        arguments.one_of("activation", activation, ACTIVATIONS)
        arguments.flags(norm_before_gate=norm_before_gate)
        self.activation = activation
        self.norm_before_gate = norm_before_gate

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """y for x and gate [..., D]."""
        return gated_rms_norm(x, gate, self.weight, self.eps, **self._options())

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), "activation": self.activation, "norm_before_gate": self.norm_before_gate}
