"""The program that calculates for `sweep ui`: a process of its own, which answers line by line.

Fits, tables of layouts and their packages take more memory than a server should keep, and an answer
takes milliseconds in which a server should send other pages.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.cli.ui.calculators import Calculators
from orchestrator.core.errors import SpecInvalid, SweepError, UsageInvalid
from orchestrator.report.json_text import json_text

if TYPE_CHECKING:
    from typing import TextIO

# A refusal quotes what was asked, but not all of a long text.
MOST_SENTENCE_CHARACTERS = 600


def main() -> int:
    """Answer the lines of stdin about the sweep of the first argument, until they end."""
    serve(Calculators(db=None, sweep=sys.argv[1]), sys.stdin, sys.stdout)
    return 0


def serve(calculators: Calculators, questions: TextIO, answers: TextIO) -> None:
    """Read one JSON document a line, and write one for each."""
    for line in questions:
        answers.write(json_text(answer(calculators, json.loads(line))) + "\n")
        answers.flush()


def answer(calculators: Calculators, question: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a question asks for, or a status and the sentence of a refusal."""
    cell, fields = question["cell"], question["fields"]
    try:
        if question["wants"] == "page":
            return {"status": 200, "value": calculators.page(cell, fields)}
        return {"status": 200, "value": calculators.result(cell, fields)}
    except SweepError as exc:
        status = 400 if isinstance(exc, UsageInvalid | SpecInvalid) else 503
        return {"status": status, "text": f"{str(exc)[:MOST_SENTENCE_CHARACTERS]}."}
