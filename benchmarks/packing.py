"""Measures how well gangs of many sizes are packed onto a cluster, on a virtual clock; prints JSON.

python -m benchmarks.packing [--trials 4104] [--nodes 64] [--seeds 5] [--out FILE.json]

The study is sweeps/playbook.yaml. Each of its 28 cells (8 to 512 GPUs, four models) has equally
many trials, those predicted fastest, and offers one at a time, as a search does. A trial is
predicted to hold its GPUs for a launch and its steps, or for a launch alone if its memory is
predicted not to fit. It holds them for that time with a log-normal error (standard deviation 0.3
of the logarithm). Two policies run the same trials with the same times:

- `packing`: core/machines/packing.py: the largest waiting gang has a reservation, others fill in.
- `first_come`: in the order in which cells asked; none starts before the first in line.

`makespan_over_bound`: end of the last trial over the lower bound, the larger of all GPU-seconds
divided by the GPUs and the longest trial. `used_share_until_tail`: share of the cluster's
GPU-seconds that trials held until no trial waited any more; `used_share`: until the end.
`longest_wait_starts`: most starts of other gangs between a gang's request and its start.
"""

from __future__ import annotations

import heapq
import json
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.machine import PROJECT, describe_machine, parser_of, write_result
from orchestrator.core.machines.packing import FreeSlots, Shape, Start, WaitingGang
from orchestrator.core.problem.hardware import DEVICES
from orchestrator.core.search.planner import plan_cell
from orchestrator.core.search.trial_cost import TrialCost
from orchestrator.core.sweepfile.spec_yaml import load
from orchestrator.core.trial.protocol import Device
from orchestrator.sweep.sharing import FIRST_TRIALS

SWEEP_FILE = PROJECT / "sweeps" / "playbook.yaml"
GPUS_PER_NODE = 8
ERROR_SD = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A trial as a job of a known duration."""

    shape: Shape
    predicted_seconds: float
    seconds: float

    @property
    def gpu_seconds(self) -> float:
        return self.shape.num_slots * self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How all jobs on a cluster ended."""

    makespan: float
    tail_began: float  # when the last job started
    used_until_tail: float  # GPU-seconds
    longest_wait_starts: int


Policy = Callable[[FreeSlots, Sequence[WaitingGang], float], Start | None]


def packing(free_slots: FreeSlots, waiting: Sequence[WaitingGang], now: float) -> Start | None:
    return free_slots.next_start(waiting, now=now)


def first_come(free_slots: FreeSlots, waiting: Sequence[WaitingGang], now: float) -> Start | None:
    """The gang that has waited longest, or none."""
    first = max(range(len(waiting)), key=lambda index: (waiting[index].passed_over, -index))
    found = free_slots.next_start([waiting[first]], now=now)
    return None if found is None else Start(index=first, nodes=found.nodes)


def simulate(queues: Sequence[Sequence[Job]], slots_of: dict[str, int], policy: Policy) -> Outcome:
    """Run the jobs of each queue in order, several at once. The policy sees the next of each."""
    free_slots = FreeSlots(slots_of)
    left = [deque(queue) for queue in queues]
    # Number of starts when each queue began to wait.
    since = [0] * len(left)
    running: list[tuple[float, int, Job]] = []  # a heap by end
    began: list[tuple[float, Job]] = []
    now, longest = 0.0, 0
    while True:
        shown = [place for place, queue in enumerate(left) if queue]
        waiting = [
            WaitingGang(
                shape=left[at][0].shape,
                seconds=left[at][0].predicted_seconds,
                passed_over=len(began) - since[at],
                is_first=len(queues[at]) - len(left[at]) < FIRST_TRIALS,
            )
            for at in shown
        ]
        start = policy(free_slots, waiting, now) if waiting else None
        if start is not None:
            at = shown[start.index]
            job = left[at].popleft()
            longest = max(longest, len(began) - since[at])
            free_slots.take(len(began), job.shape, start.nodes, ends_at=now + job.predicted_seconds)
            heapq.heappush(running, (now + job.seconds, len(began), job))
            began.append((now, job))
            since[at] = len(began)
        elif running:
            now, key, _ = heapq.heappop(running)
            free_slots.give_back(key)
        else:
            break
    tail = began[-1][0]
    used = sum(job.shape.num_slots * (min(at + job.seconds, tail) - at) for at, job in began)
    return Outcome(makespan=now, tail_began=tail, used_until_tail=used, longest_wait_starts=longest)


