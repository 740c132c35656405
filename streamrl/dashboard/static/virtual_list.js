// A list of any length: only the rows in sight are elements, and rows are asked for a page at a time.
import { element } from "./dom.js";

const HEIGHT = 28;
const PAGE = 200;
const MOST_PIXELS = 8_000_000; // browsers limit the height of an element
const KEPT_PAGES = 40;
const RETRY_MS = 3000;

export class VirtualList {
  /**
   * @param ask  (offset, limit) => Promise of { total, rows }
   * @param draw (row, index) => children of the row
   * @param open (row) => what Enter and a click do
   */
  constructor(label, ask, draw, open) {
    this.ask = ask;
    this.draw = draw;
    this.open = open;
    this.spacer = element("div", { role: "presentation" });
    this.node = element("div", { class: "list", role: "listbox", tabindex: "0", "aria-label": label, onscroll: () => this.schedule(), onkeydown: (event) => this.key(event) }, this.spacer);
    this.spacer.style.position = "relative";
    this.elements = new Map();
    this.resize = new ResizeObserver(() => this.schedule());
    this.resize.observe(this.node);
    this.total = 0;
    this.chosen = 0;
    this.pages = new Map();
    this.age = 0;
  }

  /** Forget all rows and ask again; `keep` keeps the place (new samples were added). */
  async reload(keep = false) {
    this.age += 1;
    this.pages.clear();
    if (!keep) {
      this.chosen = 0;
      this.node.scrollTop = 0;
    }
    this.drop(() => true);
    await this.fetch(Math.floor((keep ? this.first() : 0) / PAGE));
  }

  /** Ask for a page; return whether it is there, or no longer wanted. */
  async fetch(page) {
    if (this.pages.has(page)) return true;
    const age = this.age;
    this.pages.set(page, null);
    try {
      const told = await this.ask(page * PAGE, PAGE);
      if (age !== this.age) return true;
      this.pages.delete(page);
      this.pages.set(page, told.rows);
      if (told.total !== this.total) this.setTotal(told.total);
      for (const old of this.pages.keys()) {
        if (this.pages.size <= KEPT_PAGES) break;
        if (this.pages.get(old)) this.pages.delete(old);
      }
      this.drop((index) => Math.floor(index / PAGE) === page);
      this.render();
      return true;
    } catch (problem) {
      if (age === this.age) this.pages.delete(page);
      this.failed?.(problem);
      return false;
    }
  }

  setTotal(total) {
    this.total = total;
    this.spacer.style.height = `${Math.min(MOST_PIXELS, total * HEIGHT)}px`;
    this.chosen = Math.max(0, Math.min(this.chosen, total - 1));
  }

  /** Rows per pixel above 1 when the list is higher than a browser lets an element be. */
  get scale() {
    const high = this.total * HEIGHT;
    const room = this.node.clientHeight;
    return high <= MOST_PIXELS ? 1 : (high - room) / (MOST_PIXELS - room);
  }

  first() {
    return Math.floor((this.node.scrollTop * this.scale) / HEIGHT);
  }

  row(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  schedule() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.render();
    });
  }

  /** Remove the elements of some rows. */
  drop(these) {
    for (const [index, made] of this.elements) {
      if (!these(index)) continue;
      made.remove();
      this.elements.delete(index);
    }
  }

  /** Ask for the pages in sight that are not there, once it scrolls no further; at most one question at a time. */
  fetchSoon() {
    clearTimeout(this.soon);
    this.soon = setTimeout(async () => {
      const last = Math.max(0, Math.min(this.total, this.first() + Math.ceil(this.node.clientHeight / HEIGHT)) - 1);
      const wanted = [Math.floor(this.first() / PAGE), Math.floor(last / PAGE)].find((page) => !this.pages.has(page));
      if (wanted === undefined) return;
      if (this.fetching) {
        this.fetchSoon();
        return;
      }
      this.fetching = true;
      const there = await this.fetch(wanted);
      this.fetching = false;
      if (there) this.fetchSoon();
      else this.soon = setTimeout(() => this.fetchSoon(), RETRY_MS);
    }, 30);
  }

  render() {
    const first = Math.max(0, this.first() - 4);
    const last = Math.min(this.total, this.first() + Math.ceil(this.node.clientHeight / HEIGHT) + 5);
    this.drop((index) => index < first || index >= last);
    let missing = false;
    const shift = this.node.scrollTop - this.node.scrollTop * this.scale;
    for (let index = first; index < last; index += 1) {
      const row = this.row(index);
      missing ||= !row;
      let made = this.elements.get(index);
      if (!made) {
        made = element("div", { class: "row", role: "option", id: `row-${index}`, "aria-setsize": this.total, "aria-posinset": index + 1,
          onclick: () => { this.choose(index); this.openChosen(); } }, ...(row ? this.draw(row, index) : [element("span", { class: "faint" }, "…")]));
        this.elements.set(index, made);
        this.spacer.append(made);
      }
      made.style.transform = `translateY(${index * HEIGHT + shift}px)`;
      made.setAttribute("aria-selected", index === this.chosen ? "true" : "false");
    }
    if (missing) this.fetchSoon();
    this.node.setAttribute("aria-activedescendant", `row-${this.chosen}`);
  }

  choose(index) {
    this.chosen = Math.max(0, Math.min(index, this.total - 1));
    const rows = Math.max(1, Math.floor(this.node.clientHeight / HEIGHT) - 1);
    const first = this.first();
    if (this.chosen < first || this.chosen > first + rows - 1) {
      const wanted = this.chosen < first ? this.chosen : this.chosen - rows + 1;
      this.node.scrollTop = (wanted * HEIGHT) / this.scale;
    }
    this.schedule();
  }

  openChosen() {
    const row = this.row(this.chosen);
    if (row) this.open(row);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.node.clientHeight / HEIGHT) - 1);
    const to = { ArrowDown: this.chosen + 1, ArrowUp: this.chosen - 1, PageDown: this.chosen + page, PageUp: this.chosen - page, Home: 0, End: this.total - 1 }[event.key];
    if (to !== undefined) this.choose(to);
    else if (event.key === "Enter") this.openChosen();
    else return;
    event.preventDefault();
  }

  remove() {
    this.age += 1;
    clearTimeout(this.soon);
    this.resize.disconnect();
  }
}
