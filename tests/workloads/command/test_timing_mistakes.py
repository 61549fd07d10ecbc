"""The mistakes that people make when they time their training: none is measured without a mark."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest

from orchestrator.core.problem.layout import Layout
from orchestrator.core.sweepfile.measurement_section import Measuring
from orchestrator.core.trial.cell_plausibility import ToldLayout, judge_cell
from orchestrator.core.trial.failure_kinds import Failure, FailureKind
from orchestrator.core.trial.line_count import counting_plan
from orchestrator.core.trial.measurement import Measurement
from orchestrator.core.trial.protocol import Device, MeasurementPlan
from orchestrator.node.launcher import NodeLauncher
from tests.workloads.command.programs import outcome_of

LAYOUT = Layout(grad_accum_steps=4)
# Enough steps for a pace; 25 % are enough, since the machine may be busy.
PLAN = MeasurementPlan(warmup_steps=2, min_steps=8, max_steps=12, relative_confidence=0.25)

HONEST = """
for step in range(num_steps):
    began = time.perf_counter()
    work()
    tell(step_seconds=time.perf_counter() - began, step=step)
"""
# What the program does, and what its mark or failure says.
MISTAKES = {
    "milliseconds for seconds": (
        """
        for step in range(num_steps):
            began = time.perf_counter()
            work()
            tell(step_seconds=1000 * (time.perf_counter() - began))
        """,
        "milliseconds? Seconds are wanted",
    ),
    "a clock that does not wait for the device": (
        """
        for step in range(num_steps):
            began = time.perf_counter()
            work(0.005)  # the launches
            seconds = time.perf_counter() - began
            work()  # the device
            tell(step_seconds=seconds)
        """,
        "call torch.cuda.synchronize() before you read the clock",
    ),
    "a step time that shrinks, since the clock stops before the device is done": (
        """
        for step in range(num_steps):
            began = time.perf_counter()
            work(0.15 * 0.6**step)
            seconds = time.perf_counter() - began
            work(0.15 - 0.15 * 0.6**step)
            tell(step_seconds=seconds)
        """,
        "torch.cuda.synchronize()",
    ),
    "the time of one micro-batch": (
        """
        for step in range(num_steps):
            for micro_batch in range(accumulated):
                began = time.perf_counter()
                work()
                seconds = time.perf_counter() - began
            tell(step_seconds=seconds)
        """,
        "the time of one micro-batch? A step has 4",
    ),
    "a line for each micro-batch": (
        """
        for step in range(num_steps):
            for micro_batch in range(accumulated):
                began = time.perf_counter()
                work(0.03)
                tell(step_seconds=time.perf_counter() - began, step=step)
        """,
        "a line: one line for each optimizer step is wanted",
    ),
    "a number for each micro-batch in the document": (
        """
        times = []
        for micro_batch in range(num_steps * accumulated):
            began = time.perf_counter()
            work(0.005)
            times.append(time.perf_counter() - began)
        json.dump({"step_seconds": times}, open(os.environ["SWEEP_RESULT_FILE"], "w"))
        """,
        "one for each of the 4 micro-batches of a step?",
    ),
    "the time of several steps in each line": (
        """
        time.sleep(5)  # to start
        times = [0.4]
        for step in range(num_steps):
            began = time.perf_counter()
            work(0.4)
            times.append(time.perf_counter() - began)
            tell(step_seconds=times[-1] + times[-2])
        """,
        "the time of 2 steps?",
    ),
    "a line for several steps": (
        """
        for step in range(num_steps // 2):
            began = time.perf_counter()
            work(0.1)
            tell(step_seconds=time.perf_counter() - began)
        """,
        "one line for 2 steps?",
    ),
    "a line for several steps, with their numbers": (
        """
        for step in range(2, num_steps + 1, 2):
            began = time.perf_counter()
            work(0.3)
            tell(step_seconds=time.perf_counter() - began, iteration=step)
        """,
        "rise by 2 a line",
    ),
    "the time since the start": (
        """
        began = time.perf_counter()
        for step in range(num_steps):
            work()
            tell(step_seconds=time.perf_counter() - began)
        """,
        "the time since the start?",
    ),
    "tokens of one rank for those of all": (
        """
        times = []
        for step in range(num_steps):
            began = time.perf_counter()
            work(0.02)
            times.append(time.perf_counter() - began)
        tokens = 128 * accumulated // 4
        json.dump({"step_seconds": times, "tokens_per_step": tokens},
                  open(os.environ["SWEEP_RESULT_FILE"], "w"))
        """,
        "tokens_per_step is 128, and the layout has 512",
    ),
    "compilation in the timed steps": (
        """
        for step in range(num_steps):
            began = time.perf_counter()
            work(0.6 if step < 7 else 0.1)
            tell(step_seconds=time.perf_counter() - began)
        """,
        "raise measurement.warmup_steps",
    ),
    "the mean of all steps so far, with the first": (
        """
        began = time.perf_counter()
        for step in range(num_steps):
            work(4.0 if step == 0 else 0.1)
            tell(step_seconds=(time.perf_counter() - began) / (step + 1))
        """,
        "optimizer step",
    ),
    "one mean for every step": (
        """
        began = time.perf_counter()
        for step in range(num_steps):
            work(0.02)
        mean = (time.perf_counter() - began) / num_steps
        json.dump({"step_seconds": [mean] * num_steps}, open(os.environ["SWEEP_RESULT_FILE"], "w"))
        """,
        "no clock shows that",
    ),
    "a clock that is set back": (
        """
        for step in range(num_steps):
            began = time.time()
            work()
            tell(step_seconds=time.time() - 3600 * (step == 5) - began)
        """,
        "time.perf_counter(), not time.time()",
    ),
    "text for numbers": (
        """
        for step in range(num_steps):
            began = time.perf_counter()
            work(0.02)
            tell(step_seconds=f"{time.perf_counter() - began:.4f}")
        """,
        "the number itself is wanted",
    ),
    "text for numbers in the document": (
        """
        json.dump({"step_seconds": ["0.5"] * 9}, open(os.environ["SWEEP_RESULT_FILE"], "w"))
        """,
        "should be a valid number",
    ),
    "more than the device can do": (
        """
        for step in range(num_steps):
            work(0.02)
        times = [random.uniform(1e-6, 1.01e-6) for step in range(num_steps)]
        json.dump({"step_seconds": times, "peak_flops": 1e12, "peak_flops_source": "table: mine"},
                  open(os.environ["SWEEP_RESULT_FILE"], "w"))
        """,
        "more than the device can do",
    ),
}


# Mistakes that a program shows only if it is not ended early.
HIDDEN = {
    "a line for each micro-batch, without a number": (
        """
        for micro_batch in range(num_steps * accumulated):
            began = time.perf_counter()
            work(0.02)
            tell(step_seconds=time.perf_counter() - began)
        """,
        "one for each of the 4 micro-batches of a step?",
    ),
    "a line for each micro-batch, with its own number": (
        """
        for micro_batch in range(num_steps * accumulated):
            began = time.perf_counter()
            work(0.02)
            tell(step_seconds=time.perf_counter() - began, step=micro_batch)
        """,
        "If these are micro-batches, write one line after all 4 of a step",
    ),
    "a line for several steps, with their time": (
        """
        for step in range(num_steps // 5):
            began = time.perf_counter()
            work(0.1)
            tell(step_seconds=time.perf_counter() - began)
        """,
        "one line for 5 steps?",
    ),
    "few lines, each for many steps": (
        """
        for step in range(num_steps // 10):
            began = time.perf_counter()
            work(0.1)
            tell(step_seconds=time.perf_counter() - began)
        """,
        "one line for 11 steps?",
    ),
    "a clock that does not wait, and lines that are flushed now and then": (
        """
        lines = []
        for step in range(num_steps):
            began = time.perf_counter()
            work(0.02)  # the launches
            lines.append(time.perf_counter() - began)
            work(0.08)  # the device
            if step % 5 == 4:
                with open(os.environ["SWEEP_METRICS_FILE"], "a") as file:
                    file.writelines(json.dumps({"step_seconds": one}) + "\\n" for one in lines)
                lines = []
        """,
        "its lines came 5 at a time",
    ),
    "a clock that waits for the device at each fifth step": (
        """
        for step in range(num_steps):
            began = time.perf_counter()
            work(0.05)
            if step % 5 == 4:
                work(0.8)
            tell(step_seconds=time.perf_counter() - began)
        """,
        "one of 5 steps takes",
    ),
}
# What a sweep file without a word about measuring asks for, in the first trial of a cell.
DEFAULT = Measuring().plan(Device.CPU)
FIRST = counting_plan(DEFAULT, predicted_seconds=0.1, steps_per_line=1)
# The same if steps are predicted to take long.
FEW = counting_plan(DEFAULT, predicted_seconds=10.0, steps_per_line=1)
# On a busy machine one or two steps of these may be long by accident.
SOME = counting_plan(DEFAULT, predicted_seconds=1.5, steps_per_line=1)
SLOW = "a clock that waits for the device at each fifth step"


# The programs mostly sleep, so some of them run at the same time.
AT_ONCE = 3
Outcome = Measurement | Failure
OutcomeOf = Callable[[str], Outcome]


@pytest.fixture(scope="module")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleQueue[NodeLauncher]]:
    made = [
        NodeLauncher(tmp_path_factory.mktemp("runs"), node=f"node-{number}")
        for number in range(AT_ONCE)
    ]
    idle: SimpleQueue[NodeLauncher] = SimpleQueue()
    for launcher in made:
        idle.put(launcher)
    yield idle
    for launcher in made:
        launcher.close()


@pytest.fixture
def launcher(launchers: SimpleQueue[NodeLauncher]) -> Iterator[NodeLauncher]:
    taken = launchers.get()
    yield taken
    launchers.put(taken)


@pytest.fixture(scope="module")
def started(
    request: pytest.FixtureRequest, launchers: SimpleQueue[NodeLauncher]
) -> Iterator[dict[tuple[str, str], Future[Outcome]]]:
    """The outcomes of all mistakes that this run of the tests asks for, by test and mistake."""

    def run(run_one: Callable[[NodeLauncher, str], Outcome], mistake: str) -> Outcome:
        launcher = launchers.get()
        try:
            return run_one(launcher, mistake)
        finally:
            launchers.put(launcher)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            (item.originalname, mistake): pool.submit(run, RUNS[item.originalname], mistake)
            for item in request.session.items
            if isinstance(item, pytest.Function) and item.module is request.module
            if item.originalname in RUNS
            for mistake in [item.callspec.params["mistake"]]
        }


@pytest.fixture
def outcome(
    request: pytest.FixtureRequest, started: dict[tuple[str, str], Future[Outcome]], mistake: str
) -> Outcome:
    return started[request.node.originalname, mistake].result()


# Half of these are enough for an interval, and none for this precision: nothing ends the program.
MANY = PLAN.model_copy(update={"max_steps": 22, "relative_confidence": 1e-9})


def told(launcher: NodeLauncher, program: str, **known: Any) -> Measurement | Failure:
    return outcome_of(launcher, program, **{"plan": PLAN, "layout": LAYOUT} | known)


def run_as_asked(launcher: NodeLauncher, mistake: str) -> Outcome:
    program, _ = MISTAKES[mistake]
    return told(launcher, program, plan=MANY if mistake == "a line for several steps" else PLAN)


def run_by_default(launcher: NodeLauncher, mistake: str) -> Outcome:
    program, _ = (MISTAKES | HIDDEN)[mistake]
    # All steps run, so each takes a third of its time here.
    quicker = "def work(seconds=0.15): time.sleep(seconds * random.uniform(0.98, 1.02) / 3)\n"
    source = ("" if mistake in HIDDEN else quicker) + textwrap.dedent(program)
    return told(launcher, source, plan=SOME if mistake == SLOW else FIRST)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_marked_or_refused_with_its_fix(outcome: Outcome, mistake: str) -> None:
    _, said = MISTAKES[mistake]
    if isinstance(outcome, Failure):
        assert outcome.kind is FailureKind.BAD_RESULT
        reason = outcome.message
    else:
        assert outcome.implausible is not None and not outcome.confident
        reason = outcome.implausible
    assert said in reason
    assert "\n" not in reason


# After the first trial's 53 steps, seven that compile change no median.
RIGHT_AT_LAST = "compilation in the timed steps"


@pytest.mark.parametrize("mistake", sorted({*MISTAKES, *HIDDEN} - {RIGHT_AT_LAST}))
def test_the_first_trial_of_a_cell_is_marked_or_refused_by_default(
    outcome: Outcome, mistake: str
) -> None:
    if isinstance(outcome, Failure):
        assert outcome.kind is FailureKind.BAD_RESULT
        return
    assert outcome.implausible is not None and not outcome.confident
    assert mistake not in HIDDEN or HIDDEN[mistake][1] in outcome.implausible


# What each test of a mistake runs.
RUNS = {
    test_a_mistake_is_marked_or_refused_with_its_fix.__name__: run_as_asked,
    test_the_first_trial_of_a_cell_is_marked_or_refused_by_default.__name__: run_by_default,
}


def test_a_program_without_a_mistake_is_believed(launcher: NodeLauncher) -> None:
    outcome = told(launcher, HONEST)
    assert isinstance(outcome, Measurement) and outcome.implausible is None, outcome
    assert outcome.unchecked is None


def test_a_clock_that_does_not_wait_is_said_to_be_unchecked_if_all_lines_come_at_the_end(
    launcher: NodeLauncher,
) -> None:
    program = """
    times = []
    for step in range(num_steps):
        began = time.perf_counter()
        time.sleep(0.001)
        times.append(time.perf_counter() - began)
        work(0.05)
    for seconds in times:
        tell(step_seconds=seconds)
    """
    outcome = told(launcher, program)
    assert isinstance(outcome, Measurement) and outcome.implausible is None, outcome
    assert outcome.unchecked is not None
    assert outcome.unchecked.startswith("all steps arrived at once")


@pytest.mark.parametrize("ending", ["", "time.sleep(60)", "os.abort()"])
def test_a_program_without_a_mistake_is_believed_in_the_first_trial_of_a_cell(
    launcher: NodeLauncher, ending: str
) -> None:
    """It writes one line more than it was asked for, as trainers do that log step 0."""
    program = f"""
for step in range(num_steps + 1):
    began = time.perf_counter()
    work()
    tell(step_seconds=time.perf_counter() - began, step=step)
{ending}
"""
    outcome = told(launcher, program, plan=FEW)
    assert isinstance(outcome, Measurement) and outcome.implausible is None, outcome
    assert outcome.step_time.num_steps == FEW.max_steps


def test_a_program_that_goes_on_without_an_end_is_marked_if_it_was_told_when_to_end(
    launcher: NodeLauncher,
) -> None:
    program = """
        while True:
            began = time.perf_counter()
            work(0.02)
            tell(step_seconds=time.perf_counter() - began)
        """
    outcome = told(launcher, program, plan=FIRST)
    assert isinstance(outcome, Measurement) and outcome.implausible is not None
    said = 'If it ran more steps, have it run as many as it is asked for (write "{num_steps}" in'
    assert said in outcome.implausible
    # One that was told no number, or has one micro-batch in a step, runs as long as it likes.
    alone = told(launcher, program, plan=FIRST, layout=Layout(micro_batch_size=4))
    assert isinstance(alone, Measurement) and alone.implausible is None, alone


# As ranks do at the end of a step, each waits for the other.
EACH_RANK_WRITES = """
pipes = [os.pipe(), os.pipe()]
for rank in (0, 1):
    if rank == 1 or os.fork() == 0:
        random.seed(rank)
        time.sleep(0.5)
        for step in range(200):
            began = time.perf_counter()
            work(0.05)
            os.write(pipes[rank][1], b".")
            os.read(pipes[1 - rank][0], 1)
            tell(step_seconds=time.perf_counter() - began)
        break
"""


def test_short_steps_that_each_rank_writes_are_found_by_the_pace_after_they_are_enough(
    launcher: NodeLauncher,
) -> None:
    """Eight steps are enough here, and too few for a pace; the lines after them show it."""
    outcome = told(
        launcher,
        EACH_RANK_WRITES,
        options={"processes": "per_node", "env": {"RANK": "{node_rank}"}},
        one_rank_per_node=True,
        world_size=2,
        layout=Layout(data_parallel_size=2),
        plan=PLAN.model_copy(update={"max_steps": 50, "relative_confidence": 0.9}),
    )
    reason = outcome.message if isinstance(outcome, Failure) else outcome.implausible
    # On a busy machine the lines are read too seldom for a pace, and their sum shows it.
    assert reason is not None
    assert "lines that 2 ranks write?" in reason or reason.endswith("and from one rank alone")


def test_the_same_numbers_for_every_layout_are_found_in_the_cell(launcher: NodeLauncher) -> None:
    found = {}
    for size in (1, 2, 4):
        layout = Layout(micro_batch_size=size, grad_accum_steps=4 // size)
        program = """
            random.seed(7)
            for step in range(num_steps):
                time.sleep(0.01)
                tell(step_seconds=0.01 * random.uniform(0.98, 1.02))
            """
        outcome = told(launcher, program, layout=layout, plan=MANY)
        assert isinstance(outcome, Measurement), outcome
        found[size] = ToldLayout(layout=layout, seconds=outcome.step_time.median)
    reasons = judge_cell(found)
    assert set(reasons) == {1, 2, 4}
    assert "does the program use its arguments" in reasons[1]
