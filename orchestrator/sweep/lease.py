"""The lease on a sweep: acquired before anything starts, renewed meanwhile, and released."""

from __future__ import annotations

import logging
import os
import socket
import time
from dataclasses import dataclass, field

from db.read.rows import SweepRow
from db.store import LEASE_SECONDS, Store
from db.types import StopRequest, SweepState
from db.write.writes import StoppedCell
from orchestrator.core.errors import SweepError
from orchestrator.core.sweepfile.spec import SweepSpec
from orchestrator.core.trial.reserved_time import Leased
from orchestrator.sweep.progress import Stop, SweepResult

logger = logging.getLogger(__name__)

RENEW_SECONDS = 5.0


@dataclass(eq=False, kw_only=True)
class SweepLease:
    """A sweep that this call may work on."""

    store: Store
    sweep_id: int
    epoch: int
    before: SweepRow  # the sweep before this call
    requested: Stop = Stop.GO_ON  # by `sweep cancel` in another terminal
    # By this machine's clock, since leases end by the database's, whatever the sweep's clock is.
    _renewed: float = field(default_factory=lambda: time.monotonic())

    @property
    def is_due(self) -> bool:
        """True if the lease should be renewed now."""
        return time.monotonic() - self._renewed > RENEW_SECONDS

    def renew(self, leased: Leased) -> None:
        """Renew it, and note what the gangs hold and whether somebody asks to stop."""
        request = self.store.renew(self.sweep_id, self.epoch, LEASE_SECONDS, leased=leased)
        self._renewed = time.monotonic()
        if request is not None:
            stop = Stop.CANCEL if request is StopRequest.CANCEL else Stop.DRAIN
            self.requested = max(self.requested, stop)

    def release(self, result: SweepResult | None, leased: Leased | None) -> None:
        """Release the lease. `result`: None if the call ended with an error."""
        try:
            if result is None:
                self.store.give_back(self.before, self.epoch, leased=leased)
                return
            self.store.release(
                self.sweep_id,
                self.epoch,
                SweepState.FINISHED if result.finished else SweepState.STOPPED,
                leased=leased,
                stopped=[
                    StoppedCell(cell=cell, reason=reason, num_untried=result.untried[cell])
                    for cell, reason in result.stopped.items()
                ],
            )
        except SweepError as exc:
            logger.warning(
                "The lease was not given back and ends by itself within %.0f s: %s",
                LEASE_SECONDS,
                exc,
            )


def acquire(spec: SweepSpec, store: Store, *, takeover: bool) -> SweepLease:
    """Acquire the lease. Raises SweepChanged, SweepInUse."""
    spec_json, conditions = spec.model_dump_json(), spec.conditions()
    sweep_id = store.ensure_sweep(spec.name, spec_json, conditions)
    before = store.sweep_named(spec.name)
    try:
        epoch = store.acquire(
            sweep_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            spec_json=spec_json,
            conditions=conditions,
            ttl_seconds=LEASE_SECONDS,
            takeover=takeover,
        )
    except Exception:
        raise
    except BaseException:  # a signal
        store.give_back(before, None)
        raise
    return SweepLease(store=store, sweep_id=sweep_id, epoch=epoch, before=before)
