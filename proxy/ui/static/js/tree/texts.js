// The texts of calls: fetched for the nodes that are visible, after a short delay, and kept.

import { items } from "../api.js";
import { oneLine } from "../format.js";

const AT_ONCE = 200;
const AGAIN_MS = 3000;

export class Texts {
  /** tree: returns the root of the tree that is shown. changed: called when texts or hits are new. */
  constructor(path, model, signal, tree, changed) {
    Object.assign(this, { path, model, signal, tree, changed, known: new Map(), wanted: new Set() });
  }

  get(v) {
    return this.known.get(v);
  }

  clear() {
    this.known.clear();
    this.wanted.clear();
  }

  /** Fetch the texts of nodes soon. */
  want(nodes) {
    for (const v of nodes) this.wanted.add(v);
    this.timer ??= setTimeout(() => this._fetch(), 60);
  }

  async _fetch() {
    const chosen = [...this.wanted].slice(-AT_ONCE);
    this.wanted.clear();
    try {
      if (chosen.length) await this.load(chosen);
    } catch {
      // The next draw requests the text again.
    } finally {
      this.timer = undefined;
    }
    if (this.wanted.size) this.want([]);
  }

  async load(chosen) {
    const { model } = this;
    const root = this.tree();
    const titles = await items(`${this.path}/titles?nodes=${chosen.map((v) => model.id[v]).join(",")}&root=${root}`, { signal: this.signal });
    if (root !== this.tree()) return;
    for (const title of titles) {
      const v = model.index.get(Number(title.node.slice(1)));
      if (v === undefined) continue;
      this.known.set(v, { text: oneLine(title.text) });
      if (title.exit_code) model.failed[v] |= 1;
      model.saved[v] += (title.hits - model.hits[v]) * title.seconds;
      model.hits[v] = title.hits;
    }
    for (const v of chosen) if (!this.known.has(v)) this.known.set(v, { text: "(forgotten)" });
    this.changed();
  }

  /** Update the hits of visible nodes while rollouts run. */
  refresh(nodes) {
    if (this.refreshed && performance.now() - this.refreshed < AGAIN_MS) return;
    this.refreshed = performance.now();
    if (nodes.length) this.load(nodes).catch(() => {});
  }
}
