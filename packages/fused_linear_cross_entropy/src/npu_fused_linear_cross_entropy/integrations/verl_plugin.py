"""The module that verl's entry point loads: it registers when it is imported."""

from .verl import register

register()
