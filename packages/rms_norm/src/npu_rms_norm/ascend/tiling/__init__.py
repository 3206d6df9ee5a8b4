"""Tilings on Ascend: the first way of a table that fits the Unified Buffer, and its sizes."""
