// The nodes of a tree as columns of numbers, and their layout. Pure: it does not use the document.
//
// A row of the map is a path: a node's first child is to its right, the other children are below. Paths that more rollouts
// took come first. Paths that do not overlap may share a row. A chain of only children is folded into one mark.

/** Marks of a node as bits. */
export const MARK = { snapshot: 1, pinned: 2, diverged: 4, unreproducible: 8, private: 16, unfreezable: 32 };
const FOLD_FROM = 7;
const COLUMNS = {
  seconds: Float32Array, hits: Int32Array, saved: Float32Array, seen: Int32Array, seen_hits: Int32Array,
  effect: Uint8Array, marks: Uint8Array, passes: Int32Array,
};

export class Model {
  constructor() {
    this.size = 0;
    this.lastId = 0;
    this.index = new Map();
    this.collapsed = new Set();
    this.opened = new Set();
    this.folding = true;
    this.meets = new Map();
    this._grow(1024);
  }

  _grow(capacity) {
    const keep = (old, type) => {
      const grown = new type(capacity);
      if (old) grown.set(old.subarray(0, this.size));
      return grown;
    };
    this.id = keep(this.id, Float64Array);
    this.parent = keep(this.parent, Int32Array);
    this.failed = keep(this.failed, Uint8Array);
    this.standing = keep(this.standing, Int32Array);
    this.places = keep(this.places, Uint8Array);
    for (const [name, type] of Object.entries(COLUMNS)) this[name] = keep(this[name], type);
  }

  /** Append nodes in the order of their creation: parents come before their children. */
  append(columns, meets) {
    const more = columns.id.length;
    if (this.size + more > this.id.length) this._grow(Math.max(this.id.length * 2, this.size + more));
    const names = Object.keys(COLUMNS);
    for (let i = 0; i < more; i++) {
      if (this.index.has(columns.id[i])) continue;
      const at = this.size++;
      this.id[at] = columns.id[i];
      this.index.set(columns.id[i], at);
      this.parent[at] = at === 0 ? -1 : (this.index.get(columns.parent[i]) ?? 0);
      for (const name of names) this[name][at] = columns[name][i];
      this.lastId = Math.max(this.lastId, columns.id[i]);
    }
    for (const pair of meets) for (const id of new Set(pair)) this._meet(id, pair);
    return more;
  }

  _meet(id, pair) {
    const known = this.meets.get(id) ?? [];
    if (!known.some(([from, to]) => from === pair[0] && to === pair[1])) this.meets.set(id, [...known, pair]);
  }

  /** Return the merges from and to a node, as pairs of nodes: calls that led to a node with another parent. */
  mergesAt(v) {
    const pairs = (this.meets.get(this.id[v]) ?? []).map((pair) => pair.map((id) => this.index.get(id)));
    return pairs.filter(([from, to]) => from !== undefined && to !== undefined);
  }

  /** Whether another history leads to a node. */
  merged(v) {
    return (this.meets.get(this.id[v]) ?? []).some(([, to]) => to === this.id[v]);
  }

  /** Update the positions of rollouts, warm forks and sandboxes. */
  stand(view) {
    this.standing.fill(0, 0, this.size);
    this.places.fill(0, 0, this.size);
    this.names = view.standing;
    for (const [id, names] of Object.entries(view.standing)) this._set(this.standing, Number(id), names.length);
    for (const id of view.sandboxes) this._set(this.places, id, 1);
    for (const id of view.warm) this._set(this.places, id, 2);
  }

  /** Update the failed calls: 1 for the call that led to a node, 2 for an observation. */
  fail({ nodes, reads }) {
    for (const [bit, ids] of [[1, nodes], [2, reads]]) {
      for (const id of ids) {
        const at = this.index.get(id);
        if (at !== undefined) this.failed[at] |= bit;
      }
    }
  }

  _set(column, id, value) {
    const at = this.index.get(id);
    if (at !== undefined) column[at] = value;
  }

