"""Opens a sweep: recovers what earlier calls left, opens its cells, and returns a loop.

Whatever was killed, the same call goes on: finished trials are told to the search from the store,
and attempts of a dead orchestrator are given back first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from orchestrator.cluster.contract import Prober, shapes_of
from orchestrator.core.machines.packing import Shape
from orchestrator.core.problem.cell import Cell
from orchestrator.core.search.planner import memory_limit_bytes
from orchestrator.core.sweepfile.budget import Price, budget_of, check_objectives, price_of
from orchestrator.core.sweepfile.measurement_section import Exclusive
from orchestrator.core.trial.failure_kinds import HANG_KINDS, FailureKind
from orchestrator.sweep.attempt_cost import AttemptCost
from orchestrator.sweep.budgets import Budgets
from orchestrator.sweep.call import Call
from orchestrator.sweep.cell_search import CellSearch
from orchestrator.sweep.cell_searches import CellSearches, read
from orchestrator.sweep.dispatch import Dispatch
from orchestrator.sweep.loop import Loop
from orchestrator.sweep.measured_peaks import MeasuredPeaks
from orchestrator.sweep.missing_nodes import MissingNodes
from orchestrator.sweep.node_pool import NodePool
from orchestrator.sweep.outcomes import Outcomes
from orchestrator.sweep.placement import Placement
from orchestrator.sweep.recovery import Recovery
from orchestrator.sweep.requests import RequestTaker
from orchestrator.sweep.reuse import reuse_measured
from orchestrator.sweep.snapshots import Snapshots
from orchestrator.sweep.spending import Spending
from orchestrator.sweep.trial_requests import TrialRequests
from orchestrator.sweep.winner_profiles import WinnerProfiles

logger = logging.getLogger(__name__)


def open_loop(call: Call) -> Loop:
    """Recover what was left; open the session and the cells. Raises ResourcesInsufficient."""
    spec, store, scheduler = call.spec, call.store, call.scheduler
    _take_up_what_was_left(call)
    shapes = shapes_of(
        spec.cells(), scheduler.slots, gpus_per_node=call.gpus_per_node, device=spec.device
    )
    _bind_conditions(call)
    if call.reused is not None:
        reuse_measured(call, call.reused)
    requests = RequestTaker(call)
    # Before the cells are opened, which then find what waits.
    requests.take(())
    prober = scheduler if spec.measurement.preflight and isinstance(scheduler, Prober) else None
    node_pool = NodePool(call.sweep_id, call.epoch, store=store, prober=prober, clock=call.clock)
    node_pool.refresh(now=True)
    hardware = call.hardware(scheduler.slots)
    stored_peaks, device_name = store.measured_peaks(call.sweep_id), scheduler.slots.device_name
    peaks = MeasuredPeaks(stored_peaks, device_name=device_name)
    outcomes = Outcomes(call, peaks)
    price = price_of(spec, hardware)
    check_objectives(
        spec,
        price,
        device=scheduler.slots.device,
        memory_limit_bytes=memory_limit_bytes(spec, hardware),
    )
    spending = _begin_session(call, price)
    cell_searches = CellSearches(call, hardware, read(call, hardware))
    node_pool.usable(scheduler.slots.nodes)  # they answer while cells are opened
    _open_cells(call, shapes, outcomes, cell_searches)
    placement = Placement(
        scheduler.slots.nodes,
        exclusive=spec.measurement.exclusive is Exclusive.NODE,
        shares_budget=spending.is_shared,
    )
    dispatch = Dispatch(
        call,
        outcomes=outcomes,
        node_pool=node_pool,
        placement=placement,
        missing_nodes=MissingNodes(call, placement, node_pool),
        budgets=Budgets(call, spending),
        cell_searches=cell_searches,
        requests=TrialRequests(call, peaks),
    )
    newest = [search.confirmation.runs.newest or 0.0 for search in call.searches.values()]
    return Loop(
        call,
        outcomes=outcomes,
        node_pool=node_pool,
        cell_searches=cell_searches,
        dispatch=dispatch,
        snapshots=Snapshots(call, outcomes, spending),
        winner_profiles=WinnerProfiles(call, spending),
        requests=requests,
        # This call begins after all stored dates, also those of a simulated clock.
        began_unix_seconds=max(time.time() - call.seconds, *newest),
    )


def _take_up_what_was_left(call: Call) -> None:
    """Store results that earlier calls could not store, then requeue the attempts they left."""
    if call.spool is not None:
        recovery = Recovery(
            store=call.store,
            sweep_id=call.sweep_id,
            epoch=call.epoch,
            plan=call.spec.measurement.plan(call.scheduler.slots.device),
            code=call.code.now,
            device_name=call.scheduler.slots.device_name,
            not_passed=call.not_passed,
        )
        if (found := recovery.take_up(call.spool)) > 0:
            logger.warning(
                "Stored %d %s of an earlier call that ended while the database was unavailable",
                found,
                "trial" if found == 1 else "trials",
                extra={"action": "recovered"},
            )
    if lost := call.store.mark_lost(call.sweep_id, call.epoch):
        logger.warning(
            "%d %s again",
            len(lost),
            "trial of a dead orchestrator waits"
            if len(lost) == 1
            else "trials of a dead orchestrator wait",
            extra={"action": "requeued_lost"},
        )


def _bind_conditions(call: Call) -> None:
    """Bind the sweep to this file's conditions, if earlier calls measured nothing under others."""
    freed = call.store.bind_conditions(call.sweep_id, call.spec.conditions(), epoch=call.epoch)
    if freed:
        logger.warning(
            "The file has changed before anything was measured: %d %s again, and the attempts"
            " under the old settings are kept as superseded",
            freed,
            "trial waits" if freed == 1 else "trials wait",
            extra={"action": "rebound"},
        )


