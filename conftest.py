"""Gives every test of the repository what testing/plugin.py and testing/collection.py have."""

import pytest

pytest.register_assert_rewrite("testing")
pytest_plugins = ["testing.plugin", "testing.collection"]
