"""Property-based tests of operators with hypothesis: strategies for tensors, ways to call an operator, lengths of search.

`tensors` has the strategies that operators share: shapes, dtypes, layouts in memory. `ways` calls a function as programs do:
twice through one graph, under no_grad, checkpoint, torch.func. `search` tries a property on examples. `tolerance` bounds the
error of a result.
"""

from .search import PROFILES, Example, Profile, Search
from .tensors import Drawn, Layout, drawn, floats, layouts, materialise
from .tolerance import Expected, blurred, check, expect
from .ways import WAYS, Results, Way, call

__all__ = [
    "PROFILES",
    "WAYS",
    "Drawn",
    "Example",
    "Expected",
    "Layout",
    "Profile",
    "Results",
    "Search",
    "Way",
    "blurred",
    "call",
    "check",
    "drawn",
    "expect",
    "floats",
    "layouts",
    "materialise",
]
