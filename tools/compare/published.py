"""Times that were published for an Ascend910B4, and the floors that go with them.

The authors of Liger-Kernel's Ascend kernels measured them with its benchmark scripts, and published them in pull requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SOC = "Ascend910B4"
CUBE_SUSTAINED = 221.5e12  # bf16 matmul of PyTorch, operations a second; where it was published has not been noted
Operator = Literal["rms_norm", "embedding", "attn_res", "fused_linear_cross_entropy"]
Direction = Literal["forward", "backward", "full"]


#: Where an operator's times were published, and what was found there when it was looked up on 22 November 2026.
SOURCES: dict[Operator, str] = {
    "rms_norm": "linkedin/Liger-Kernel#1099, the first pull request of this kernel; its times were not found again",
    "embedding": (
        "linkedin/Liger-Kernel#1028 and #1036: the same shapes; forward 157 to 160 ms, and two days later 42.6 to 43.5;"
        " the run of 42.7 and 44.1 was not found again"
    ),
    "attn_res": (
        "linkedin/Liger-Kernel#1210, 30 April 2026: the same shapes; both directions in one 2.88, 5.67, 11.2 and 22.4 ms;"
        " the times of each alone were not found again"
    ),
    "fused_linear_cross_entropy": (
        "linkedin/Liger-Kernel#1164, the first pull request of this kernel; its times were not found again"
    ),
}


@dataclass(frozen=True)
class Published:
    """One published measurement. Times in seconds.

    Attributes:
        operator, direction: what was measured.
        size: rms_norm: width, of 2048 rows in bf16. embedding: rows of the table, for 16384 indices and 768 columns in
            fp32. attn_res: tokens, of 8 blocks of 4096 columns in bf16. fused_linear_cross_entropy: tokens, for a width of
            4096 and a vocabulary of 128256 in bf16.
        existing: of the kernels for Ascend that their authors measured.
        pytorch: of plain PyTorch on the same chip.
        floor: bytes that must move over 0.8 TB/s, or operations over 245.8 TFLOP/s.
    """

    operator: Operator
    direction: Direction
    size: int
    existing: float
    pytorch: float
    floor: float


def _rows(
    operator: Operator, direction: Direction, sizes: tuple[int, ...], *columns: tuple[float, ...]
) -> tuple[Published, ...]:
    milliseconds = zip(*columns, strict=True)
    return tuple(
        Published(operator, direction, size, *(time / 1e3 for time in times))
        for size, times in zip(sizes, milliseconds, strict=True)
    )


_WIDTHS, _TOKENS = (512, 1024, 2048), (1024, 2048, 4096, 8192)
PUBLISHED: tuple[Published, ...] = (
    *_rows("rms_norm", "forward", _WIDTHS, (0.258, 0.253, 0.267), (0.160, 0.164, 0.191), (0.005, 0.011, 0.021)),
    *_rows("rms_norm", "backward", _WIDTHS, (0.392, 0.386, 0.457), (0.405, 0.408, 0.605), (0.008, 0.016, 0.032)),
    *_rows("embedding", "forward", (1024, 131072), (42.7, 44.1), (0.081, 0.239), (0.067, 0.122)),
    *_rows(
        "attn_res", "forward", _TOKENS, (0.913, 1.76, 3.52, 6.97), (4.38, 8.89, 17.8, 41.2), (0.094, 0.189, 0.377, 0.755)
    ),
    *_rows("attn_res", "backward", _TOKENS, (1.56, 3.04, 6.04, 11.9), (10.3, 20.3, 41.0, 81.7), (0.178, 0.357, 0.713, 1.43)),
    *_rows(
        "fused_linear_cross_entropy", "full", (4096, 8192, 16384), (1178, 1424, 1977), (97.7, 175, 332), (52.5, 105, 210)
    ),
)
