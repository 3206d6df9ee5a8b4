"""Makes the modules beside the tests importable, and lets their assertions say what differs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("large")
