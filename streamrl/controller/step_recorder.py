"""The recorder of finished steps: rollouts in Parquet, ledger, metrics row and trace."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict

from streamrl.controller.length_predictor import StepLengths
from streamrl.controller.spending import LINK, Costs, Spending, few_names
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.step_metrics import step_metrics
from streamrl.controller.step_times import Interval, StepTimes, Traffic
from streamrl.controller.telemetry import Telemetry
from streamrl.protocol.controller_trainer import StepDone
from streamrl.rollouts.ledger import Ledger
from streamrl.rollouts.length_audit import LengthAudit, StepAudit
from streamrl.rollouts.rollout_store import RolloutStore

log = logging.getLogger(__name__)


class Recorder:
    """The recorder of finished steps; it writes in an order in which a crash in between loses nothing."""

    def __init__(
        self,
        rollouts: RolloutStore,
        ledger: Ledger,
        audit: LengthAudit,
        times: StepTimes,
        telemetry: Telemetry,
        spending: Spending,
        peak_tflops: float | None,
    ) -> None:
        """
        Args:
            rollouts: store of rollouts.
            ledger: the run's ledger.
            audit: the length audit.
            times: times of the current step.
            telemetry: writer of metrics and trace.
            spending: cost of all processes.
            peak_tflops: dense bf16 peak of the trainer's ranks together, TFLOP/s; None: unknown.
        """
        self.rollouts, self.ledger, self.audit = rollouts, ledger, audit
        self.times, self.telemetry = times, telemetry
        self.spending, self.peak_tflops = spending, peak_tflops
        self._said_masked = False
        """Whether it has been said that a step had no sample with a loss."""

    async def step_done(
        self,
        batch: StepBatch,
        result: StepDone,
        lengths: StepLengths,
        publishes: bool,
        traffic: Traffic,
        prompts_too_long: int,
        deferred: int,
        mismatch_bound: float | None = None,
    ) -> Interval:
        """Record a finished optimizer step and return its times.

        The rollouts are written in a thread, and the trace with pauses. The batch must not change until both are.

        The other arguments are those of `step_metrics`, whose `predictions` are the `lengths` here.

        Args:
            publishes: whether the step's weights go to generation.
        """
        now, clock = time.time(), time.monotonic()  # together: writing takes time, which belongs to the next step
        groups, dropped = batch.groups_trained, batch.groups_never_trained
        for group in groups:
            group.t_trained = now
        for group in dropped:
            group.step = batch.step  # it may have been issued for a later one
        # a large step takes minutes, and the watchdog would take a controller that reports nothing for one that hangs
        await asyncio.to_thread(self.rollouts.write, batch.step, [*groups, *dropped])
        self.ledger.train(batch.step, batch.step, groups, now, dropped)
        began = clock if self.times.clock is None else self.times.clock
        times = self.times.end_step(now, clock, result.finished if publishes else None)
        audit = self._audit_lengths(batch)
        memory_gb = self.telemetry.memory.total_gb
        row = step_metrics(
            batch,
            times,
            result,
            traffic,
            prompts_too_long,
            memory_gb,
            lengths,
            audit,
            deferred,
            self._costs(began, clock, traffic),
            self.peak_tflops,
            mismatch_bound,
        )
        if row.staleness_max is None:
            log.warning("step %d trained nothing: no sample of it with a reward has a sampled token", batch.step)
        elif groups and not self._said_masked and not any(batch.counted(group) for group in groups):
            self._said_masked = True
            log.warning(
                "step %d trained nothing: every sample with a reward was cut by the token limit, and "
                "algorithm.mask_truncated leaves them out of the loss: raise sampling.max_tokens (said once)",
                batch.step,
            )
        self.telemetry.step_done(row, self.times.ended_trainer)
        await self.telemetry.trace_samples(batch.step, groups)
        return times

    def _costs(self, began: float, ended: float, traffic: Traffic) -> Costs | None:
        """Return the cost of the step between two times in monotonic seconds; None: there are no prices."""
        costs = self.spending.of_step(began, ended)
        for site, usd in traffic.usd.items():
            costs.setdefault(site, {})[LINK] = usd
        return few_names(costs) if costs or self.spending.usd_per_hour else None

    def _audit_lengths(self, batch: StepBatch) -> StepAudit:
        """Report the step's lengths to the audit; return its result."""
        for group in batch.groups_trained:
            counted = {m.sample.sample_id for m in batch.counted(group)}
            left: dict[str, list[int]] = defaultdict(list)
            for m in group.members():
                why = "void reward" if m.void else "truncated" if m.sample.sample_id not in counted else ""
                left[why].append(m.sample.output_length)
            self.audit.trained(batch.step, group.group_id, left.pop("", []))
            for why, lengths in left.items():
                self.audit.dropped(batch.step, group.group_id, lengths, why)
        for group in batch.groups_never_trained:
            lengths = [m.sample.output_length for m in group.members()]
            why = "too few rewards" if batch.too_few_survivors(group) else "all rewards equal"
            self.audit.dropped(batch.step, group.group_id, lengths, "not finite" if group in batch.not_finite else why)
        return self.audit.end_step(batch.step)
