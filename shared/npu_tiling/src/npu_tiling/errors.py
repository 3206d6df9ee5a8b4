"""The errors that tilings and launches raise."""


class UnknownDeviceError(LookupError):
    """A chip that the table does not know; the message names the override."""


class UnifiedBufferError(ValueError):
    """Not even the smallest tile fits the Unified Buffer; the message says what needs how many bytes of how many."""


class MissingTritonError(ImportError):
    """A kernel was to be launched and no Triton works here; the message has the commands that install one."""
