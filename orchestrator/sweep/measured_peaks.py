"""The peaks behind the MFUs of one sweep, if no data sheet has them.

There is one per host, precision and device: the largest that a trial measured. They are in the
store, so a sweep that continues after a kill has the same peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from db.read.rows import PeakRow
from orchestrator.core.problem.hardware import data_sheet_peak
from orchestrator.core.problem.layout import Layout, Precision
from orchestrator.core.problem.model_shape import ModelShape
from orchestrator.core.trial.measurement import ImplausibleMeasurement, Measurement, measure
from orchestrator.core.trial.node_report import NodeReport
from orchestrator.core.trial.protocol import MEASURED_PEAK, KnownPeak, MeasurementPlan, RankResult

_Key = tuple[Precision, str, str | None]


class MeasuredPeaks:
    """Measured peaks. A device whose peak is in its data sheet is not measured."""

    def __init__(self, stored: Iterable[PeakRow], *, device_name: str | None) -> None:
        """`stored`: what a store has. `device_name`: for ranks that do not name theirs."""
        self._known: dict[_Key, KnownPeak] = {}
        self._device_name = device_name
        for row in stored:
            self.add(row)

    def of(self, precision: Precision) -> tuple[KnownPeak, ...]:
        """Return the peaks to give to a trial of this precision."""
        return tuple(
            peak
            for (known_precision, _, _), peak in self._known.items()
            if known_precision is precision
        )

    def add(self, row: PeakRow) -> None:
        """Note the peak that an attempt's MFU used.

        Over several nodes that was the slowest one's; it counts for each until more is known.
        """
        if not row.source.startswith(MEASURED_PEAK):
            return
        for node in row.nodes:
            key = (row.precision, node, row.device_name)
            if key not in self._known or self._known[key].flops < row.flops:
                self._known[key] = KnownPeak(
                    node=node, device_name=row.device_name, flops=row.flops, source=row.source
                )

    def note(
        self,
        reports: Sequence[NodeReport],
        measurement: Measurement,
        *,
        precision: Precision,
        device_name: str | None,
    ) -> None:
        """Note the peak that an attempt has just measured, as the store has it."""
        if measurement.peak_flops is not None and measurement.peak_flops_source is not None:
            nodes = tuple(report.node for report in reports)
            flops, source = measurement.peak_flops, measurement.peak_flops_source
            self.add(
                PeakRow(
                    nodes=nodes,
                    precision=precision,
                    device_name=device_name,
                    flops=flops,
                    source=source,
                )
            )

    def measure(
        self,
        reports: Sequence[NodeReport],
        *,
        model: ModelShape,
        sequence_length: int,
        layout: Layout,
        plan: MeasurementPlan,
    ) -> Measurement:
        """Call `core.measurement.measure` on the known peaks.

        Trials that began together each measured one of their own. If a trial was faster than a
        known peak allows, its own is taken. Raises ImplausibleMeasurement if that is too low, too.
        """
        told = [
            (report, _with_listed_peak(outcome.result, report, layout.precision))
            for report in reports
            for outcome in report.ranks
            if outcome.result is not None
        ]
        own = [result for _, result in told]
        shared = [self._shared(result, report.node, layout.precision) for report, result in told]
        if shared != own:
            try:
                return measure(
                    shared, model=model, sequence_length=sequence_length, layout=layout, plan=plan
                )
            except ImplausibleMeasurement:
                pass
        return measure(own, model=model, sequence_length=sequence_length, layout=layout, plan=plan)

    def _shared(self, result: RankResult, node: str, precision: Precision) -> RankResult:
        known = self._known.get((precision, node, result.stack.device_name or self._device_name))
        if (
            known is None
            or result.peak_flops_source is None
            or not result.peak_flops_source.startswith(MEASURED_PEAK)
        ):
            return result
        return result.model_copy(
            update={"peak_flops": known.flops, "peak_flops_source": known.source}
        )


def _with_listed_peak(result: RankResult, report: NodeReport, precision: Precision) -> RankResult:
    """Add the data sheet's peak for a user's program that reported none.

    Only the device's full name counts, as the driver told it to the program or its launcher.
    """
    device = report.software.stack.device_name
    if result.peak_flops is not None or device is None:
        return result
    listed = data_sheet_peak(result.stack.device_name or device, precision)
    if listed is None:
        return result
    flops, source = listed
    return result.model_copy(update={"peak_flops": flops, "peak_flops_source": source})