  /**
   * Lay all out anew: 20 ms for 50,000 nodes. A way goes straight to its end; where others leave it, the deepest is
   * placed first, and each as high as there is room under what is placed already.
   */
  layout() {
    this._link();
    const items = (this.items = new Items(this.size));
    this.itemOf = new Int32Array(this.size).fill(-1);
    const skyline = [];
    const stack = [[0, 0, -1, 0]];
    while (stack.length) this._way(stack, skyline, ...stack.pop());
    items.index();
  }

  /** Lay out the path of first children that begins at v, and defer the paths that branch off. */
  _way(stack, skyline, v, col, up, level) {
    const { items } = this;
    const from = items.size;
    let c = col;
    for (let u = v; u >= 0; c++) {
      const item = items.add(0, u, u, 1, c, up, level);
      this.itemOf[u] = item;
      up = item;
      if (this.collapsed.has(u)) {
        items.hidden[item] = this.below[u];
        break;
      }
      const run = this._run(u);
      if (run) {
        up = this._fold(run, ++c, item, level);
        u = run.after;
        continue;
      }
      if (this.kids[u] > 1) level++;
      u = this.head[u];
    }
    let row = -1;
    for (let at = Math.max(0, col - 1); at <= c; at++) row = Math.max(row, skyline[at] ?? -1);
    row++;
    for (let at = col; at <= c; at++) skyline[at] = row;
    for (let item = from; item < items.size; item++) {
      items.place(item, row);
      this._putOff(stack, item);
    }
  }

  _fold(run, col, up, level) {
    const fold = this.items.add(1, run.first, run.last, run.count, col, up, level);
    for (let u = run.first; ; u = this.head[u]) {
      this.itemOf[u] = fold;
      if (u === run.last) return fold;
    }
  }

  /** Return all children of an item except the first, in reverse order for the stack. */
  _putOff(stack, item) {
    const { items } = this;
    const v = items.node[item];
    if (items.kind[item] || items.hidden[item] || this.kids[v] < 2) return;
    const others = [];
    for (let child = this.next[this.head[v]]; child >= 0; child = this.next[child]) others.push(child);
    for (const child of others.reverse()) stack.push([child, items.col[item] + 1, item, items.level[item] + 1]);
  }

  /** Return the inner nodes of the folded chain that begins at v; null if there is none. */
  _run(v) {
    const begins = v === 0 || this.kids[this.parent[v]] !== 1;
    if (!this.folding || !begins || this.opened.has(v) || this.kids[v] !== 1) return null;
    let last = v;
    let after = this.head[v];
    let inner = 0;
    while (this.kids[after] === 1 && !this.collapsed.has(after)) {
      last = after;
      after = this.head[after];
      inner++;
    }
    return inner >= FOLD_FROM ? { first: this.head[v], last, after, count: inner } : null;
  }

  /** Compute the children of each node, most visited first, and the size of each subtree. */
  _link() {
    const n = this.size;
    const { parent, passes } = this;
    this.head = new Int32Array(n).fill(-1);
    this.next = new Int32Array(n).fill(-1);
    this.kids = new Int32Array(n);
    this.below = new Int32Array(n);
    for (let i = n - 1; i > 0; i--) {
      const p = parent[i];
      this.next[i] = this.head[p];
      this.head[p] = i;
      this.kids[p]++;
      this.below[p] += this.below[i] + 1;
    }
    for (let i = 0; i < n; i++) {
      if (this.kids[i] < 2) continue;
      const children = [];
      for (let child = this.head[i]; child >= 0; child = this.next[child]) children.push(child);
      children.sort((a, b) => passes[b] - passes[a] || a - b);
      this.head[i] = children[0];
      children.forEach((child, at) => (this.next[child] = at + 1 < children.length ? children[at + 1] : -1));
    }
  }

  /** Return the first node of v's chain. */
  chainOf(v) {
    while (v !== 0 && this.kids[this.parent[v]] === 1) v = this.parent[v];
    return v;
  }

