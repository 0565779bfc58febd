// Which of a task's trees is shown: there is one for each environment that its rollouts began in.

import { get, names } from "./api.js";
import { h, put } from "./dom.js";
import { oneLine, plural } from "./format.js";

const MOST = 200;
const PAGE = 10_000;

/** The trees of a task, the current one first. */
export const treesOf = (task, signal) => get(`tasks/${names(task)}/trees?limit=${MOST}`, { signal });

/** The tree to show where none is chosen: the current one, or where it is empty, the only one that is not. */
export function preferred([current, ...others]) {
  const filled = others.filter((tree) => tree.calls > 0);
  return current.calls === 0 && filled.length === 1 ? filled[0].root : current.root;
}

/** Which tree a view shows: what its address names, or somebody chose, or else the one to show. */
export class Which {
  constructor(task, params, signal) {
    Object.assign(this, { task, signal, root: null, trees: null });
    // Somebody chose a tree, or a node of it: no other is shown instead.
    this.fixed = params.has("node") || params.has("root");
  }

  /** A part of the tree that is shown: the nodes made after one. Or of the tree that has a node. */
  part(after, node = this.root) {
    const which = node ? `&root=${encodeURIComponent(node)}` : "";
    return get(`tasks/${names(this.task)}/columns?after=${after}&limit=${PAGE}${which}`, { signal: this.signal });
  }

  /** The first part of the tree that an address means; a node that is gone means none. */
  async first(params) {
    this.listing = this.list().catch(() => {});
    for (const node of [params.get("node"), params.get("root")].filter(Boolean)) {
      try {
        return await this.part(0, node);
      } catch (error) {
        if (![404, 422].includes(error.status)) throw error;
      }
    }
    const view = await this.part(0, null);
    // Only an empty tree waits for the others.
    if (this.fixed || view.nodes > 1) return view;
    await this.listing;
    return this.trees && this.usual !== `n${view.root}` ? this.part(0, this.usual) : view;
  }

  /** Take which trees there are now. */
  async list() {
    this.listed = performance.now();
    this.trees = await treesOf(this.task, this.signal);
  }

  /** The root of the tree that is meant where none is named. */
  get usual() {
    return this.trees ? preferred(this.trees) : this.root;
  }

  /** The root of the one to show instead: an empty one that nobody chose makes way. null: none. */
  get instead() {
    const empty = this.trees.some((tree) => tree.root === this.root && tree.calls === 0);
    return empty && !this.fixed && this.usual !== this.root ? this.usual : null;
  }
}

/** A choice among trees, seen where there are two and more. */
export class TreeChoice {
  /** choose: called with the root that somebody chose. */
  constructor(choose) {
    this.select = h("select", { class: "environment", on: { change: () => choose(this.select.value) } });
    this.element = h("label", { class: "inline", hidden: true }, "Environment", this.select);
    this.told = "";
  }

  /** Take the trees that there are, and the one that is shown. */
  show(trees, root) {
    const options = trees.map((tree) => [tree.root, `${oneLine(tree.title)} · ${plural(tree.nodes, "node")}${tree.current ? " · current" : ""} · ${tree.root}`]);
    if (!trees.some((tree) => tree.root === root)) options.push([root, root]);
    const told = JSON.stringify([options, root]);
    // What somebody is about to choose from is not exchanged under the keys.
    if (told === this.told || (document.activeElement === this.select && this.select.value === root)) return;
    this.told = told;
    put(this.select, options.map(([value, text]) => h("option", { value }, text)));
    this.select.value = root;
    this.element.hidden = trees.length < 2;
  }
}
