"""How a loss is computed, a class for each way of tiling.py; a new way is a row here and in that enum, and a file."""

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

__all__ = ["WAYS", "LossInputs", "Loss", "start"]

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
    """The way that the tiling chooses, with its inputs."""
    tiling = choose(shape)
    return WAYS[tiling.way](inputs, options, tiling, device)
