"""Named tuples as results of exported programs. Imports torch; `npu_tiling` itself does not."""

from __future__ import annotations

from typing import TypeVar

from torch.utils import _pytree

T = TypeVar("T", bound=tuple[object, ...])


def exported(kind: type[T]) -> type[T]:
    """Let `torch.export.save` write programs that return a named tuple of this kind; a decorator.

    Who loads such a program imports the tuple's module first. An old PyTorch that cannot save named tuples stays as it is.
    """
    register = getattr(_pytree, "_register_namedtuple", None)
    if register is not None:
        register(kind, serialized_type_name=f"{kind.__module__}.{kind.__qualname__}")
    return kind
