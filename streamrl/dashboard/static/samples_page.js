// All samples of a run: filtered, sorted, scrolled.
import { askRun, repeat } from "./api.js";
import { element } from "./dom.js";
import { number } from "./format.js";
import { VirtualList } from "./virtual_list.js";

const COLUMNS = [["sample", "sample_id"], ["step", "step", true], ["task", "task"], ["reward", "reward", true], ["advantage", "advantage", true],
  ["length", "output_length", true], ["predicted", "predicted_length", true], ["finish", "finish_reason"], ["route", "route"], ["outcome", "outcome"]];
const NUMBERS = [["reward from", "reward_min"], ["to", "reward_max"], ["length from", "length_min"], ["to", "length_max"], ["step from", "step_min"], ["to", "step_max"]];

export function samplesPage(main, run, query) {
  const filter = Object.fromEntries(query);
  const count = element("p", { role: "status", class: "faint" }, "Reading the samples …");
  const notes = element("div");
  const selects = element("span", { class: "filters" });
  let known = "";
  let all = null;
  let failed = false;
  let more;

  const list = new VirtualList("samples", async (offset, limit) => {
    const told = await askRun(run, "samples", { ...filter, offset, limit });
    show(told);
    const names = Object.keys(told.columns);
    return { total: told.total, rows: told.columns.sample_id.map((_, place) => Object.fromEntries(names.map((name) => [name, told.columns[name][place]]))) };
  }, draw, (row) => { location.hash = `#/run/${encodeURIComponent(run)}/sample?id=${encodeURIComponent(row.sample_id)}`; });
  list.failed = (problem) => {
    count.textContent = problem.message;
    failed = true;
  };

  const text = field("text in the sample", element("input", { type: "search", name: "text", value: filter.text ?? "", maxlength: 1000, placeholder: "prompt or answer", onchange: change }));
  const inputs = NUMBERS.map(([title, name]) => field(title, element("input", { type: "number", step: "any", name, value: filter[name] ?? "", "aria-label": label(title, name), onchange: change })));
  main.replaceChildren(element("h1", {}, run), element("form", { class: "filters", onsubmit: (event) => event.preventDefault() }, text, selects, inputs,
    element("button", { type: "button", onclick: clear }, "all samples")), notes, count,
  element("div", { class: "head" }, COLUMNS.map(([title, , isNumber]) => element("span", { class: isNumber && "number" }, title))), list.node);

  function field(title, input) {
    return element("label", {}, title, input);
  }

  function label(title, name) {
    return title === "to" ? `${name.split("_")[0]} to` : title;
  }

  function change(event) {
    const { name, value } = event.target;
    if (value) filter[name] = value;
    else delete filter[name];
    history.replaceState(null, "", `#/run/${encodeURIComponent(run)}/samples?${new URLSearchParams(filter)}`);
    list.reload();
  }

  function clear() {
    for (const name of Object.keys(filter)) delete filter[name];
    main.querySelectorAll("form input, form select").forEach((input) => { input.value = { sort: "step", descending: "true" }[input.name] ?? ""; });
    history.replaceState(null, "", `#/run/${encodeURIComponent(run)}/samples`);
    list.reload();
  }

  function choice(title, name, values, any = true) {
    const options = [...(any ? [["", "any"]] : []), ...values.map((value) => (Array.isArray(value) ? value : [value, value]))];
    return field(title, element("select", { name, onchange: change }, options.map(([value, text]) =>
      element("option", { value, selected: (filter[name] ?? (any ? "" : options[0][0])) === value }, text))));
  }

  function show(told) {
    const choices = JSON.stringify(told.choices);
    if (choices !== known) {
      known = choices;
      selects.replaceChildren(choice("task", "task", told.choices.task), choice("outcome", "outcome", told.outcomes),
        choice("finish reason", "finish_reason", told.choices.finish_reason), choice("route", "route", told.choices.route),
        choice("sorted by", "sort", told.sorts, false), choice("order", "descending", [["true", "descending"], ["false", "ascending"]], false));
    }
    notes.replaceChildren(...told.notes.map((text) => element("p", { class: "notice" }, text)));
    const group = filter.group_id ? ` of group ${filter.group_id}` : "";
    count.textContent = told.all === 0 ? "No step has written its samples yet." : `${number(told.total)} of ${number(told.all)} samples${group}${searching(told)}`;
    all = told.all;
    failed = false;
    clearTimeout(more);
    if (told.searched < told.files) more = setTimeout(() => list.reload(true), 100);
  }

  function searching(told) {
    return told.searched < told.files ? `, searching: ${number(told.searched)} of ${number(told.files)} steps so far` : "";
  }

  function draw(row) {
    return COLUMNS.map(([, name, isNumber]) => {
      const value = row[name];
      const mark = name === "outcome" ? { void: "bad", dropped: "warn", masked: "warn", skipped: "warn" }[value] : null;
      return element("span", { class: [isNumber && "number", mark].filter(Boolean).join(" ") || null, title: name === "sample_id" ? value : null }, isNumber ? number(value) : value ?? "–");
    });
  }

  const slash = (event) => {
    if (event.key !== "/" || event.target.closest("input, select, dialog")) return;
    event.preventDefault();
    main.querySelector("form input")?.focus();
  };
  document.addEventListener("keydown", slash);
  const first = list.reload().then(() => list.node.focus({ preventScroll: true }));
  const stop = repeat(async () => {
    await first;
    if (failed) {
      await list.reload(true);
      return;
    }
    try {
      const told = await askRun(run, "samples", { limit: 1 });
      if (told.all !== all) await list.reload(true);
    } catch { /* said in the head of the page */ }
  }, 5);
  return () => {
    stop();
    clearTimeout(more);
    list.remove();
    document.removeEventListener("keydown", slash);
  };
}