def lower_bound(queues: Sequence[Sequence[Job]], num_slots: int) -> float:
    jobs = [job for queue in queues for job in queue]
    return max(sum(job.gpu_seconds for job in jobs) / num_slots, max(job.seconds for job in jobs))


def playbook_jobs(num_trials: int, seed: int) -> list[list[Job]]:
    """The trials of the study, by cell."""
    spec = load(SWEEP_FILE.read_text(encoding="utf-8"), source=SWEEP_FILE.name)
    rng = random.Random(seed)
    cost = TrialCost.of(spec.measurement, launch_seconds=None, timed_steps=None)
    cells = spec.cells()
    queues = []
    for number, cell in enumerate(cells):
        shape = Shape.of(cell.num_gpus, gpus_per_node=GPUS_PER_NODE)
        candidates = plan_cell(
            spec,
            cell,
            hardware=DEVICES[spec.device],
            gpus_per_node=GPUS_PER_NODE,
            device=Device.CUDA,
        ).candidates
        wanted = num_trials * (number + 1) // len(cells) - num_trials * number // len(cells)
        queue = []
        for row in candidates.order[:wanted]:
            steps = (
                cost.num_steps * float(candidates.step_seconds[row])
                if candidates.fits[row]
                else 0.0
            )
            predicted = cost.launch_seconds + steps
            queue.append(
                Job(
                    shape=shape,
                    predicted_seconds=predicted,
                    seconds=predicted * rng.lognormvariate(0.0, ERROR_SD),
                )
            )
        queues.append(queue)
    return queues


def score(queues: Sequence[Sequence[Job]], num_nodes: int, policy: Policy) -> dict[str, float]:
    num_slots = num_nodes * GPUS_PER_NODE
    began = time.process_time()
    found = simulate(
        queues, {f"node-{number}": GPUS_PER_NODE for number in range(num_nodes)}, policy
    )
    used = sum(job.gpu_seconds for queue in queues for job in queue)
    return {
        "makespan_seconds": round(found.makespan, 1),
        "makespan_over_bound": round(found.makespan / lower_bound(queues, num_slots), 4),
        "used_share_until_tail": round(found.used_until_tail / (num_slots * found.tail_began), 4),
        "used_share": round(used / (num_slots * found.makespan), 4),
        "longest_wait_starts": found.longest_wait_starts,
        "cpu_seconds": round(time.process_time() - began, 3),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=4104)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    machine = describe_machine()
    by_policy: dict[str, list[dict[str, float]]] = {"packing": [], "first_come": []}
    num_jobs = 0
    for seed in range(arguments.seeds):
        queues = playbook_jobs(arguments.trials, seed)
        num_jobs = sum(map(len, queues))
        by_policy["packing"].append(score(queues, arguments.nodes, packing))
        by_policy["first_come"].append(score(queues, arguments.nodes, first_come))
    result = {
        "num_trials": num_jobs,
        "num_gpus": arguments.nodes * GPUS_PER_NODE,
        "median": {
            name: {key: statistics.median(s[key] for s in scores) for key in scores[0]}
            for name, scores in by_policy.items()
        },
        "by_seed": by_policy,
    }
    print(json.dumps(result, indent=1))
    write_result(arguments.out, benchmark="packing", machine=machine, result=result)


if __name__ == "__main__":
    main()
