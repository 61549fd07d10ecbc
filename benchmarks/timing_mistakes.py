"""Counts which mistakes of timing are found, and how often an honest program is marked too.

python -m benchmarks.timing_mistakes [--honest 20000] [--seeds 25] [--out FILE.json]

Simulated programs of workload command with the default plan: their rank looks for lines, ends them
early, and judges what they told, in the first trial of a cell and in a later one. Honest programs
have random noise, first steps, pauses for checkpoints inside or outside of the clock, garbage
collection, waits for data, buffers, lines for several steps, starts and ends.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from random import Random
from typing import Any

from benchmarks.machine import describe_machine, parser_of, write_result
from benchmarks.simulated_timing import CPU, GPU, Trainer, WrongTrainer, judged

STEPS = (0.03, 0.1, 0.5, 2.0)
# The share of the time in pauses, outside of the clock or at single steps.
MOST_PAUSE = 1 / 3
REASONS_SHOWN = 5
ACCUMULATED = (2, 4, 16)
# By mistake: the method of WrongTrainer, and the values of what it depends on.
MISTAKES: Mapping[str, tuple[str, Mapping[str, Sequence[Any]]]] = {
    "a line for each micro-batch": ("micro_batches", {"accumulated": ACCUMULATED}),
    "a numbered line for each micro-batch": (
        "numbered_micro_batches",
        {"accumulated": ACCUMULATED},
    ),
    "the time of one micro-batch": ("one_micro_batch", {"accumulated": ACCUMULATED}),
    "a line for several steps, with their sum": ("several_steps", {"distance": (2, 3, 5, 10)}),
    "a line for several steps, with their mean": ("mean_of_several", {"distance": (2, 3, 5)}),
    "a clock that does not wait": ("not_synchronised", {"part": (0.05, 0.2, 0.5)}),
    "the same, in groups of lines": (
        "not_synchronised",
        {"part": (0.05, 0.2, 0.5), "buffered": (2, 5, 10)},
    ),
    "a clock that waits now and then": (
        "synchronised_now_and_then",
        {"part": (0.05, 0.2), "distance": (3, 5, 10, 20)},
    ),
    "milliseconds": ("milliseconds", {}),
    "the time since the start": ("since_the_start", {}),
    "the mean of all steps so far": ("mean_so_far", {"first_step": (20.0,)}),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--honest", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=25)
    arguments = parser.parse_args()
    machine = describe_machine()
    of_honest = honest_marked(arguments.honest)
    print("honest:", json.dumps(of_honest), flush=True)
    found = {}
    for name in MISTAKES:
        found[name] = marked(name, seeds=arguments.seeds)
        print(name, json.dumps(found[name]), flush=True)
    result = {
        "honest": arguments.honest,
        "honest_marked": of_honest,
        "seeds": arguments.seeds,
        "marked": found,
    }
    write_result(arguments.out, benchmark="timing_mistakes", machine=machine, result=result)


def honest_marked(num: int, *, first_seed: int = 0) -> dict[str, Any]:
    """Return how many of so many honest programs are marked, by the time that they pause.

    The first reasons are returned with them.
    """
    found: dict[str, Any] = {}
    for seed in range(first_seed, first_seed + num):
        random = Random(seed)
        trainer = honest(random)
        plan = random.choice((CPU, GPU))
        kind = "pauses most of the time" if trainer.pause_share > MOST_PAUSE else "others"
        one = found.setdefault(kind, {"programs": 0, "marked": 0, "reasons": []})
        reason = judged(trainer, random, plan=plan, counts_lines=random.random() < 0.5)
        one["programs"] += 1
        if reason is not None:
            one["marked"] += 1
            one["reasons"] += [f"seed {seed}: {reason}"] * (len(one["reasons"]) < REASONS_SHOWN)
    return found


def honest(random: Random) -> Trainer:
    """Return a random program that tells its steps as they are."""
    step = 0.01 * 1000 ** random.random()
    known: dict[str, Any] = {
        "step": step,
        "noise": random.choice((0.002, 0.01, 0.03, 0.1)),
        "accumulated": random.choice((1, 1, 2, 8, 64)),
        "start": random.choice((0.3, 3.0, 40.0)),
        "first_step": random.choice((0.0, 5 * step, 30.0)),
        "one_more": random.random() < 0.2,
        "names_num_steps": random.random() < 0.7,
        "buffered": random.choice((1, 1, 1, 1, 2, 5, 10, 1000)),
        "teardown": random.choice((0.01, 0.5, 20.0)),
    }
    every = known["every"] = random.choice((1,) * 9 + (10,))
    if random.random() < 0.3:
        pause_every = every * random.randint(4, 25)
        known |= {"pause_every": pause_every, "pause": random.choice((0.3, 3.0, 20.0))}
    if random.random() < 0.2:
        stalls, length = random.choice((0.01, 0.03, 0.1)), random.choice((1, 5, 25))
        known |= {"stalls": stalls, "stall": step * length}
    if random.random() < 0.2:
        # In the clock, and less than a third of the time.
        collects_every = random.randint(2, 20)
        collecting = random.uniform(0, 0.4) * collects_every * step
        known |= {"collects_every": collects_every, "collecting": collecting}
    return Trainer(**known)


def marked(name: str, *, seeds: int) -> dict[str, Any]:
    """Return the share of a mistake that is found in the first trial of a cell, and in later ones.

    With each value of what it depends on, and in steps of each length.
    """
    run, values = MISTAKES[name]
    shares: dict[str, Any] = {}
    for counts_lines in (True, False):
        missed: Counter[str] = Counter()
        num = num_found = 0
        for known in _combinations(values):
            for step, seed in product(STEPS, range(seeds)):
                trainer = WrongTrainer(step=step, noise=0.02, **known)
                random = Random(seed)
                is_found = judged(trainer, random, counts_lines=counts_lines, run=run) is not None
                num, num_found = num + 1, num_found + is_found
                if not is_found:
                    missed[" ".join(f"{key}={one}" for key, one in known.items())] += 1
        which = "first trial" if counts_lines else "later trial"
        shares[which] = {"marked": round(num_found / num, 4), "missed": dict(missed)}
    return shares


def _combinations(values: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for chosen in product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


if __name__ == "__main__":
    main()
