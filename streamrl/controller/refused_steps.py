"""Optimizer steps that the trainer has refused because something was not finite: what is done about them.

    refused -> micro-batches kept on disk -> each examined -> again without the groups found -> done
                                                          \\-> none found, all found, refused again -> skipped

A refused step has changed nothing, so a second attempt is the step that the batch without these groups would have been.
It is tried once; of a step with several updates, so is each of them. A step that is skipped counts as done, with the
weights that it began with, or those of its updates before. The run ends at a weight (or a moment of AdamW) that is not
finite, since no step can mend it, and at the `limit`-th refused step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from streamrl.controller.step_batch import StepBatch
from streamrl.errors import ErrorCode, RunFailed
from streamrl.protocol.controller_trainer import Refusal
from streamrl.rollouts.kept_micro_batches import KeptMicroBatches, KeptStep
from streamrl.rollouts.train_groups import TrainGroup

log = logging.getLogger(__name__)

SHOWN_SAMPLES = 4
"""Most sample ids that the error names for a group."""


class RefusedSteps:
    """The refused steps of a run; the newest one may be under examination."""

    def __init__(self, kept: KeptMicroBatches, limit: int) -> None:
        """
        Args:
            kept: folder for the micro-batches of refused steps.
            limit: number of refused steps that ends the run.
        """
        self.count = 0
        """Refused steps so far; a step counts once, whatever of it is refused."""
        self._kept, self._limit = kept, limit
        self._retried: tuple[int, int] | None = None
        """Step and update that were tried again last; None: none was."""
        self._step: KeptStep | None = None
        self._cause: Refusal | None = None
        self._unexamined: list[list[list[TrainGroup]]] = []
        self._found: dict[str, Refusal] = {}

    def resume_at(self, step: int, count: int) -> None:
        """Continue after `step` optimizer steps, of which `count` were refused; forget those of later steps."""
        self.count = count
        self._kept.rewind(step + 1)

    @property
    def examining(self) -> bool:
        """Whether micro-batches of a refused step wait to be examined."""
        return bool(self._unexamined)

    def refused(self, batch: StepBatch, cause: Refusal) -> None:
        """Begin with a step that the trainer has refused.

        Raises:
            RunFailed: the weights or the optimizer are damaged.
        """
        again = self._retried == (batch.step, batch.update)
        if not again:
            self._begin(batch, cause)
        if cause.what not in ("loss", "gradient", "update"):
            raise RunFailed(f"step {batch.step}: {cause}, so that no step can be trained; {self._where()}")
        if again:
            batch.refusal = f"{batch.refusal}; refused again ({cause}) and skipped"
            batch.given_up = True
            log.error("step %d: %s", batch.step, batch.refusal)
        else:
            self._unexamined = [shares for shares in batch.sent if any(shares)]

    def _begin(self, batch: StepBatch, cause: Refusal) -> None:
        """Count a step, and keep its micro-batches."""
        if self._step is None or self._step.step != batch.step:
            self.count += 1
        log.error("step %d is refused: %s; nothing has been changed", batch.step, cause)
        self._cause, self._found = cause, {}
        self._step = KeptStep(batch.step, batch.normalizer, str(cause), {}, batch.sent)
        self._write(self._step)

    def next(self) -> list[list[TrainGroup]]:
        """Return the shares of the micro-batch to examine next."""
        return self._unexamined[0]

    def examined(self, batch: StepBatch, answers: Iterable[Mapping[str, Refusal]]) -> StepBatch:
        """Record what the workers have found in the micro-batch of `next`; after the last one, decide.

        Returns:
            The batch to go on with: a new one without the groups found, or the same.

        Raises:
            RunFailed: this was the last refused step allowed.
        """
        for answer in answers:
            self._found |= answer
        self._unexamined = self._unexamined[1:]
        return batch if self._unexamined else self._decide(batch)

    def _decide(self, batch: StepBatch) -> StepBatch:
        assert self._step is not None
        found = {group_id: str(what) for group_id, what in self._found.items()}
        self._write(replace(self._step, not_finite=found))
        words = self._describe(batch)
        if self.count >= self._limit:
            raise RunFailed(
                ErrorCode.REFUSED_STEPS.refer(
                    f"{self.count} optimizer steps were refused (optimizer.end_after_refused is {self._limit}), "
                    f"the last one was step {batch.step}: {words}; {self._where()}"
                )
            )
        before = f"{batch.refusal}; then " if batch.refusal else ""  # of an earlier update
        if not found or set(found) >= {group.group_id for group in batch.of_update}:
            batch.refusal, batch.given_up = f"{before}{words}; skipped", True
        else:
            batch = batch.without(set(found))
            batch.refusal = f"{before}{words}; again without {'it' if len(found) == 1 else 'them'}"
            self._retried = batch.step, batch.update
        log.error("step %d: %s; %s", batch.step, batch.refusal, self._where())
        return batch

    def _describe(self, batch: StepBatch) -> str:
        """Return what was not finite, and in which groups and samples."""
        if not self._found:
            return f"{self._cause}, and no group on its own is the cause"
        texts = []
        for group_id, what in self._found.items():
            ids = [m.sample.sample_id for m in batch.groups[group_id].survivors()]
            more = f" and {len(ids) - SHOWN_SAMPLES} more" if len(ids) > SHOWN_SAMPLES else ""
            texts.append(f"group {group_id} (samples {', '.join(ids[:SHOWN_SAMPLES])}{more}): {what}")
        return "; ".join(texts)

    def _where(self) -> str:
        assert self._step is not None
        return f"`streamrl replay RUN {self._step.step}` looks closer"

    def _write(self, step: KeptStep) -> None:
        try:
            self._kept.write(step)
        except OSError as error:
            log.warning("cannot keep the micro-batches of refused step %d: %s", step.step, error)
