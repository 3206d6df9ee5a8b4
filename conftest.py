"""Gives every test of the repository the fixtures and options of testing/plugin.py."""

import pytest

pytest.register_assert_rewrite("testing")
pytest_plugins = ["testing.plugin"]
