// All runs, and chosen ones compared: the same figure of several runs in one chart.
import { ask, askRun, repeat } from "./api.js";
import { Chart, line } from "./charts.js";
import { element, fill, table } from "./dom.js";
import { duration, moment, number, stateClass } from "./format.js";
import { Series } from "./series.js";

const COMPARED = [
  ["reward_mean", "reward, mean"], ["output_length_mean", "output length, mean tokens"], ["step_time_s", "time per step, s"],
  ["tokens_per_s", "generated tokens per second"], ["loss", "loss"], ["entropy", "entropy, nats per token"],
  ["logprob_gap_mean", "trainer-generator mismatch, nats"], ["void_rate", "share of void rewards"],
];

export function runsPage(main, query) {
  const chosen = new Set(query.getAll("compare"));
  const list = element("div");
  const compare = element("div");
  const charts = COMPARED.map(([name, title]) => [name, new Chart(title)]);
  const series = new Map();
  main.replaceChildren(element("h1", {}, "Runs"), list, compare);

  function choose(id, on) {
    on ? chosen.add(id) : chosen.delete(id);
    const text = new URLSearchParams([...chosen].map((one) => ["compare", one])).toString();
    history.replaceState(null, "", text ? `#/?${text}` : "#/");
    refresh();
  }

  function show(told) {
    const columns = [
      ["compare", (run) => element("input", { type: "checkbox", checked: chosen.has(run.id), "aria-label": `compare ${run.id}`,
        onchange: (event) => choose(run.id, event.target.checked) })],
      ["run", (run) => element("a", { href: `#/run/${encodeURIComponent(run.id)}`, title: run.folder }, run.id)],
      ["state", (run) => element("span", { class: stateClass(run.state) }, run.live || run.state !== "running" ? run.state : "running, but silent")],
      ["step", (run) => (run.steps ? `${run.step} of ${run.steps}` : `${run.step}`), true],
      ["reward", (run) => number(run.reward), true],
      ["length", (run) => number(run.length), true],
      ["time per step", (run) => duration(run.step_time_s), true],
      ["model", (run) => run.model], ["schedule", (run) => run.schedule],
      ["last change", (run) => moment(run.updated_at)],
    ];
    if (!told.runs.length) fill(list, element("p", { class: "notice" }, "No run is here yet; the first one appears by itself."));
    else fill(list, table(columns, told.runs, "runs"));
  }

  async function draw() {
    const ids = [...chosen];
    if (!ids.length) {
      compare.replaceChildren(element("p", { class: "faint" }, "Choose runs to compare their curves."));
      return;
    }
    if (!compare.querySelector(".charts")) {
      compare.replaceChildren(element("h2", {}, "Compared"), element("div", { class: "charts" }, charts.map(([, chart]) => chart.node)));
    }
    for (const id of ids) {
      if (!series.has(id)) series.set(id, new Series());
      try {
        series.get(id).add(await askRun(id, "steps", { since: series.get(id).cursor }));
      } catch (problem) {
        if (problem.status !== 410 && problem.status !== 404) throw problem;
      }
    }
    await Promise.all(charts.map(([name, chart]) =>
      chart.draw(ids.map((id, place) => line(id, series.get(id).step, series.get(id).figure(name), place, place)),
        { showlegend: true, xaxis: { title: { text: "step" } } })));
  }

  async function refresh() {
    try {
      show(await ask("runs"));
      await draw();
    } catch (problem) {
      if (!list.firstChild) fill(list, element("p", { class: "notice bad" }, problem.message));
    }
  }

  const theme = () => charts.forEach(([, chart]) => chart.redraw());
  document.addEventListener("theme", theme);
  const stop = repeat(refresh, 3);
  return () => {
    stop();
    document.removeEventListener("theme", theme);
    charts.forEach(([, chart]) => chart.remove());
  };
}
