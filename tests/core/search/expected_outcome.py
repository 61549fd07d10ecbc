"""What a proposer expects of the row that it chooses."""

from __future__ import annotations

from orchestrator.core.problem.arrays import Mask
from orchestrator.core.search.proposer import ExpectedOutcome, Proposer


def expected(proposer: Proposer, open_rows: Mask) -> ExpectedOutcome:
    """Return what is expected of the row that is chosen among the open ones."""
    _, reason = proposer.choose(open_rows)
    assert isinstance(reason, ExpectedOutcome), reason
    return reason
