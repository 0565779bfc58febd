// The tree as a table for keyboards and screen readers. Only visible rows are in the document.

import { h, put } from "../dom.js";
import { count, seconds, short } from "../format.js";
import { MARK } from "./model.js";

const HEIGHT = 26;
const SPARE = 8;
const MARKS = [
  [MARK.pinned, "pinned"], [MARK.diverged, "diverged"], [MARK.unreproducible, "not reproducible"],
  [MARK.private, "private"], [MARK.unfreezable, "not freezable"],
];
const HEADS = [["Call", ""], ["Seconds", "num"], ["Hits", "num"], ["Reads", "num"], ["Saved", "num"], ["Below", "num"], ["Marks", ""]];

export class TreeTable {
  /** on: `choose(item)`, `toggle(item)`, `labels(nodes)`. */
  constructor(model, texts, on) {
    this.model = model;
    this.texts = texts;
    this.on = on;
    this.selected = 0;
    this.body = h("div", { role: "rowgroup", class: "rows" });
    this.grid = h(
      "div",
      {
        role: "treegrid", class: "treegrid", tabindex: "0", "aria-label": "Tree of calls", "aria-readonly": "true",
        on: { scroll: () => this.draw(), keydown: (event) => this._key(event) },
      },
      h("div", { role: "rowgroup", class: "heads" }, h("div", { role: "row", class: "trow" }, HEADS.map(([text, kind]) => h("div", { role: "columnheader", class: `cell ${kind}` }, text)))),
      this.body,
    );
  }

  changed() {
    if (!this.model.items) return;
    this.body.style.height = `${this.model.items.size * HEIGHT}px`;
    this.grid.setAttribute("aria-rowcount", this.model.items.size + 1);
    this.draw();
  }

  select(item, reveal = true) {
    this.selected = item;
    if (reveal) {
      const top = item * HEIGHT;
      const room = this.grid.clientHeight - HEIGHT * 2;
      if (top < this.grid.scrollTop) this.grid.scrollTop = top;
      else if (top > this.grid.scrollTop + room) this.grid.scrollTop = top - room;
    }
    this.draw();
  }

  draw() {
    if (!this.grid.isConnected || !this.model.items) return;
    const from = Math.max(0, Math.floor(this.grid.scrollTop / HEIGHT) - SPARE);
    const to = Math.min(this.model.items.size, from + Math.ceil(this.grid.clientHeight / HEIGHT) + 2 * SPARE);
    const wanted = [];
    const rows = [];
    for (let i = from; i < to; i++) rows.push(this._row(i, wanted));
    put(this.body, rows);
    this.grid.setAttribute("aria-activedescendant", `row-${this.selected}`);
    if (wanted.length) this.on.labels(wanted);
  }

  _row(i, wanted) {
    const { model } = this;
    const { items } = model;
    const v = items.node[i];
    const fold = items.kind[i] === 1;
    const text = v === 0 ? { text: "start" } : fold ? { text: `${count(items.count[i])} calls in a chain` } : this.texts.get(v);
    if (!text) wanted.push(v);
    const open = fold ? false : model.kids[v] > 1 || items.hidden[i] > 0 ? items.hidden[i] === 0 : null;
    const bits = model.bits(i);
    const twist = h("span", { class: "twist", "aria-hidden": "true", on: { click: (event) => { event.stopPropagation(); this.on.toggle(i); } } }, open === null ? "" : open ? "▾" : "▸");
    const cells = [
      h("div", { role: "rowheader", class: "cell call" }, h("span", { class: "indent", style: { width: `${Math.min(items.level[i], 24) * 14}px` } }), twist, h("span", { class: `mono ${bits.failed & 1 ? "failed" : ""} ${fold ? "dim" : ""}` }, text ? text.text : "…")),
      cell(v === 0 && !fold ? "" : seconds(model.sum(i, model.seconds))),
      cell(short(model.sum(i, model.hits))),
      cell(short(model.sum(i, model.seen))),
      cell(seconds(model.sum(i, model.saved))),
      cell(items.hidden[i] ? `+${short(items.hidden[i])}` : short(model.below[fold ? items.last[i] : v])),
      h("div", { role: "gridcell", class: "cell marks" }, marksOf(bits, model.names?.[model.id[v]]).map(([word, kind]) => h("span", { class: `chip ${kind}` }, word))),
    ];
    return h(
      "div",
      {
        role: "row", id: `row-${i}`, class: `trow${i === this.selected ? " on" : ""}`, "aria-level": items.level[i] + 1, "aria-rowindex": i + 2,
        "aria-expanded": open === null ? null : String(open), "aria-selected": String(i === this.selected), style: { top: `${i * HEIGHT}px` },
        on: { click: () => this.on.choose(i) },
      },
      cells,
    );
  }

  _key(event) {
    const { items } = this.model;
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20, Home: -items.size, End: items.size }[event.key];
    const i = this.selected;
    if (move) this.on.focus(Math.max(0, Math.min(items.size - 1, i + move)));
    else if (event.key === "Enter") this.on.choose(i);
    else if (event.key === " ") this.on.toggle(i);
    else if (event.key === "ArrowRight") this._right(i);
    else if (event.key === "ArrowLeft") this._left(i);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  _right(i) {
    const { items } = this.model;
    if (items.kind[i] || items.hidden[i]) this.on.toggle(i);
    else if (i + 1 < items.size) this.on.focus(i + 1);
  }

  _left(i) {
    const { items, kids } = this.model;
    if (!items.kind[i] && kids[items.node[i]] > 1 && !items.hidden[i]) this.on.toggle(i);
    else if (items.up[i] >= 0) this.on.focus(items.up[i]);
  }
}

const cell = (text) => h("div", { role: "gridcell", class: "cell num" }, text);

/** Return a node's marks as words. */
export function marksOf({ marks, failed, standing, places }, names) {
  const words = MARKS.filter(([bit]) => marks & bit).map(([bit, word]) => [word, bit === MARK.diverged ? "diverged" : ""]);
  if (failed & 2) words.unshift(["a read failed", "bad"]);
  if (failed & 1) words.unshift(["failed", "bad"]);
  if (places === 2) words.push(["warm fork", ""]);
  else if (places === 1) words.push(["sandbox", ""]);
  if (standing) words.push([names?.length === 1 ? `▸ ${names[0]}` : `▸ ${count(standing)} rollouts`, "live"]);
  // Last, because most nodes have one and narrow tables cut the end.
  if (marks & MARK.snapshot) words.push(["snapshot", ""]);
  return words;
}
