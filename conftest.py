"""Gives every test of the repository what testing/plugin.py has."""

import pytest

pytest.register_assert_rewrite("testing")
pytest_plugins = ["testing.plugin"]
