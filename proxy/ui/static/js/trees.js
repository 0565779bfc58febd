// Which of a task's trees is shown: there is one for each environment that its rollouts began in.

import { get, names } from "./api.js";
import { h, put } from "./dom.js";
import { oneLine, plural } from "./format.js";

const MOST = 200;

/** The trees of a task, the current one first. */
export const treesOf = (task, signal) => get(`tasks/${names(task)}/trees?limit=${MOST}`, { signal });

/** The tree to show where none is chosen: the current one, or where it is empty, the only one that is not. */
export function preferred([current, ...others]) {
  const filled = others.filter((tree) => tree.calls > 0);
  return current.calls === 0 && filled.length === 1 ? filled[0].root : current.root;
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
    // What somebody is about to choose from is not exchanged under the keys, but it says what is shown.
    if (told === this.told || (document.activeElement === this.select && this.select.value === root)) return;
    this.told = told;
    put(this.select, options.map(([value, text]) => h("option", { value }, text)));
    this.select.value = root;
    this.element.hidden = trees.length < 2;
  }
}