  /** Expand everything that hides a node; return whether anything did. */
  reveal(v) {
    let changed = false;
    for (let up = this.parent[v]; up >= 0; up = this.parent[up]) changed = this.collapsed.delete(up) || changed;
    const item = this.itemOf[v];
    if (item < 0 || this.items.kind[item] === 1) {
      const chain = this.chainOf(v);
      if (!this.opened.has(chain)) {
        this.opened.add(chain);
        changed = true;
      }
    }
    return changed;
  }

  toggle(v) {
    if (this.kids[v] === 0) return false;
    if (!this.collapsed.delete(v)) this.collapsed.add(v);
    return true;
  }

  /** Return an item's value of a column: the node's value, or the sum of a chain. */
  sum(item, column) {
    const { items } = this;
    if (items.kind[item] === 0) return column[items.node[item]];
    let total = 0;
    for (let v = items.node[item]; ; v = this.head[v]) {
      total += column[v];
      if (v === items.last[item]) return total;
    }
  }

  /** Return the union of the bits of an item's nodes. */
  bits(item) {
    const { items } = this;
    let all = 0;
    let failed = 0;
    let standing = 0;
    let places = 0;
    for (let v = items.node[item]; ; v = this.head[v]) {
      all |= this.marks[v];
      failed |= this.failed[v];
      standing += this.standing[v];
      places = Math.max(places, this.places[v]);
      if (v === items.last[item]) return { marks: all, failed, standing, places };
    }
  }
}

/** The visible items, parents first: nodes, and folded chains from `node` to `last`; also sorted by row. */
class Items {
  constructor(most) {
    const room = most * 2 + 2;
    this.size = 0;
    this.rows = 0;
    this.columns = 0;
    for (const name of ["node", "last", "count", "col", "row", "up", "level", "hidden", "lastRow", "children"]) this[name] = new Int32Array(room);
    this.kind = new Uint8Array(room);
  }

  add(kind, node, last, count, col, up, level) {
    const at = this.size++;
    this.kind[at] = kind;
    this.node[at] = node;
    this.last[at] = last;
    this.count[at] = count;
    this.col[at] = col;
    this.up[at] = up;
    this.level[at] = level;
    if (col >= this.columns) this.columns = col + 1;
    if (up >= 0) this.children[up]++;
    return at;
  }

  place(at, row) {
    this.row[at] = this.lastRow[at] = row;
    if (row >= this.rows) this.rows = row + 1;
    const up = this.up[at];
    if (up >= 0 && row > this.lastRow[up]) this.lastRow[up] = row;
  }

  /** Sort the items by row: `byRow` from `start[row]` on. Also collect the items with several children. */
  index() {
    this.start = new Int32Array(this.rows + 1);
    for (let i = 0; i < this.size; i++) this.start[this.row[i] + 1]++;
    for (let row = 0; row < this.rows; row++) this.start[row + 1] += this.start[row];
    this.byRow = new Int32Array(this.size);
    const next = this.start.slice();
    const forks = [];
    for (let i = 0; i < this.size; i++) {
      this.byRow[next[this.row[i]]++] = i;
      if (this.lastRow[i] > this.row[i]) forks.push(i);
    }
    this.forks = Int32Array.from(forks);
  }

  /** Return the start of a row in `byRow`. */
  at(row) {
    return this.start[Math.max(0, Math.min(this.rows, Math.floor(row)))];
  }

  /** Return the nearest item above (-1) or below (1) an item. */
  beside(item, step) {
    for (let row = this.row[item] + step, seen = 0; row >= 0 && row < this.rows && seen < 2000; row += step, seen++) {
      let best = -1;
      for (let k = this.start[row]; k < this.start[row + 1]; k++) {
        const i = this.byRow[k];
        if (best < 0 || Math.abs(this.col[i] - this.col[item]) < Math.abs(this.col[best] - this.col[item])) best = i;
      }
      if (best >= 0 && (Math.abs(this.col[best] - this.col[item]) <= 4 || seen > 40)) return best;
    }
    return item;
  }
}
