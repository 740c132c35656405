// One sample with its tokens or its conversation, and all samples of a group side by side.
import { askRun } from "./api.js";
import { element, table, tiles } from "./dom.js";
import { duration, moment, number } from "./format.js";

const SHADES = [[0.05, "p0"], [0.3, "p1"], [0.7, "p2"], [0.95, "p3"]];
const link = (run, what, id) => `#/run/${encodeURIComponent(run)}/${what}?id=${encodeURIComponent(id)}`;

export function samplePage(main, run, query) {
  const id = query.get("id") ?? "";
  const body = element("div", {}, element("p", {}, "Reading the sample …"));
  main.replaceChildren(element("h1", {}, `Sample ${id}`), body);

  async function show(all) {
    try {
      const sample = await askRun(run, "sample", { id, all });
      body.replaceChildren(...sampleView(run, sample, () => show(true)));
    } catch (problem) {
      body.replaceChildren(element("p", { class: "notice bad" }, problem.message));
    }
  }
  show(false);
  return () => {};
}

function sampleView(run, sample, showAll) {
  const trained = sample.t_trained;
  return [
    sample.why && element("p", { class: "notice" }, sample.why),
    ...sample.notes.map((text) => element("p", { class: "notice" }, text)),
    tiles([
      ["outcome", sample.outcome], ["reward", number(sample.reward)], ["advantage", number(sample.advantage)],
      ["length", `${number(sample.output_length)} tokens`], ["predicted", sample.predicted_length === null ? null : `${number(sample.predicted_length)} tokens`],
      ["finish reason", sample.finish_reason], ["task", sample.task], ["step", number(sample.step)],
      ["group", sample.group_id && element("a", { href: link(run, "group", sample.group_id) }, sample.group_id)],
      ["instance", sample.instance], ["route", sample.route],
      ["waited", sample.t_dispatched && sample.t_queued ? duration(sample.t_dispatched - sample.t_queued) : null],
      ["generated in", sample.t_finished && sample.t_dispatched ? duration(sample.t_finished - sample.t_dispatched) : null],
      ["trained at", trained ? moment(trained) : null],
    ]),
    ...(sample.messages ? conversation(sample) : texts(sample)),
    sample.cut && element("button", { type: "button", onclick: showAll }, "show whole texts"),
    ...sample.rows.flatMap((row, place) => tokens(row, sample.rows.length > 1 ? `Tokens of row ${place + 1}` : "Tokens", sample, showAll)),
  ].filter(Boolean);
}

function texts(sample) {
  return [element("h2", {}, "Prompt"), element("div", { class: "text", tabindex: "0" }, sample.prompt ?? "(only tokens are known)"),
    element("h2", {}, "Completion"), element("div", { class: "text", tabindex: "0" }, sample.completion ?? "(only tokens are known)")];
}

function conversation(sample) {
  const steps = sample.steps ?? [];
  return [element("h2", {}, "Conversation"), ...sample.messages.map((one) =>
    element("section", { class: `message ${["assistant", "tool", "user", "system"].includes(one.role) ? one.role : ""}` }, element("h3", {}, one.role),
      one.content && element("div", { class: "text", tabindex: "0" }, one.content), one.calls.map((call) => element("div", { class: "text", tabindex: "0" }, `→ ${call}`)))),
  steps.length && element("h2", {}, "Steps of the episode"),
  steps.length && table([["kind", "kind"], ["name", "name"], ["time", (one) => duration(one.finished - one.started), true], ["tokens", (one) => number(one.tokens), true], ["detail", "detail"]], steps, "steps")].filter(Boolean);
}

