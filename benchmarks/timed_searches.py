"""Runs `search_efficiency`, and adds what its searches took of the processor to its result.

`before_and_after` runs this in each of two checkouts, of which the older one may not have the file.
The program as a whole also reads the tables, and newer ones score how well a search tells layouts
apart that fit from those that do not: that is no part of a search.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import search_efficiency


class SearchTimer:
    """The CPU seconds and the launches of all searches."""

    def __init__(self) -> None:
        self.cpu_seconds = 0.0
        self.launches = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*arguments, **named)
            finally:
                self.cpu_seconds += time.process_time() - begin

        return called

    def counted(self, search: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            run = search(*arguments, **named)
            self.launches += len(run.best)
            return run

        return called


def main() -> None:
    timer, module = SearchTimer(), vars(search_efficiency)
    module["driver_of"] = timer.timed(module["driver_of"])
    module["search"] = timer.counted(timer.timed(module["search"]))
    search_efficiency.main()
    out = Path(sys.argv[sys.argv.index("--out") + 1])
    of_searches = {"cpu_seconds": timer.cpu_seconds, "launches": timer.launches}
    out.write_text(json.dumps({**json.loads(out.read_text()), "of_searches": of_searches}))


if __name__ == "__main__":
    main()
