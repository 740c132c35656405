// Asks the dashboard's server; says in the head of the page whether it and the run are still there.

export class Problem extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

const connection = document.getElementById("connection");

function say(text, bad) {
  if (connection.textContent !== text) connection.textContent = text;
  connection.className = bad ? "bad" : "";
}

/** Return what the server answers; throw a Problem if it refuses, or cannot be reached. */
export async function ask(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(given).toString();
  let answer;
  try {
    answer = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { credentials: "same-origin" });
  } catch {
    say("The dashboard was stopped; what you see is its last state.", true);
    throw new Problem(0, "The dashboard does not answer: it was stopped, or this machine is disconnected.");
  }
  if (!answer.ok) {
    const told = answer.headers.get("content-type")?.includes("json") ? (await answer.json()).error : await answer.text();
    if (answer.status === 410) say("This run's folder is gone; what you see was read before.", true);
    throw new Problem(answer.status, told);
  }
  const value = await answer.json();
  say("", false);
  return value;
}

export const askRun = (run, what, query) => ask(`runs/${encodeURIComponent(run)}/${what}`, query);

/** Call a function now and again `seconds` after each end, while the page is visible; return how to stop it. */
export function repeat(work, seconds) {
  let stopped = false;
  let timer;
  let busy = false;
  const turn = async () => {
    if (busy) return;
    busy = true;
    if (!document.hidden) await work();
    busy = false;
    if (!stopped) timer = setTimeout(turn, 1000 * seconds);
  };
  const seen = () => {
    if (document.hidden || stopped) return;
    clearTimeout(timer);
    turn();
  };
  document.addEventListener("visibilitychange", seen);
  turn();
  return () => {
    stopped = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", seen);
  };
}