function tokens(row, title, sample, showAll) {
  if (!row.ids.length) return [];
  const told = element("p", { role: "status", class: "faint" }, "Choose a token with the mouse or with ← → to see its figures.");
  const box = element("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": title });
  let before = null;
  const spans = row.ids.map((id, place) => {
    const sampled = row.sampled[place];
    const names = [sampled ? shade(row.logprobs[place]) : "given"];
    if (sampled && before !== null && row.versions[place] !== before) names.push("new-version");
    if (sampled) before = row.versions[place];
    return element("span", { class: names.filter(Boolean).join(" ") || null, "data-place": String(place) }, row.texts ? row.texts[place] : `${id} `);
  });
  box.append(...spans);
  let chosen = -1;
  const choose = (place) => {
    if (place < 0 || place >= spans.length) return;
    spans[chosen]?.classList.remove("chosen");
    chosen = place;
    spans[place].classList.add("chosen");
    spans[place].scrollIntoView({ block: "nearest" });
    const logprob = row.logprobs[place];
    told.textContent = [`token ${place + 1} of ${number(row.total)}: id ${row.ids[place]}`,
      row.sampled[place] ? `log-probability ${logprob === null ? "unknown" : logprob.toFixed(4)}${logprob === null ? "" : ` (p ${number(Math.exp(logprob))})`}` : "not sampled: no loss (mask 0)",
      row.sampled[place] && `${sample.outcome === "trained" ? "mask 1" : "no loss"}, weight version ${row.versions[place] ?? "unknown"}, advantage ${number(sample.advantage)}`].filter(Boolean).join(", ");
  };
  box.addEventListener("mouseover", (event) => event.target.dataset.place && choose(Number(event.target.dataset.place)));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(chosen + step);
  });
  const versions = [...new Set(row.versions.filter((one) => one !== null))];
  return [element("h2", {}, title),
    element("p", { class: "legend" }, `${number(row.total)} tokens after a prompt of ${number(row.prompt_tokens)}; weight version ${versions.join(", ") || "unknown"}. `,
      element("span", { class: "p0" }, "p < 0.05"), element("span", { class: "p1" }, "< 0.3"), element("span", { class: "p2" }, "< 0.7"), element("span", { class: "p3" }, "< 0.95"),
      row.sampled.includes(false) && element("span", { class: "given faint" }, "not sampled, no loss")),
    told, box,
    row.ids.length < row.total && element("button", { type: "button", onclick: showAll }, `show all ${number(row.total)} tokens`)].filter(Boolean);
}

function shade(logprob) {
  if (logprob === null) return null;
  const chance = Math.exp(logprob);
  return SHADES.find(([most]) => chance < most)?.[1] ?? null;
}

/** Groups one above the other, the samples of each side by side; the address has their ids. */
export function groupPage(main, run, query) {
  const ids = [...new Set(query.getAll("id"))];
  const body = element("div", {}, element("p", {}, "Reading the group …"));
  main.replaceChildren(element("h1", {}, ids.length > 1 ? `${ids.length} groups` : `Group ${ids[0] ?? ""}`), body);
  const shown = (some) => `#/run/${encodeURIComponent(run)}/group?${new URLSearchParams(some.map((id) => ["id", id]))}`;

  function choice(group) {
    const offer = (title, groups) => groups.length > 0 && element("optgroup", { label: title },
      groups.map((one) => element("option", { value: one.group_id }, `step ${one.step}, reward ${number(one.reward)}: ${one.group_id}`)));
    const open = (some) => [offer("same prompt", some.prompt), offer("same step", some.step)];
    const free = (groups) => groups.filter((one) => !ids.includes(one.group_id));
    const some = { prompt: free(group.others.prompt), step: free(group.others.step) };
    if (!some.prompt.length && !some.step.length) return null;
    return element("p", { class: "filters" }, element("label", {}, "compare with", element("select", { onchange: (event) => { if (event.target.value) location.hash = shown([...ids, event.target.value]); } },
      element("option", { value: "" }, "choose a group"), open(some))));
  }

  function groupView(group) {
    return element("section", { "aria-label": `group ${group.group_id}` },
      ids.length > 1 && element("h2", {}, `Group ${group.group_id}, step ${number(group.step)} `,
        element("button", { type: "button", "aria-label": `leave out group ${group.group_id}`, onclick: () => { location.hash = shown(ids.filter((id) => id !== group.group_id)); } }, "×")),
      element(ids.length > 1 ? "h3" : "h2", {}, "Prompt"), element("div", { class: "text", tabindex: "0" }, group.prompt ?? "(only tokens are known)"),
      element(ids.length > 1 ? "h3" : "h2", {}, group.members.length < group.samples ? `${number(group.members.length)} of ${number(group.samples)} samples` : `${number(group.samples)} samples`), element("div", { class: "members", tabindex: "0", role: "region", "aria-label": `samples of group ${group.group_id}` }, group.members.map((one) => member(run, one))));
  }

  Promise.all(ids.map((id) => askRun(run, "group", { id }))).then((groups) => body.replaceChildren(...[groups.length && choice(groups[0]), ...groups.map(groupView)].filter(Boolean)),
    (problem) => body.replaceChildren(element("p", { class: "notice bad" }, problem.message)));
  return () => {};
}

function member(run, one) {
  return element("article", {}, element("h3", {}, element("a", { href: link(run, "sample", one.sample_id) }, one.sample_id)),
    element("p", {}, `reward ${number(one.reward)}, advantage ${number(one.advantage)}, ${number(one.output_length)} tokens, ${one.finish_reason ?? "no finish reason"}`),
    one.why && element("p", { class: "notice" }, one.why), element("div", { class: "text", tabindex: "0" }, one.text ?? "(only tokens are known)"));
}
