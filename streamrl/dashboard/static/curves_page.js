// The curves of one run over its steps, and predicted against actual lengths.
import { askRun, repeat } from "./api.js";
import { Chart, colour, line } from "./charts.js";
import { element } from "./dom.js";
import { Series } from "./series.js";

const CURVES = [
  ["reward", [["reward_mean", "mean"]]],
  ["reward by task", "reward_by_task"],
  ["output length, tokens", [["output_length_mean", "mean"], ["output_length_p50", "median"], ["output_length_p90", "90th percentile"], ["output_length_max", "longest"]]],
  ["seconds of a step", [["step_time_s", "step"], ["generate_time_s", "generating"], ["train_time_s", "training"], ["weight_sync_exposed_s", "lost to weights"]]],
  ["idle share", [["bubble_fraction_generation", "instances"], ["bubble_fraction_training", "trainer"]]],
  ["tokens per second", [["tokens_per_s", "generated"], ["train_tokens_per_s", "trained, with prompts"]]],
  ["loss", [["loss", "policy"], ["value_loss", "critic"]]],
  ["gradient norm before clipping", [["grad_norm", "policy"], ["critic_grad_norm", "critic"]]],
  ["entropy, nats per token", [["entropy", "policy"]]],
  ["trainer-generator mismatch, nats", [["logprob_gap_mean", "mean difference"]]],
  ["staleness, versions", [["staleness_mean", "mean"], ["staleness_max", "largest"]]],
  ["shares", [["truncated_fraction", "ended by the token limit"], ["clip_fraction", "clipped"], ["masked_fraction", "masked"], ["void_rate", "void rewards"], ["environment_hidden_fraction", "environments' time hidden"]]],
  ["void rewards by cause", "void_rate_by_cause"],
  ["groups", [["groups_total", "trained"], ["groups_no_gradient", "without gradient"], ["groups_dropped", "dropped"], ["groups_void", "dropped: too few rewards"]]],
  ["cost, USD", [["usd", "of the step"], ["usd_per_1k_samples", "of 1,000 samples"]]],
  ["length ranker", [["ranker_recall_at_20", "recall of the longest 20 %"], ["ranker_kendall_tau", "Kendall tau"]]],
  ["memory of all processes, GiB", [["process_memory_gb", "memory"]]],
];
const ROUTES = ["regular", "tail"];

export function curvesPage(main, run) {
  const series = new Series();
  const grid = element("div", { class: "charts" });
  const empty = element("p", { class: "notice" }, "No optimizer step has finished yet.");
  const charts = new Map(CURVES.map(([title]) => [title, new Chart(title)]));
  const evaluated = new Chart("evaluations: reward and pass@k");
  const lengths = new Chart("predicted against actual length, tokens", { tall: true });
  main.replaceChildren(element("h1", {}, run), empty, grid);

  async function refresh() {
    try {
      const before = series.cursor;
      series.add(await askRun(run, "steps", { since: series.cursor }));
      empty.hidden = series.step.length > 0;
      await draw();
      if (series.cursor !== before) await drawLengths();
    } catch (problem) {
      if (problem.status && !series.step.length) empty.textContent = problem.message;
    }
  }

  async function place(chart, lines, changes) {
    if (!lines.length) return;
    if (!chart.node.isConnected) grid.append(chart.node);
    await chart.draw(lines, { showlegend: lines.length > 1, xaxis: { title: { text: "step" } }, ...changes });
  }

  async function draw() {
    for (const [title, what] of CURVES) {
      const lines = typeof what === "string"
        ? Object.entries(series.byName[what] ?? {}).map(([name, values], index) => line(name, series.step, values, index, index))
        : what.filter(([name]) => series.has(name)).map(([name, label], index) => line(label, series.step, series.figure(name), index, index));
      await place(charts.get(title), lines);
    }
    const rows = series.evaluations;
    const most = Math.max(0, ...rows.map((row) => row.pass_at.length));
    const passes = [...new Set([1, most])].filter((k) => k >= 1 && k <= most);
    if (rows.length) {
      await place(evaluated, [line("reward", rows.map((row) => row.step), rows.map((row) => row.reward)),
        ...passes.map((k, index) => line(`pass@${k}`, rows.map((row) => row.step), rows.map((row) => row.pass_at[k - 1] ?? null), index + 1, index + 1))]);
    }
  }

  async function drawLengths() {
    const told = (await askRun(run, "lengths")).columns;
    if (!told.sample_id.length) return;
    const routes = [...new Set(told.route)].sort((a, b) => ROUTES.indexOf(a) - ROUTES.indexOf(b));
    const points = routes.map((route, index) => {
      const of = told.route.map((one, place) => (one === route ? place : -1)).filter((place) => place >= 0);
      return { name: `route ${route ?? "none"}`, x: of.map((place) => told.predicted_length[place]), y: of.map((place) => told.output_length[place]),
        type: "scatter", mode: "markers", marker: { size: 6, opacity: 0.6, color: colour(index), symbol: index ? "diamond-open" : "circle" } };
    });
    const most = Math.max(...told.predicted_length, ...told.output_length);
    points.push({ name: "as predicted", x: [0, most], y: [0, most], mode: "lines", line: { color: colour(7), width: 1, dash: "dot" }, hoverinfo: "skip" });
    await place(lengths, points, { xaxis: { title: { text: "predicted" } }, yaxis: { title: { text: "actual" } } });
  }

  const all = [...charts.values(), evaluated, lengths];
  const theme = () => all.forEach((chart) => chart.redraw());
  document.addEventListener("theme", theme);
  const stop = repeat(refresh, 3);
  return () => {
    stop();
    document.removeEventListener("theme", theme);
    all.forEach((chart) => chart.remove());
  };
}
