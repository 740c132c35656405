// The state of one run: progress, processes, sites, who waits for whom, what was refused.
import { askRun, repeat } from "./api.js";
import { element, fill, table, tiles } from "./dom.js";
import { duration, moment, number, percent, stateClass } from "./format.js";
import { Series } from "./series.js";

export function statePage(main, run) {
  const body = element("div");
  const verdict = element("section", { "aria-label": "does the run make progress?" });
  main.replaceChildren(element("h1", {}, run), verdict, body);
  const series = new Series();

  async function refresh() {
    try {
      const state = await askRun(run, "state");
      series.add(await askRun(run, "steps", { since: series.cursor }));
      fill(body, ...view(state, series));
    } catch (problem) {
      if (problem.status && !body.firstChild) fill(body, element("p", { class: "notice bad" }, problem.message));
      else if (problem.status === 410) body.querySelector("#gone") ?? body.prepend(element("p", { id: "gone", class: "notice bad" }, problem.message));
    }
  }
  async function judge() {
    try {
      fill(verdict, ...chain(await askRun(run, "why_stuck")));
    } catch (problem) {
      if (problem.status === 410) fill(verdict);
    }
  }
  const stops = [repeat(refresh, 2), repeat(judge, 4)];
  return () => stops.forEach((stop) => stop());
}

/** What `streamrl why-stuck` says: a sentence, and the chain of waits from the controller to the process at its end. */
function chain(told) {
  if (!told.sentence) return [];
  const bad = told.state === "stuck";
  const steps = told.chain.map((one) => element("li", {},
    element("strong", {}, one.waiter), ` waits ${duration(one.since_s)} of ${duration(one.limit_s)} for ${one.waits_for}`,
    one.target && [" → ", element("strong", {}, one.target), one.cpu === null || one.cpu === undefined ? "" : ` (${percent(one.cpu)} CPU)`]));
  return [element("p", { class: `notice ${bad ? "bad" : { slow: "", unknown: "" }[told.state] ?? "calm"}`, role: bad ? "alert" : null }, told.sentence),
    steps.length && element("ol", { class: "chain", "aria-label": "chain of waits" }, steps),
    told.details.length && element("ul", { "aria-label": "what else was found" }, told.details.map((text) => element("li", {}, text)))].filter(Boolean);
}

function view(state, series) {
  const progress = state.progress;
  return [
    ...state.trouble.map((text) => element("p", { class: "notice bad", role: "alert" }, text)),
    ...[state.disk, state.mismatch, ...series.warnings.slice(-2).map((one) => `step ${one.step}: ${one.text}`), ...state.notes].filter(Boolean)
      .map((text) => element("p", { class: "notice" }, text)),
    tiles([
      ["state", element("span", { class: stateClass(state.state) }, state.state)],
      ["step", state.steps ? `${state.step} of ${state.steps}` : series.step.at(-1)],
      ["time left", state.live && state.eta_s !== null ? duration(state.eta_s) : null],
      ["elapsed", state.elapsed_s === undefined ? null : duration(state.elapsed_s)],
      ["reward", series.has("reward_mean") ? number(series.last("reward_mean")) : null],
      ["output length", series.has("output_length_mean") ? `${number(series.last("output_length_mean"))} tokens` : null],
      ["time per step", series.has("step_time_s") ? duration(series.last("step_time_s")) : null],
      ["cost of the finished steps", series.usd === null ? null : `${number(series.usd)} USD`],
      ["cost of 1,000 samples", series.has("usd_per_1k_samples") ? `${number(series.last("usd_per_1k_samples"))} USD` : null],
      ["void rewards", series.has("void_rate") ? percent(series.last("void_rate")) : null],
      ["model", state.model], ["schedule", state.schedule], ["computes in", state.types], ["last change", moment(state.updated_at)],
    ]),
    state.schedule_note && element("p", { class: "faint" }, state.schedule_note),
    state.verified && element("p", { class: "faint" }, `weights ${state.verified}`),
    progress && state.live && stepProgress(progress),
    element("h2", {}, "Processes"),
    state.processes.length === 0 ? element("p", { class: "faint" }, "No file of this folder names its processes.") : table([
      ["process", "name"],
      ["state", (one) => element("span", { class: stateClass(one.state, one.bad) }, one.state)],
      ["since", (one) => duration(one.for_s), true],
      ["detail", (one) => [one.detail, one.last_words].filter(Boolean).join("; ")],
      ["running", (one) => number(one.running), true], ["queued", (one) => number(one.waiting), true],
      ["tokens/s", (one) => number(one.tokens_per_s), true], ["weights", (one) => one.weight_versions ?? number(one.weight_version), true],
      ["memory, GiB", (one) => number(one.memory_gb), true], ["silent for", (one) => duration(one.silent_s), true],
      ["type", (one) => one.dtype || "–"],
    ], state.processes, "processes"),
    state.sites.length && [element("h2", {}, "Sites"), table([
      ["site", "name"],
      ["state", (one) => element("span", { class: one.away || one.excluded ? "bad" : "good" }, one.excluded || (one.away ? one.absence || "away" : one.state || "connected"))],
      ["round trip, ms", (one) => number(one.rtt_ms), true], ["clock off, s", (one) => number(one.clock_offset_s), true],
      ["samples waiting", (one) => number(one.samples_waiting), true], ["compression", (one) => number(one.compression), true],
      ["congested", (one) => (one.congested ? "yes" : "no")], ["weights fetched again", (one) => number(one.weights_refetched), true],
    ], state.sites, "sites")],
    state.waits && element("h2", {}, "Who waits for whom"),
    state.waits && (state.waits.length
      ? table([
        ["process", "owner"], ["waits for", "waiting_for"], ["for", (one) => duration(one.waited_s), true],
        ["at most", (one) => duration(one.limit_s), true],
        ["share of the limit", (one) => (one.share === null ? "–" : element("meter", { min: 0, max: 1, value: one.share.toFixed(2), high: 0.8, "aria-label": "share of the limit" }))],
      ], state.waits, "waits")
      : element("p", { class: "faint" }, "No process waits.")),
    ...costs(series),
    ...refusals(state, series),
    ...scaling(state),
  ].flat().filter(Boolean);
}

