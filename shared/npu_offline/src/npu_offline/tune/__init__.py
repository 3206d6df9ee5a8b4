"""Searches for the tiles with the shortest predicted time, among those that the compiler accepts."""

from .search import Candidate, Site, Tuned, search

__all__ = ["Candidate", "Site", "Tuned", "search"]
