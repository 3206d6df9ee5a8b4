"""The errors that tilings and launches raise."""


class UnknownDeviceError(LookupError):
    """A chip that the table does not know; the message names the override."""


class TileTooLargeError(ValueError):
    """Not even the smallest tile fits the chip; the message says what exceeds what.

    Attributes:
        needed: bytes that the smallest tile takes; 0: not known.
    """

    def __init__(self, message: str = "", needed: int = 0) -> None:
        super().__init__(message)
        self.needed = needed


class UnifiedBufferError(TileTooLargeError):
    """Ascend: the smallest tile needs more Unified Buffer than a vector core has."""


class GPUResourcesError(TileTooLargeError):
    """CUDA: the smallest tile needs more shared memory, registers or resident programs than the GPU has."""


class MissingTritonError(ImportError):
    """A kernel was to be launched and no Triton works here; the message has the commands that install one."""
