"""Property-based tests of operators: what is drawn, how an operator is called, how long is searched (hypothesis).

`tensors` has the strategies that every operator shares: shapes, dtypes, how a tensor lies in memory. `ways` calls a function
as programs do: twice through one graph, under no_grad, checkpoint, torch.func. `search` tries a property on examples;
`tolerance` says how far a result may be off.
"""

from .search import PROFILES, Profile, Search
from .tensors import Drawn, Layout, drawn, floats, layouts, materialise
from .tolerance import Expected, blurred, check, expect
from .ways import WAYS, Results, Way, call

__all__ = [
    "PROFILES",
    "WAYS",
    "Drawn",
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