function stepProgress(progress) {
  const bar = (name, value, most) => element("div", {}, element("label", {}, `${name}: ${value} of ${most} `,
    element("progress", { value, max: Math.max(1, most), "aria-label": name })));
  return element("section", { "aria-label": "this step" }, element("h2", {}, "This step"),
    bar("samples finished", progress.samples_finished, progress.samples_total),
    bar("samples trained", progress.samples_trained, progress.samples_total),
    bar("groups complete", progress.groups_complete, progress.groups_total),
    element("p", { class: "faint" }, `${number(progress.tokens_generated)} tokens generated`));
}

function refusals(state, series) {
  const rows = Object.entries(state.refused).flatMap(([cause, peers]) => Object.entries(peers).map(([peer, count]) => ({ cause, peer, count })));
  const voids = Object.entries(series.byName.void_rate_by_cause ?? {}).map(([cause, values]) => ({ cause, last: values.at(-1), most: Math.max(0, ...values.map((v) => v ?? 0)) }));
  return [
    rows.length && [element("h2", {}, "Messages refused since the controller last started"), table([["cause", "cause"], ["from", "peer"], ["count", (one) => number(one.count), true]], rows, "refused messages")],
    voids.length && [element("h2", {}, "Void rewards by cause"), table([["cause", "cause"], ["last step", (one) => percent(one.last ?? 0), true], ["worst step", (one) => percent(one.most), true]], voids, "void rewards")],
  ].flat().filter(Boolean);
}

/** What was spent so far, by site and by process. */
function costs(series) {
  if (!series.costs.length) return [];
  const total = series.costs.reduce((sum, one) => sum + one.usd, 0);
  const sites = [...new Set(series.costs.map((one) => one.site))].map((site) => ({ site, usd: series.costs.filter((one) => one.site === site).reduce((sum, one) => sum + one.usd, 0) }));
  const columns = (name, key) => [[name, key], ["USD", (one) => number(one.usd), true], ["share", (one) => percent(one.usd / total), true]];
  const named = series.costs.map((one) => ({ ...one, process: one.process === "link" ? `link to ${one.site}` : one.process }));
  return [element("h2", {}, "Costs of the finished steps, by the cluster file's prices"),
    element("div", { class: "beside" }, table(columns("site", "site"), sites.sort((a, b) => b.usd - a.usd), "costs by site"),
      table([["process", "process"], ["site", "site"], ...columns("", "").slice(1)], named, "costs by process"))];
}

function scaling(state) {
  const pools = Object.entries(state.scaling?.wanted ?? {}).map(([pool, wanted]) => ({ pool, wanted, ready: state.scaling.ready[pool], there: state.scaling.there[pool] }));
  if (!pools.length) return [];
  return [element("h2", {}, "Pools of instances"),
    table([["pool", "pool"], ["wanted", (one) => number(one.wanted), true], ["there", (one) => number(one.there), true], ["ready", (one) => number(one.ready), true]], pools, "pools"),
    state.scaling.note && element("p", { class: "faint" }, state.scaling.note)].filter(Boolean);
}