def _begin_session(call: Call, price: Price | None) -> Spending:
    """Note that this call works, and what it may spend in addition to earlier calls."""
    store, scheduler = call.store, call.scheduler
    spending = Spending(
        budget_of(call.spec, price),
        max_wall_seconds=call.spec.search.max_wall_time,
        # This includes what the recovery above has just stored.
        earlier_gpu_seconds=store.reserved(call.sweep_id).total.reserved,
        leased=scheduler.leased,
        clock=call.clock,
        began=call.began,
    )
    store.begin_session(
        call.sweep_id,
        call.epoch,
        num_gpus=scheduler.slots.total,
        price_per_gpu_hour=price.per_gpu_hour if price is not None else None,
        leased=scheduler.leased(),
    )
    return spending


def _open_cells(
    call: Call, shapes: Mapping[Cell, Shape], outcomes: Outcomes, cell_searches: CellSearches
) -> None:
    for cell, shape in shapes.items():
        _open_cell(call, cell, shape, outcomes, cell_searches)
        # Opening many cells may take longer than the lease lasts.
        if call.lease.is_due:
            call.lease.renew(call.scheduler.leased())


def _open_cell(
    call: Call, cell: Cell, shape: Shape, outcomes: Outcomes, cell_searches: CellSearches
) -> None:
    store = call.store
    cell_id = store.ensure_cell(call.sweep_id, cell, epoch=call.epoch)
    planned = cell_searches.plan(cell, cell_id)
    search = CellSearch(
        id=cell_id,
        cell=cell,
        shape=shape,
        objective=call.spec.ranked_by,
        merits=call.spec.merits,
        searcher=planned.searcher,
        cost=AttemptCost(cell=cell, predicted_seconds=planned.predicted_seconds),
        code_now=lambda: call.code.now,
        attempts=call.attempts.of_cell(cell_id),
    )
    call.searches[cell_id] = search
    outcomes.take_up(search)
    hung = [one.id for one in search.retries.waiting if one.failure_kind in HANG_KINDS]
    search.restore_retries(
        lost_a_node=store.trials_that_met(cell_id, FailureKind.NODE_LOST),
        avoided={
            **{i: frozenset(store.trial(i).attempts[-1].nodes or ()) for i in hung},
            **store.nodes_of_ended_early(cell_id),
        },
        needs_own_nodes=bool(store.trials_that_met(cell_id, FailureKind.OOM_HOST)),
    )
