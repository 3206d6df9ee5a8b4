"""Search for the tiles of which the time model predicts the least, among those that the compiler accepts."""

from .search import Candidate, Site, Tuned, search

__all__ = ["Candidate", "Site", "Tuned", "search"]
