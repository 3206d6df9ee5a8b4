"""How a loss is computed, a class for each way of tiling.py; a new way is a row here and in that enum, and a file."""

from __future__ import annotations

from npu_tiling import Device

from ..options import Options
from ..tiling import Tiling, Way
from .columns import Columns
from .exponentials import Exponentials
from .kept import KeptExponentials, KeptLogits, KeptProduct
from .loss import Inputs, Loss
from .product import Product
from .whole_rows import WholeRows

__all__ = ["WAYS", "Inputs", "Loss", "start"]

WAYS: dict[Way, type[Loss]] = {
    Way.WHOLE_ROWS: WholeRows,
    Way.EXPONENTIALS: Exponentials,
    Way.PRODUCT: Product,
    Way.KEPT_LOGITS: KeptLogits,
    Way.KEPT_EXPONENTIALS: KeptExponentials,
    Way.KEPT_PRODUCT: KeptProduct,
    Way.COLUMNS: Columns,
}


def start(inputs: Inputs, options: Options, tiling: Tiling, device: Device | None) -> Loss:
    """The way of a tiling, with its inputs."""
    return WAYS[tiling.way](inputs, options, tiling, device)
