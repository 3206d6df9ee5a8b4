"""How long a launch should take on a chip, predicted from what the compiler made of its kernel."""

from .costs import ChipCosts, costs_of
from .model import Timing, time_launch
from .simulation import Event

__all__ = ["ChipCosts", "Event", "Timing", "costs_of", "time_launch"]
