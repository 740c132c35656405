"""One vLLM engine: start, generate one completion, replace the weights.

This module and `engine_config.py`, which sets vLLM up, hold nearly all calls of vLLM's API.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from scheduler.cost.decode import StepCurve
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.config.schedule import OnUpdate
from streamrl.generation.drafts.lessons import DrafterLessons
from streamrl.generation.instance.completion_text import completion_text
from streamrl.generation.instance.engine_config import Place, engine_config
from streamrl.generation.instance.running_requests import RunningRequests, Worked
from streamrl.generation.instance.sample_experts import first_row, rows_since, with_experts
from streamrl.generation.instance.sample_parts import (
    UNNAMED_VERSION,
    first_token,
    join,
    seed_after,
    token_versions,
    versions_from,
)
from streamrl.generation.instance.stop_strings import look_across
from streamrl.generation.instance.vllm_processes import end_engine, fork_where_safe
from streamrl.machine.engine_settings import EngineSettings
from streamrl.machine.model_files import end_tokens, read_tokenizer, resolve_model
from streamrl.machine.router_shape import router_shape
from streamrl.rollouts.canary import canary
from streamrl.rollouts.types import FloatArray, PartialSample, Sample, SampleRequest
from streamrl.runtime.device_turns import takes_turns

WARM_BATCH = 4
RELEASE_POLL_S = 0.01
"""Seconds between two checks whether vLLM knows a request that should be aborted."""


class Engine:
    """A running vLLM engine."""

    def __init__(
        self,
        pool: GenerationPool,
        run: RunConfig,
        cuda: bool,
        instance: str,
        site: str,
        place: Place | None = None,
        settings: EngineSettings | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Start vLLM; takes 5 to 60 s and blocks. Needs a running event loop.

        Args:
            pool: pool of the instance.
            run: configuration of the run.
            cuda: whether the cluster has GPUs.
            instance: name of the instance.
            site: site of the instance.
            place: place of this node, the first one, among those that the instance spans; None: there is only one.
            settings: see `engine_config`.
            clock: returns the unix seconds that samples carry.
        """
        from vllm.v1.engine.async_llm import AsyncLLM

        self.pool, self.run, self.instance, self.site, self.cuda = pool, run, instance, site, cuda
        self._takes_turns = takes_turns(cuda, run)
        self._clock = clock
        self._requests = RunningRequests()
        self.version = UNNAMED_VERSION
        """Version that new requests meet; during an update, already the new one."""
        self.line = 0
        """Changes where a version's number may come to mean other weights; requests share no KV cache across that."""
        self._kept: dict[str, int] = {}
        """Tokens that running requests had already when they arrived here."""
        self.drafts = run.speculation.method != "none"
        """Whether a drafter runs in the engine, which `teach_drafter` teaches."""
        self._lessons = DrafterLessons()
        model = resolve_model(run.model.path)
        self._routers = router_shape(Path(model)) if run.algorithm.router_replay else None
        """Routers whose experts samples carry; None: they carry none."""
        config = engine_config(pool, run, cuda, place, settings)
        fork_where_safe(cuda)
        self._llm = AsyncLLM.from_vllm_config(config)
        look_across(self._llm.output_processor, self._kept)
        self._canaries = itertools.count()
        self._tokenizer = read_tokenizer(model)
        self._stop_ids = end_tokens(model, self._tokenizer)

    async def connect_weights(self, init_info: dict[str, Any]) -> None:
        """Connect vLLM's weight transfer to where weights come from, for the first time or anew."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def set_up_weights(self, init_info: dict[str, Any] | None, version: int) -> None:
        """Number the weights that were loaded at start, and connect vLLM's weight transfer (None: later)."""
        if init_info is not None:
            await self.connect_weights(init_info)
        await self._llm.update_weight_version(str(version))
        self.version = version

    @property
    def vocabulary(self) -> int:
        """Number of the token ids that both the tokenizer and the model know."""
        return min(len(self._tokenizer), self._llm.vllm_config.model_config.get_vocab_size())

    @property
    def caches_prefixes(self) -> bool:
        """Whether requests share the KV cache of equal beginnings of their prompts."""
        return bool(self._llm.vllm_config.cache_config.enable_prefix_caching)

    @property
    def kv_tokens(self) -> int:
        """Tokens of context that the KV cache holds."""
        cache = self._llm.vllm_config.cache_config
        return (cache.num_gpu_blocks or 0) * cache.block_size

    async def warm_up(self) -> None:
        """Generate a few tokens with one request and with several, so that kernels are ready before the first sample.

        On a CPU the largest batch is left out: it would take seconds and use no other kernels.
        """
        await self.teach_drafter()
        vocabulary, largest = min(100, self.vocabulary), self.pool.max_batch
        for batch in sorted({1, min(WARM_BATCH, largest)} | ({largest} if self.cuda else set())):
            requests = [
                SampleRequest(f"warm-up-{batch}-{i}", "", np.arange(i % 7, vocabulary, 7, dtype=np.int32)[:8], i, 0.0)
                for i in range(batch)
            ]
            await asyncio.gather(*(self._generate(request, max_tokens=3) for request in requests))
        await self._llm.reset_prefix_cache()

    async def generate(self, request: SampleRequest, route: str) -> Sample | PartialSample:
        """Generate one completion, or the rest of one that was begun before.

        Returns:
            The finished sample; a partial one if it was preempted by `release`, or has reached `pause_at`.

        Raises:
            RuntimeError: vLLM failed (its own message follows).
        """
        t_dispatched, started = self._clock(), time.monotonic()
        longest = min(self.run.sampling.max_tokens, self.run.model.max_context - len(request.prompt_tokens))
        if self.drafts:
            self._lessons.begins(request)
        with self._requests.noted(request, t_dispatched, started):
            output = await self._generate(request, min(longest, request.pause_at or longest))
        completion = output.outputs[0]
        tokens = np.asarray(completion.token_ids, dtype=np.int32)
        logprobs = [row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        self._requests.ended(len(tokens))
        first = output.metrics.first_token_ts if output.metrics else 0.0
        partial = PartialSample(
            sample_id=request.sample_id,
            completion_tokens=tokens,
            logprobs=np.asarray(logprobs, dtype=np.float32),
            token_versions=token_versions(completion.weight_versions, len(tokens)),
            t_dispatched=t_dispatched,
            t_first_token=first_token(t_dispatched, started, first),
        )
        kept = request.kept
        if self._routers is not None:
            kept, partial = with_experts(self._routers, request, partial, completion.routed_experts)
        if kept is not None:
            partial = join(kept, partial)
        out_of_budget = completion.finish_reason == "length" and len(partial.completion_tokens) < longest
        if completion.finish_reason == "abort" or out_of_budget:
            return partial
        sample = self._sample_of(request, partial, output, route)
        if self.run.speculation.method == "auto":
            self._lessons.ends(request, sample.completion_tokens, int(sample.token_versions[-1]))
        return sample

    def _sample_of(self, request: SampleRequest, whole: PartialSample, output: Any, route: str) -> Sample:
        """Return the finished sample of a request.

        Args:
            request: the request.
            whole: all of its completion.
            output: vLLM's output of the part that was generated here.
            route: its route.
        """
        completion = output.outputs[0]
        drafts = completion.spec_decode_metrics
        return Sample(
            **whole.__dict__,
            group_id=request.group_id,
            finish_reason="length" if completion.finish_reason == "length" else "stop",
            site=self.site,
            instance=self.instance,
            pool=self.pool.name,
            route=route,
            t_queued=request.t_queued,
            t_finished=self._clock(),
            text=completion_text(self._tokenizer, whole.completion_tokens),
            cached_tokens=output.num_cached_tokens or 0,
            drafted_tokens=drafts.num_draft_tokens if drafts else 0,
            accepted_tokens=sum(n * steps for n, steps in enumerate(drafts.histogram)) if drafts else 0,
        )

    @property
    def running(self) -> int:
        """Number of the requests that run here."""
        return self._requests.count

    @property
    def busy_since(self) -> float | None:
        """Unix seconds since which at least one request has been running; None: nothing runs."""
        return self._requests.busy_since

    @property
    def begun(self) -> frozenset[str]:
        """Ids of the requests that run here."""
        return self._requests.ids

    def worked(self) -> Worked:
        """Return the work done here so far."""
        return self._requests.worked(self.produced(), self._kept)

    async def release(self, sample_id: str) -> None:
        """Preempt a running request: its `generate` returns a partial sample. A no-op for one that has ended."""
        known = self._llm.output_processor.external_req_ids
        while sample_id in self._requests and sample_id not in known:  # on its way into vLLM, or out of it
            await asyncio.sleep(RELEASE_POLL_S)
        await self._llm.abort(sample_id)

    def produced(self) -> dict[str, int]:
        """Return the number of tokens that each running request has produced, here and elsewhere."""
        states = self._llm.output_processor.request_states.values()
        return {
            state.external_req_id: self._kept.get(state.external_req_id, 0) + state.detokenizer.num_output_tokens()
            for state in states
            if state.detokenizer is not None and state.external_req_id in self._requests
        }

    def progress(self, known: Mapping[str, int]) -> list[tuple[int, PartialSample]]:
        """Return the new tokens of running requests.

        Args:
            known: number of each request's tokens that the caller has already; those that a request arrived with are
                never returned.

        Returns:
            (index of the first new token, the new tokens) of each request that has some.
        """
        found = []
        for state in self._llm.output_processor.request_states.values():
            sample_id = state.external_req_id
            if sample_id not in self._requests or state.detokenizer is None or state.logprobs_processor is None:
                continue
            kept = self._kept.get(sample_id, 0)
            first = max(0, known.get(sample_id, 0) - kept)
            rows = state.logprobs_processor.logprobs or []
            tokens = state.detokenizer.output_token_ids[: len(rows)]
            if len(tokens) <= first:
                continue
            running = self._requests[sample_id]
            part = PartialSample(
                sample_id,
                np.asarray(tokens[first:], dtype=np.int32),
                np.asarray([rows[n][tokens[n]].logprob for n in range(first, len(tokens))], dtype=np.float32),
                versions_from(state.weight_version_starts, len(tokens))[first:],
                running.t_dispatched,
                first_token(running.t_dispatched, running.started, state.stats.first_token_ts if state.stats else 0.0),
            )
            if self._routers is not None:
                begin, prompt = running.first_row, running.prompt
                whole = kept + first, kept + len(tokens)
                part = replace(
                    part, experts=rows_since(self._routers, state.routed_experts_chunks, begin, prompt, whole)
                )
            found.append((kept + first, part))
        return found

    async def teach_drafter(self, curve: StepCurve | None = None) -> dict[str, dict[str, int]] | None:
        """Teach the drafter what has ended since the last time, and the version of the weights.

        Args:
            curve: step time of this engine without speculation; None: as before. The drafter drafts nothing until it
                has one.

        Returns:
            Tokens 'drafted' and 'accepted' since the start, by source and age; None: there was nothing to teach.
        """
        if not self.drafts or (lesson := self._lessons.take(self.version, curve)) is None:
            return None
        counts: list[dict[str, dict[str, int]]] = await self._llm.collective_rpc("teach_drafter", args=lesson)
        return counts[0]

    async def measure_canary(self) -> FloatArray | None:
        """Return the log-probabilities of the canary's completion, [C], by one prefill beside what runs here.

        Returns:
            Values at temperature 1 and without truncation; None if the weights changed meanwhile.

        Raises:
            RuntimeError: vLLM failed (its own message follows).
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        def encode(text: str) -> list[int]:
            return list(self._tokenizer.encode(text, add_special_tokens=False))

        one, version = canary(encode, self.run.model.max_context), self.version
        ids = [*one.prompt_tokens.tolist(), *one.completion_tokens.tolist()]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        last = None
        tokens = TokensPrompt(prompt_token_ids=ids, cache_salt=f"canary of version {version}")
        async for output in self._llm.generate(tokens, params, f"canary-{next(self._canaries)}"):
            last = output
        if last is None or not last.finished or last.prompt_logprobs is None:
            raise RuntimeError("vLLM ended the canary without a result")
        used = token_versions(last.outputs[0].weight_versions, 1)
        if self.version != version or int(used[0]) != version:
            return None
        rows = last.prompt_logprobs[len(one.prompt_tokens) :]
        pairs = zip(rows, one.completion_tokens.tolist(), strict=True)
        values = [row[token].logprob for row, token in pairs if row is not None]  # only the first token has none
        return np.asarray(values, dtype=np.float32)

    async def time(self, requests: list[SampleRequest], tokens: int) -> float:
        """Return the seconds in which concurrent requests produce exactly `tokens` tokens each (for calibration)."""
        started = time.monotonic()
        await asyncio.gather(*(self._generate(request, tokens, to_the_end=True) for request in requests))
        return time.monotonic() - started

    async def _generate(self, request: SampleRequest, max_tokens: int, to_the_end: bool = False) -> Any:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = self.run.sampling
        prompt, seed, kept = request.prompt_tokens, request.seed, 0
        if request.kept is not None:
            kept = len(request.kept.completion_tokens)
            prompt = np.concatenate([prompt, request.kept.completion_tokens])
            seed = seed_after(seed, kept)
        greedy = request.temperature == 0
        params = SamplingParams(
            temperature=sampling.temperature if request.temperature is None else request.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=0 if greedy else sampling.top_k,
            min_p=0.0 if greedy else sampling.min_p,
            max_tokens=max_tokens - kept,
            seed=None if greedy else seed,
            stop=None if to_the_end else sampling.stop or None,
            stop_token_ids=[] if to_the_end else self._stop_ids,
            ignore_eos=to_the_end,
            logprobs=0,
            detokenize=bool(sampling.stop) and not to_the_end,
            skip_special_tokens=False,  # a stop string may be one; vLLM's text serves for nothing else
            output_kind=RequestOutputKind.FINAL_ONLY,
            routed_experts_prompt_start=first_row(request),
        )
        last = None
        if kept:
            self._kept[request.sample_id] = kept
        try:
            # salted with the version, so that a request reuses no prefix of other weights, unless it is told to
            salt = self.version if request.cache_version is None else request.cache_version
            tokens = TokensPrompt(prompt_token_ids=prompt.tolist(), cache_salt=f"version {salt} of line {self.line}")
            async for output in self._llm.generate(tokens, params, request.sample_id):
                last = output
        finally:
            self._kept.pop(request.sample_id, None)
        if last is None or not last.finished:
            raise RuntimeError(f"vLLM ended {request.sample_id} without a result")
        return last

    async def pause(self, on_update: OnUpdate, version: int) -> None:
        """Pause generation for an update to `version`. Requests that arrive from now on wait for it.

        Args:
            on_update: treatment of running requests. wait: they finish first; keep_kv: they are frozen as they are;
                otherwise they are frozen and their KV cache is dropped and recomputed afterwards.
            version: number of the new weights.
        """
        self.version = version
        mode: Literal["wait", "keep"] = "wait" if on_update == "wait" else "keep"
        await self._llm.pause_generation(mode=mode, clear_cache=on_update != "keep_kv")

    async def sleep(self) -> None:
        """Make room for training on the same devices. No request may be running.

        On GPUs weights and KV cache are dropped (vLLM's level 2): an engine is woken up only for other weights, so a
        copy of these in host memory, as level 1 keeps it, would be in vain.
        """
        if self._takes_turns:
            await self._llm.sleep(level=2)
        else:
            await self._llm.pause_generation(mode="wait", clear_cache=True)

    async def wake_for_update(self) -> None:
        """Take back what new weights need; on GPUs that is their memory, without contents.

        The KV cache follows in `wake_up`, so that loading has the rest of the memory for itself.
        """
        if self._takes_turns:
            await self._llm.wake_up(tags=["weights"])

    async def wake_up(self) -> None:
        """Generate again, after an update to new weights: on GPUs the KV cache gets its memory back."""
        if self._takes_turns:
            await self._llm.wake_up(tags=["kv_cache"])
        else:
            await self._llm.resume_generation()

    async def start_weight_update(self) -> None:
        """Begin a weight update; generation must be paused."""
        await self._llm.start_weight_update()

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Hand one update to vLLM's weight-transfer engine."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def join_weight_group(self, meeting: dict[str, Any]) -> str:
        """Have all workers meet the trainer, where it pushes weights; return why they did not, '' if they did."""
        return await self._in_group("join_weight_group", meeting)

    async def receive_version(self, number: int) -> str:
        """Have all workers load the version that the trainer sends; return how their group broke, '' if it stands."""
        return await self._in_group("receive_version", number)

    async def _in_group(self, method: str, argument: object) -> str:
        """Call a method of `GroupWorker` in all workers; return the first worker's words that are not ''."""
        return next(filter(None, await self._llm.collective_rpc(method, args=(argument,))), "")

    async def finish_weight_update(self, version: int) -> None:
        """End the update; tokens sampled from now on are of `version`."""
        self.version = version
        await self._llm.finish_weight_update(str(version))

    async def resume(self) -> None:
        """Continue frozen requests."""
        await self._llm.resume_generation()

    def close(self) -> None:
        """End vLLM's processes."""
        end_engine(self._llm)
        del self._llm  # its own clean-up at interpreter exit would come too late
