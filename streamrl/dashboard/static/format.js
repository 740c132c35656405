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
  const whole = Math.round(seconds); // before it is split: 179.6 s is not "2 min 60 s"
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(whole / 60);
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function moment(unix) {
  return unix ? new Date(unix * 1000).toLocaleString("sv") : "–";
}

export function stateClass(state, bad = false) {
  if (bad || ["failed", "dead", "exited"].includes(state)) return "bad";
  if (["ready", "running", "done"].includes(state)) return "good";
  return ["starting", "loading", "stopping", "interrupted", "unknown"].includes(state) ? "warn" : "";
}
