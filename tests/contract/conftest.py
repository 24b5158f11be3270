"""Imports the harness for what it preloads: processes of these tests then start without loading compiled code."""

from tests.helpers import harness

__all__ = ["harness"]
