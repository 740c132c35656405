// Elements are made here, and only here. Text becomes text nodes, never HTML: a completion may contain any markup.

/** Make an element; `attributes` may have `class`, `on<event>` functions and any attribute; falsy children are left out. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) made.append(child);
  }
  return made;
}

/** Replace what an element contains, unless it would look the same: a selection and the focus stay where they are. */
export function fill(target, ...children) {
  const next = element("div", {}, ...children);
  if (target.innerHTML !== next.innerHTML) target.replaceChildren(...next.childNodes);
}

/** Make a table; columns are [title, key or function of a row, is a number]. */
export function table(columns, rows, caption) {
  const cell = (row, what) => (typeof what === "function" ? what(row) : row[what]);
  const head = columns.map(([title, , number]) => element("th", { scope: "col", class: number && "number" }, title));
  const body = rows.map((row) =>
    element("tr", {}, columns.map(([, what, number]) => element("td", { class: number && "number" }, cell(row, what) ?? "–"))),
  );
  return element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {}, element("thead", {}, element("tr", {}, head)), element("tbody", {}, body)));
}

/** Make a list of figures; entries are [name, value]; those without a value are left out. */
export function tiles(entries) {
  const shown = entries.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return element("dl", { class: "tiles" }, shown.map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}
