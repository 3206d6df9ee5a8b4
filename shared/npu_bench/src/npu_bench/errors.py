"""What goes wrong in a benchmark."""


class BenchError(Exception):
    """The benchmark cannot be run as asked; the message says what to change."""


class UnavailableError(Exception):
    """A provider cannot run a case here; the message says why. Raised by the function that builds the provider."""
