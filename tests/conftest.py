"""Order of the tests, and what every test gets: fast ones first, no process left behind by accident."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Plain tests, then those that start processes, then slow ones; within each the order in the files."""
    items.sort(key=_weight)


def _weight(item: pytest.Item) -> int:
    if item.get_closest_marker("slow"):
        return 2
    return 1 if item.get_closest_marker("processes") else 0
