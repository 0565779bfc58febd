// Loads a tree in parts into its model, and later what is new. A load that began later ends an earlier one.

import { get } from "../api.js";
import { Model } from "./model.js";

const MOST = 300_000;

export class Loading {
  constructor(path, model, which, signal) {
    Object.assign(this, { path, model, which, signal });
    this.loads = 0;
    this.running = false;
    this.failuresUpto = 0;
  }

  /**
   * Load a tree, beginning with its first part. begin: called with that part while the model is empty; first: called
   * once that part is in the model. Returns the last part, or null if another load ended this one.
   */
  async tree(coming, begin, first) {
    const mine = ++this.loads;
    let part = await coming;
    if (mine !== this.loads) return null;
    this.running = true;
    try {
      this.which.root = `n${part.root}`;
      Object.assign(this.model, new Model());
      this.failuresUpto = 0;
      begin();
      for (let number = 0; ; number++) {
        // Load the next part while this part is processed.
        coming = part.more ? this.which.part(part.columns.id.at(-1)) : null;
        this.model.append(part.columns, part.meets);
        if (number === 0) first(part);
        if (!part.more || this.full) return part;
        part = await coming;
        if (mine !== this.loads) return null;
      }
    } finally {
      if (mine === this.loads) this.running = false;
    }
  }

  /** Load the nodes that are new. Returns the part and their number, and whether nodes were forgotten; null as above. */
  async news() {
    const mine = this.loads;
    const part = await this.which.part(this.model.lastId);
    if (mine !== this.loads) return null;
    const added = this.model.append(part.columns, part.meets);
    return { part, added, forgotten: !part.more && part.nodes !== this.model.size && !this.full };
  }

  /** Load which calls failed since the last time; return whether they are in the model. */
  async failures() {
    const mine = this.loads;
    const found = await get(`${this.path}/failures?after=${this.failuresUpto}&root=${this.which.root}`, { signal: this.signal }).catch(() => null);
    if (!found || mine !== this.loads) return false;
    this.failuresUpto = found.upto;
    this.model.fail(found);
    return true;
  }

  /** Whether the model holds as many nodes as the page shows. */
  get full() {
    return this.model.size >= MOST;
  }
}
