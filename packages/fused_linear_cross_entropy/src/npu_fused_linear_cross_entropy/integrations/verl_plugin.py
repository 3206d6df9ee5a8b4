"""What verl's entry point loads: registers when it is imported."""

from .verl import register

register()
