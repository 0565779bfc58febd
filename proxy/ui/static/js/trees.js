// Chooses which of a task's trees is shown. A task has a tree for each environment that its rollouts began in.

import { get, items, names } from "./api.js";
import { h, put } from "./dom.js";
import { oneLine, plural } from "./format.js";

const MOST = 200;
const PAGE = 10_000;

/** Return a task's trees, the current tree first. */
export const treesOf = (task, signal) => items(`tasks/${names(task)}/trees`, { signal, most: MOST });

/** Return the default tree: the current tree, or if it is empty, the only tree that is not. */
export function preferred([current, ...others]) {
  const filled = others.filter((tree) => tree.calls > 0);
  return current.calls === 0 && filled.length === 1 ? filled[0].root : current.root;
}

/** The tree that a view shows: the tree in the address, the chosen tree, or the default tree. */
export class Which {
  constructor(task, params, signal) {
    Object.assign(this, { task, signal, root: null, trees: null, own: params.has("own") });
    // A tree in the address is never replaced by the default tree.
    this.fixed = params.has("node") || params.has("root");
  }

  /** Load the next part of the tree: the nodes after a node. */
  part(after, node = this.root) {
    const which = node ? `&root=${encodeURIComponent(node)}` : "";
    return get(`tasks/${names(this.task)}/columns?after=${after}&limit=${PAGE}${which}${this.own ? "&own=true" : ""}`, { signal: this.signal });
  }

  /** Load the first part of the tree in the address; ignores a node that was forgotten. */
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
    // Another tree may replace only an empty tree.
    if (this.fixed || view.nodes > 1) return view;
    await this.listing;
    return this.trees && this.usual !== `n${view.root}` ? this.part(0, this.usual) : view;
  }

  /** Update the list of trees. */
  async list() {
    this.listed = performance.now();
    this.trees = await treesOf(this.task, this.signal);
  }

  /** Return the tree that is shown, as the list has it; undefined before it is known. */
  get shown() {
    return this.trees?.find((tree) => tree.root === this.root);
  }

  /** Return the root of the default tree. */
  get usual() {
    return this.trees ? preferred(this.trees) : this.root;
  }

  /** Return the root of the tree that replaces an empty tree that was not chosen; null for no change. */
  get instead() {
    const empty = this.trees.some((tree) => tree.root === this.root && tree.calls === 0);
    return empty && !this.fixed && this.usual !== this.root ? this.usual : null;
  }
}

/** A select box for trees, visible if there are at least two. */
export class TreeChoice {
  /** choose: called with the root of the chosen tree. */
  constructor(choose) {
    this.select = h("select", { class: "environment", on: { change: () => choose(this.select.value) } });
    this.element = h("label", { class: "inline", hidden: true }, "Environment", this.select);
    this.rendered = "";
  }

  /** Update the options and the selected tree. */
  show(trees, root) {
    const options = trees.map((tree) => [tree.root, `${oneLine(tree.title)} · ${plural(tree.nodes, "node")}${tree.current ? " · current" : ""} · ${tree.root}`]);
    if (!trees.some((tree) => tree.root === root)) options.push([root, root]);
    const rendered = JSON.stringify([options, root]);
    // Do not replace the options while the select box has the focus.
    if (rendered === this.rendered || (document.activeElement === this.select && this.select.value === root)) return;
    this.rendered = rendered;
    put(this.select, options.map(([value, text]) => h("option", { value }, text)));
    this.select.value = root;
    this.element.hidden = trees.length < 2;
  }
}
