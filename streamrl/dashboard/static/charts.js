// Line, point and bar charts by plotly.js, which is loaded when the first chart is drawn: text is there before it.
import { element } from "./dom.js";

let loading = null;

/** Load the library once; it is a classic script that defines `Plotly`. */
function library() {
  loading ??= new Promise((resolve, reject) => {
    const script = element("script", { src: "/plotly.min.js" });
    script.addEventListener("load", () => resolve(globalThis.Plotly));
    script.addEventListener("error", () => reject(new Error("the chart library could not be loaded")));
    document.head.append(script);
  });
  return loading;
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export const colour = (index) => style(`--c${index % 8}`);
export const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];

function layout(changes) {
  const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line"), automargin: true };
  return {
    margin: { l: 48, r: 10, t: 8, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: style("--text"), size: 12, family: getComputedStyle(document.body).fontFamily },
    showlegend: false,
    legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom" },
    hovermode: "closest",
    hoverlabel: { bgcolor: style("--back"), bordercolor: style("--line"), font: { color: style("--text") } },
    ...changes,
    xaxis: { ...axis, ...changes.xaxis },
    yaxis: { ...axis, ...changes.yaxis },
  };
}

const CONFIG = { displaylogo: false, responsive: true, scrollZoom: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

/** A figure that is made once and drawn again with new data; nothing is drawn if the data are the same. */
export class Chart {
  constructor(title, { tall = false, onRange = null, scrollZoom = false } = {}) {
    this.plot = element("div", { class: "plot" });
    this.summary = element("p", { class: "faint", hidden: true });
    this.node = element("figure", { class: tall ? "chart tall" : "chart", role: "group", "aria-label": title },
      element("figcaption", {}, title), this.plot);
    this.onRange = onRange;
    this.config = { ...CONFIG, scrollZoom };
    this.drawn = "";
    this.last = null;
  }

  async draw(traces, changes = {}) {
    this.last = [traces, changes];
    const key = JSON.stringify([traces, changes]);
    if (key === this.drawn) return;
    this.drawn = key;
    const plotly = await library();
    if (!this.plot.isConnected) {
      this.drawn = "";
      return;
    }
    const first = !this.plot.classList.contains("js-plotly-plot");
    await plotly.react(this.plot, traces, layout({ uirevision: "same", ...changes }), this.config);
    if (first && this.onRange) {
      this.plot.on("plotly_relayout", (event) => {
        if ("xaxis.range[0]" in event) this.onRange(event["xaxis.range[0]"], event["xaxis.range[1]"]);
        else if (event["xaxis.autorange"]) this.onRange(null, null);
      });
    }
  }

  redraw() {
    if (!this.last) return;
    this.drawn = "";
    this.draw(...this.last);
  }

  remove() {
    if (this.plot.classList.contains("js-plotly-plot")) globalThis.Plotly?.purge(this.plot);
  }
}

/** Make a line of one figure over the steps. */
export function line(name, x, y, index = 0, dash = 0) {
  const few = x.length < 40;
  return { name, x, y, type: "scatter", mode: few ? "lines+markers" : "lines", connectgaps: false,
    line: { color: colour(index), width: 2, dash: DASHES[dash % DASHES.length] }, marker: { size: 5, color: colour(index) } };
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("theme")));
