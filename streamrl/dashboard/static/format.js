// Numbers and times as text.

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

export function moment(unix) {
  return unix ? new Date(unix * 1000).toLocaleString("sv") : "–";
}

export function stateClass(state, bad = false) {
  if (bad || ["failed", "dead", "exited"].includes(state)) return "bad";
  if (["ready", "running", "done"].includes(state)) return "good";
  return ["starting", "loading", "stopping", "interrupted", "unknown"].includes(state) ? "warn" : "";
}
