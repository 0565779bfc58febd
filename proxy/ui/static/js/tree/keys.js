// The keys of a tree: arrows move over the items of the focused map; the others work wherever nothing is typed.

import { plural } from "../format.js";

/** Move the focus of the map, or choose or open its item, as a key says. */
export function mapKey(view, event) {
  const { items } = view.model;
  const i = Math.max(0, view.focused);
  const to = { ArrowRight: items.children[i] ? i + 1 : i, ArrowLeft: Math.max(0, items.up[i]), ArrowDown: items.beside(i, 1), ArrowUp: items.beside(i, -1), Home: 0, End: items.size - 1 }[event.key];
  if (to !== undefined) view.focus(to);
  else if (event.key === "Enter") view.chooseItem(i);
  else if (event.key === " ") view.toggle(i);
  else return;
  const v = items.node[view.focused];
  const call = view.texts.get(v)?.text ?? (v === 0 ? "start" : `node n${view.model.id[v]}`);
  view.map.canvas.setAttribute("aria-label", `${call}, ${plural(view.model.hits[v], "hit")}`);
  event.preventDefault();
}

/** Zoom, switch between map and table, or close the panel, as a key says. */
export function anyKey(view, event) {
  if (event.target.closest?.("input, select, textarea, dialog, .term-box") || event.ctrlKey || event.metaKey || event.altKey) return;
  const { map } = view;
  const act = { "+": () => map.zoom(1.5), "=": () => map.zoom(1.5), "-": () => map.zoom(1 / 1.5), 0: () => map.fit(), m: () => view.switchTo(view.mode === "map" ? "table" : "map"), Escape: () => view.close() }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}
