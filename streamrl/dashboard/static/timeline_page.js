// What every instance and the trainer did when; the server sends as much of it as the picture can show.
import { askRun, repeat } from "./api.js";
import { Chart, colour } from "./charts.js";
import { element, table } from "./dom.js";
import { duration, number } from "./format.js";

const LANE = 0.16;

export function timelinePage(main, run) {
  const shown = { start: null, end: null, first: 0, last: 0 };
  const chart = new Chart("timeline, seconds since the run began", { tall: true, scrollZoom: true, onRange: (start, end) => move(start, end) });
  const about = element("p", { class: "faint", role: "status" });
  const busy = element("div");
  const button = (text, label, work) => element("button", { type: "button", "aria-label": label, onclick: work }, text);
  main.replaceChildren(element("h1", {}, run),
    element("p", {}, button("−", "zoom out", () => zoom(2)), " ", button("+", "zoom in", () => zoom(0.5)), " ", button("←", "earlier", () => shift(-0.4)), " ",
      button("→", "later", () => shift(0.4)), " ", button("all", "show the whole run", () => move(null, null)), " ", button("newest", "show the last minute", newest)),
    about, chart.node, element("h2", {}, "Shares of this window"), busy);

  let told = null;
  let drawn = null; // the cursor of what is shown
  let asked = 0;

  async function refresh() {
    const mine = ++asked;
    try {
      const answer = await askRun(run, "timeline", { start: shown.start, end: shown.end, pixels: Math.round(chart.plot.clientWidth || 1000), since: drawn });
      if (mine !== asked) return; // a newer window was asked for meanwhile
      if (answer.unchanged) return;
      told = answer;
      shown.first = told.first;
      shown.last = told.last;
      await draw();
      drawn = answer.cursor;
    } catch (problem) {
      if (problem.status && !told) about.textContent = problem.message;
    }
  }

  function move(start, end) {
    shown.start = start === null ? null : Number(start);
    shown.end = end === null ? null : Number(end);
    refresh();
  }

  const window_ = () => [shown.start ?? shown.first, shown.end ?? shown.last];
  function zoom(factor) {
    const [start, end] = window_();
    const half = Math.max(0.005, (factor * (end - start)) / 2);
    move((start + end) / 2 - half, (start + end) / 2 + half);
  }
  function shift(share) {
    const [start, end] = window_();
    move(start + share * (end - start), end + share * (end - start));
  }
  function newest() {
    move(Math.max(shown.first, shown.last - 60), shown.last);
  }

  async function draw() {
    const tracks = told.tracks.filter((track) => track.bars.length);
    if (!told.tracks.length || told.last <= told.first) {
      about.textContent = "The run has no trace yet: spans are written when they end.";
      return;
    }
    const names = [...new Set(told.tracks.flatMap((track) => track.bars.map((bar) => bar.name)))].sort();
    const [start, end] = window_();
    about.textContent = `${duration(end - start)} of ${duration(told.last - told.first)}; drag to zoom, keys + − ← → 0`;
    const traces = names.map((name, index) => ({ name, type: "bar", orientation: "h", base: [], x: [], y: [], width: [], text: [], textposition: "none",
      hovertemplate: "%{text}<extra></extra>", marker: { color: colour(index), line: { width: 0 }, pattern: { shape: ["", "/", ".", "x", "-", "|"][index % 6], fillmode: "overlay", size: 5 } } }));
    const ticks = [];
    let row = 0;
    for (const track of tracks) {
      const lanes = 1 + Math.max(...track.bars.map((bar) => bar.lane));
      const height = Math.max(0.8, LANE * lanes);
      for (const bar of track.bars) {
        const trace = traces[names.indexOf(bar.name)];
        trace.base.push(bar.start);
        trace.x.push(Math.max(bar.end - bar.start, (end - start) / 2000));
        trace.y.push(-(row + ((bar.lane + 0.5) * height) / lanes));
        trace.width.push((0.94 * height) / lanes);
        trace.text.push(hover(track, bar));
      }
      ticks.push([-(row + height / 2), track.name]);
      row += height + 0.25;
    }
    chart.plot.style.height = `${Math.max(240, Math.min(1400, 90 + 44 * row))}px`;
    await chart.draw(traces, { barmode: "overlay", showlegend: true, dragmode: "zoom", uirevision: `${start} ${end}`,
      xaxis: { range: [start, end], title: { text: "seconds" } },
      yaxis: { fixedrange: true, tickvals: ticks.map(([at]) => at), ticktext: ticks.map(([, name]) => plain(name)), range: [-row, 0] } });
    shares(tracks, told.end - told.start);
  }

  function shares(tracks, seconds) {
    const names = [...new Set(tracks.flatMap((track) => Object.keys(track.covered)))].sort();
    const columns = [["process", (track) => track.name], ...names.map((name) => [name, (track) => {
      const share = Object.hasOwn(track.covered, name) ? track.covered[name] / seconds : 0;
      return share ? `${(100 * share).toFixed(0)} %` : "–";
    }, true])];
    busy.replaceChildren(table(columns, tracks, "share of the window in which each process did what"));
  }

  const keys = (event) => {
    if (event.target.closest("input, select, textarea, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
    const work = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => shift(-0.4), ArrowRight: () => shift(0.4), 0: () => move(null, null) }[event.key];
    if (!work) return;
    event.preventDefault();
    work();
  };
  const theme = () => told && draw();
  document.addEventListener("keydown", keys);
  document.addEventListener("theme", theme);
  const stop = repeat(refresh, 4);
  return () => {
    stop();
    document.removeEventListener("keydown", keys);
    document.removeEventListener("theme", theme);
    chart.remove();
  };
}

/** Plotly takes a few tags in its texts: names of a run's files must not be any. */
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");

function hover(track, bar) {
  const many = bar.count > 1 ? `<br>${number(bar.count)} spans${bar.busy > 1.05 ? `, ${number(bar.busy)} at a time` : ""}` : "";
  return `${plain(track.name)}: ${plain(bar.name)}<br>${duration(bar.end - bar.start)} from ${number(bar.start, 6)} s${many}${bar.detail ? `<br>${plain(bar.detail)}` : ""}`;
}
