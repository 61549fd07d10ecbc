"""A launcher for the tests of workload command."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.node.launcher import NodeLauncher
from tests.node.launching import survivors, tree_of, with_start_times


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeLauncher]:
    """One for the tests of a module. Nothing that it started is left."""
    launcher = NodeLauncher(tmp_path_factory.mktemp("runs"), node="node-a")
    yield launcher
    seen = with_start_times(tree_of(launcher.root))
    launcher.close()
    assert survivors(seen.items(), root=launcher.root) == []
