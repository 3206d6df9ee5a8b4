"""What can go wrong, by name."""


class OfflineError(RuntimeError):
    """The base of every error of this package."""


class ToolchainMissingError(OfflineError):
    """A compiler version is not in the cache folder, or the host has no C compiler or no triton-ascend."""


class UnsupportedError(OfflineError):
    """The toolchain has no such target, or the emulator no such operation."""


class CompilationError(OfflineError):
    """The compiler refused a kernel for another reason than a buffer that is too small."""


class OutOfBoundsError(OfflineError):
    """An emulated kernel accessed global memory outside the storage of its arguments."""


class RaceError(OfflineError):
    """Two programs of one emulated launch accessed one address, and not both by reading or both atomically."""
