// The figures of a run's steps, of which only new ones are asked for.

export class Series {
  constructor() {
    this.forget();
  }

  forget() {
    this.cursor = "";
    this.step = [];
    this.time = [];
    this.figures = {};
    this.byName = {};
    this.warnings = [];
    this.evaluations = [];
    this.usd = null;
    this.costs = [];
  }

  /** Take an answer of `steps`; `reset` says that the run has begun again at an older step. */
  add(told) {
    if (told.reset) this.forget();
    const before = this.step.length;
    this.cursor = told.cursor;
    this.step = this.step.concat(told.step);
    this.time = this.time.concat(told.time);
    for (const [name, values] of Object.entries(told.figures)) this.figures[name] = (this.figures[name] ?? []).concat(values);
    for (const [name, columns] of Object.entries(told.by_name)) {
      const known = (this.byName[name] ??= {});
      for (const key of new Set([...Object.keys(known), ...Object.keys(columns)])) {
        known[key] = (known[key] ?? Array(before).fill(null)).concat(columns[key] ?? Array(told.step.length).fill(null));
      }
    }
    this.warnings = this.warnings.concat(told.warnings);
    this.evaluations = told.evaluations;
    this.usd = told.usd;
    this.costs = told.costs;
  }

  figure(name) {
    return this.figures[name] ?? [];
  }

  last(name) {
    return this.figure(name).at(-1) ?? null;
  }

  has(name) {
    return this.figure(name).some((value) => value !== null);
  }
}
