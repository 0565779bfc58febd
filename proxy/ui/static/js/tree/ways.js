// The ways of the tree's rollouts, by node: which rollouts reached it, with which labels. Pure but for `load`.

import { PAGE, get } from "../api.js";

const STALE_MS = 4000;

export class Ways {
  /** path: the API path of the task. */
  constructor(path, signal) {
    Object.assign(this, { path, signal, list: [], byName: new Map(), through: new Map(), loaded: -Infinity, truncated: false });
  }

  /** Load the ways of the tree that is shown, unless they were loaded a moment ago. Returns whether they are new. */
  async load({ root, own, task }, force = false) {
    if (!force && this.root === root && performance.now() - this.loaded < STALE_MS) return false;
    this.loaded = performance.now();
    const view = await get(`${this.path}/ways?limit=${PAGE}&root=${root}`, { signal: this.signal });
    this.root = root;
    this.truncated = view.next !== null;
    this.take(view.items.filter((way) => !own || way.task === task), task);
    return true;
  }

  take(list, task) {
    this.list = list;
    // Other tasks that share the tree may have rollouts of the same names.
    this.byName = new Map(list.filter((way) => way.task === task).map((way) => [way.rollout, way]));
    this.through = new Map();
    for (const way of list) {
      for (const node of new Set([way.start, ...way.nodes])) {
        if (!node) continue;
        if (!this.through.has(node)) this.through.set(node, []);
        this.through.get(node).push(way);
      }
    }
  }

  /** Return the mean reward of the rollouts that reached a node; null if none has one. */
  reward(node) {
    const known = (this.through.get(node) ?? []).map(rewardOf).filter((reward) => reward !== null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  }

  /** Return the value of a label that all rollouts at a node share; "" for several values, null for none. */
  label(node, name) {
    const values = new Set((this.through.get(node) ?? []).map((way) => way.labels[name]).filter((value) => value !== undefined));
    return values.size === 0 ? null : values.size === 1 ? [...values][0] : "";
  }

  /** Return the names of labels by which nodes can be coloured: those with at least two values, and the reward apart. */
  get labelNames() {
    const values = new Map();
    for (const way of this.list) {
      for (const [name, value] of Object.entries(way.labels)) {
        if (name === "reward") continue;
        if (!values.has(name)) values.set(name, new Set());
        values.get(name).add(value);
      }
    }
    return [...values].filter(([, set]) => set.size > 1 && set.size <= 200).map(([name]) => name).sort();
  }

  /** Return the values of a label, those of the most rollouts first. */
  valuesOf(name) {
    const counts = new Map();
    for (const way of this.list) if (way.labels[name] !== undefined) counts.set(way.labels[name], (counts.get(way.labels[name]) ?? 0) + 1);
    return [...counts].sort((a, b) => b[1] - a[1] || compare(a[0], b[0])).map(([value]) => value);
  }

  /** Return the least and the greatest reward; null without two different ones. */
  get rewards() {
    const known = this.list.map(rewardOf).filter((reward) => reward !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    return known.length && low < high ? [low, high] : null;
  }

  /** Return the ways in groups: of each run, step and group, or of nothing. */
  get groups() {
    const groups = new Map();
    for (const way of this.list) {
      const key = ["run", "step", "group"].map((name) => way.labels[name] ?? "").join("\u0000");
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(way);
    }
    return [...groups.values()].map((list) => ({ labels: labelsOf(list[0]), ways: [...list].sort((a, b) => compare(a.rollout, b.rollout)) }));
  }
}

const labelsOf = (way) => ["run", "step", "group"].filter((name) => way.labels[name] !== undefined).map((name) => [name, way.labels[name]]);

export const compare = (a, b) => a.localeCompare(b, "en", { numeric: true });

/** Return a rollout's reward as a number; null without one. */
export function rewardOf(way) {
  const reward = Number.parseFloat(way.labels.reward);
  return Number.isFinite(reward) ? reward : null;
}

/** Return for each way of a group how many of its calls come before it leaves the states that all have in common. */
export function shared(group) {
  const states = group.map(({ start, nodes }) => [start, ...nodes].filter((node, i, all) => node !== all[i - 1]));
  let length = 0;
  while (states.every((each) => length < each.length && each[length] === states[0][length])) length++;
  const parting = ({ start, nodes }) => {
    let seen = 1;
    const at = length ? nodes.findIndex((node, i) => (seen += node !== (nodes[i - 1] ?? start)) > length) : 0;
    return at < 0 ? nodes.length : at;
  };
  return new Map(group.map((way) => [way, parting(way)]));
}
