"""A class for each `Way` of the cross entropy. A new way is a member of the enum in tiling.py, a row of its table, a class,
and a row here. Distributions and distillation start their ways themselves.
"""

from __future__ import annotations

from npu_tiling import Device

from ..calls import LossInputs
from ..options import Options
from ..shape import Shape
from ..tiling import Way, choose
from .columns import Columns, WholeRows
from .exponentials import Exponentials
from .kept import KeptExponentials, KeptLogits, KeptProduct
from .loss import Loss
from .product import Product

__all__ = ["WAYS", "Loss", "start"]

WAYS: dict[Way, type[Loss]] = {
    Way.WHOLE_ROWS: WholeRows,
    Way.EXPONENTIALS: Exponentials,
    Way.PRODUCT: Product,
    Way.KEPT_LOGITS: KeptLogits,
    Way.KEPT_EXPONENTIALS: KeptExponentials,
    Way.KEPT_PRODUCT: KeptProduct,
    Way.COLUMNS: Columns,
}


def start(inputs: LossInputs, options: Options, shape: Shape, device: Device | None) -> Loss:
    """The class that the tiling chooses, with its inputs."""
    tiling = choose(shape)
    return WAYS[tiling.way](inputs, options, tiling, device)
