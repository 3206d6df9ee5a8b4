"""Makes what is not a package of its own, tools, importable by tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
