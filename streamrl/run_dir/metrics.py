"""`metrics.jsonl`: one row per optimizer step, written by the controller and read by all that shows a run.

The file only grows, except when a run is resumed from an older checkpoint (`RowWriter.rewind`).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from streamrl.rollouts.length_audit import StepAudit
from streamrl.run_dir.jsonl import StepRow, read_rows


class MetricsRow(StepRow):
    """The measurements of one optimizer step; None where there is no figure. Unknown keys are errors."""

    step: int = Field(ge=1, description="optimizer steps completed, including this one (the first row is 1)")
    time: float = Field(description="unix seconds at which the step ended")
    step_time_s: float | None = Field(
        None,
        description="wall time since the previous step ended; none, like each figure that is made of the step's times, "
        "if the clock was set or the machine suspended in it",
    )
    generate_time_s: float | None = Field(None, description="time during which at least one sample was being generated")
    train_time_s: float | None = Field(None, description="time during which the trainer computed")
    instances: float | None = Field(None, description="available vLLM instances, mean over the step")
    bubble_fraction_generation: float | None = Field(None, description="share of the step in which instances were idle")
    bubble_fraction_training: float | None = Field(None, description="share of the step in which the trainer was idle")
    samples_per_s: float | None = Field(None, description="trained samples per second of the step")
    tokens_per_s: float | None = Field(None, description="generated tokens of samples_judged per second of the step")
    reward_mean: float | None = Field(None, description="mean reward of the samples trained; void ones are left out")
    reward_std: float | None = Field(None, description="standard deviation of the rewards over the same samples")
    loss: float | None = None
    grad_norm: float | None = Field(None, description="norm of the policy's gradient before clipping")
    entropy: float | None = Field(
        None,
        description="entropy of the policy, nats per completion token; of one in 8 without entropy_coef",
    )
    output_length_mean: float | None = Field(
        None,
        description="tokens of a completion, over the samples of the step's groups, void ones included; p50, p90 "
        "and max likewise",
    )
    output_length_p50: float | None = None
    output_length_p90: float | None = None
    output_length_max: float | None = None
    staleness_mean: float | None = Field(
        None, description="mean number of weight versions between sampling and training"
    )
    staleness_max: float | None = None
    logprob_gap_mean: float | None = Field(
        None, description="trainer-generator mismatch: mean |difference| of log-probabilities, nats"
    )
    importance_ratio_max: float | None = Field(
        None, description="largest trainer/generator probability ratio of a token"
    )
    weight_version: int | None = Field(None, description="weight version that this step made")
    weight_bytes_sent: int | None = Field(
        None,
        description="bytes of weights that all sites got in this step; on the trainer's own node they are those of the "
        "file that is copied, and nothing is sent",
    )
    weight_transfer_s: float | None = Field(
        None,
        description="longest time from a version's announcement until a site had verified it; none: no new version",
    )
    usd: float | None = Field(
        None,
        description="cost of processes and link traffic since the step before ended (of a launch's first step: since "
        "it began) at the cluster file's prices; none: it has no prices",
    )
    usd_per_1k_samples: float | None = None
    usd_by_process: dict[str, dict[str, float]] = Field(
        default_factory=dict,
        description="`usd` by site and process; 'link': what the link to the site carried; free ones are left out, "
        "and of more than 100 in a step the instances of a pool are one sum, SITE-POOL",
    )
    weight_sync_exposed_s: float | None = Field(
        None, description="time lost to new weights: making, loading and waiting for them"
    )
    ranker_recall_at_20: float | None = Field(
        None, description="recall of the longest 20 % of outputs; None until there is a ranker"
    )
    ranker_kendall_tau: float | None = Field(
        None, description="Kendall tau of predicted and true lengths; None until there are predictions"
    )
    ranker_refit_s: float | None = Field(
        None,
        description="seconds of the ranker's refit that ended since the step before, beside training; None: none did",
    )
    dispatch_by_prediction: bool | None = Field(
        None, description="whether predictions were trusted and used for dispatch"
    )
    dispatch_saved: float | None = Field(
        None,
        description="share of least-loaded's generation time saved, simulated from the step's lengths and the "
        "instances' measured step times",
    )
    dispatch_captured: float | None = Field(
        None, description="dispatch_saved as a share of what known lengths would save"
    )
    groups_total: int | None = Field(None, description="groups trained; in Prometheus `streamrl_train_groups`")
    groups_no_gradient: int | None = Field(
        None,
        description="groups without a gradient: their rewards are all equal (with `advantage: batch`: those of the "
        "whole batch), which counts only where such groups have none (not with GAE, a KL term, an entropy bonus), or "
        "mask_truncated leaves all their samples out",
    )
    samples_total: int | None = Field(
        None,
        description="samples trained: those of the step's groups that have a reward; in Prometheus "
        "`streamrl_train_samples`",
    )
    samples_left_out: int | None = Field(
        None, description="samples of samples_total without a loss: the token limit cut them, with mask_truncated"
    )
    samples_judged: int | None = Field(
        None, description="samples of the step's groups, of those that they replaced, and of those not finite"
    )
    samples_void: int | None = Field(None, description="samples of samples_judged whose reward is void")
    void_rate: float | None = Field(None, description="samples_void as a share of samples_judged")
    void_rate_by_cause: dict[str, float] = Field(
        default_factory=dict,
        description="void_rate by cause: provider, verifier, sandbox, tool, environment, timeout, crash, generation",
    )
    groups_void: int | None = Field(None, description="groups replaced by others because too few samples had a reward")
    prompts_too_long: int | None = Field(None, description="prompts skipped since the run first started")
    truncated_fraction: float | None = Field(
        None, description="share of the samples of the step's groups, void ones included, ended by the token limit"
    )
    drafted_tokens: int | None = Field(
        None, description="tokens drafted and verified for the step's samples (speculative decoding)"
    )
    accepted_tokens: int | None = Field(None, description="tokens of drafted_tokens that were accepted")
    accepted_by_route: dict[str, float | None] = Field(
        default_factory=dict, description="share of the drafted tokens that was accepted, by route: regular, tail"
    )
    learning_rate: float | None = None
    clip_fraction: float | None = Field(None, description="share of tokens whose ratio was clipped")
    kl_mean: float | None = Field(
        None, description="KL divergence to the reference, nats per token; None without a reference"
    )
    tokens_trained: int | None = Field(None, description="completion tokens with a loss; counted in each pass")
    train_tokens_per_s: float | None = Field(
        None, description="tokens of packed rows, including prompts, per second of micro-batches and optimizer step"
    )
    train_tflops: float | None = Field(
        None, description="10^12 operations per second in forward and backward passes, all ranks together"
    )
    mfu: float | None = Field(
        None, description="train_tflops as a share of the ranks' dense bf16 peak; none: the peak is unknown, as on CPUs"
    )
    reward_by_task: dict[str, float | None] = Field(default_factory=dict)
    output_length_by_task: dict[str, float | None] = Field(default_factory=dict)
    agent_metrics_by_task: dict[str, dict[str, float | None]] = Field(
        default_factory=dict,
        description="what agents returned beside their reward: by task and name, the mean over the samples trained "
        "that have it (the first 100 names of a task)",
    )
    environment_s: float | None = Field(
        None, description="seconds of resets and steps of environments, all episodes of the batch together"
    )
    environment_hidden_fraction: float | None = Field(
        None,
        description="share of the time in which environments of the batch's episodes stepped, in which turns of the "
        "batch were generated as well; the rest is a bubble of the engine",
    )
    process_memory_gb: float | None = Field(None, description="memory of all of the run's processes, GiB")

    importance_ratio_mean: float | None = Field(
        None,
        description="mean importance ratio of the surrogate (by token, or the sequence's) over the step's tokens; "
        "about 1 when all is well",
    )
    ess_token: float | None = Field(None, description="effective sample size of the tokens' weights as a share, 0 to 1")
    ess_sequence: float | None = Field(
        None,
        description="effective sample size of the sequences' weights as a share; an agent's episode is one sequence "
        "where the algorithm has ratios or weights of sequences, else each of its rows is",
    )
    masked_fraction: float | None = Field(
        None, description="share of tokens left out of the loss as too far off-policy"
    )
    outside_truncation_fraction: float | None = Field(
        None,
        description="share of tokens outside of what the trainer's policy keeps by top_p, top_k and min_p; None "
        "without them",
    )
    truncated_weight_fraction: float | None = Field(None, description="share of tokens whose weight was cut to its cap")
    value_loss: float | None = Field(None, description="loss of the critic; None without a critic")
    critic_grad_norm: float | None = Field(
        None, description="norm of the critic's gradient before clipping; None without a critic"
    )
    value_clip_fraction: float | None = Field(
        None, description="share of tokens whose new value algorithm.critic.value_clip has cut; None without a critic"
    )
    explained_variance: float | None = Field(
        None,
        description="share of the returns' variance that the critic explains; None without a critic, or if the "
        "returns are all but equal",
    )
    step_skipped: bool | None = Field(
        None,
        description="whether the step's last update was skipped, as the batch was too far off-policy, or refused; "
        "`optimizer_updates` came before it",
    )
    optimizer_updates: int | None = Field(None, description="updates of the weights with the step's batch")
    step_refused: str | None = Field(
        None, description="what was not finite when the trainer refused the step, and what became of it; none: nothing"
    )
    groups_not_finite: int | None = Field(
        None, description="groups left out of the step because their loss or gradient was not finite"
    )
    groups_dropped: int | None = Field(None, description="groups generated, or begun, but never trained")
    samples_parked: int | None = Field(None, description="samples preempted to continue later")
    weight_publications: int | None = Field(
        None, description="weight versions that all instances came to serve in this step"
    )
    length_audit: StepAudit | None = Field(None, description="lengths issued, finished, trained and dropped")
    mismatch_warning: str | None = Field(
        None,
        description="warning, set when the mismatch in the first update exceeds its bound though no sample is stale",
    )
    length_bias_warning: str | None = Field(None, description="warning, set when trained and issued lengths differ")

    @property
    def changed_nothing(self) -> bool:
        """Whether the weights stayed as they were: the first update was skipped already."""
        return bool(self.step_skipped and not self.optimizer_updates)

    @property
    def ess(self) -> float | None:
        """Effective sample size of the sequences' weights, or else of the tokens'; None: neither was computed."""
        return self.ess_token if self.ess_sequence is None else self.ess_sequence


def read_metrics(path: Path) -> list[MetricsRow]:
    """Read all complete rows in order; a missing file has none, unreadable lines are skipped."""
    return read_rows(path, MetricsRow)
