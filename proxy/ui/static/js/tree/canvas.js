// The map of a tree: the visible part of the model, and its scale. far.js and near.js draw it.

import { drawFar } from "./far.js";
import { drawMinimap } from "./minimap.js";
import { drawNear } from "./near.js";
import { listen } from "./pointer.js";
import { Raster, pixel } from "./raster.js";
import { drawLit, drawMerges } from "./routes.js";
import { COL, LABELS_FROM, ROW } from "./scale.js";

const MARGIN = 36;
// Room for the legend below a small tree.
const BELOW = 60;
const SHAPES_FROM = 11;

export class TreeMap {
  /** on: `choose(item)`, `hover(item, point, mark)`, `labels(nodes)` for missing labels, `moved()`. */
  constructor(canvas, model, colours, on, signal) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.model = model;
    this.on = on;
    this.size = "saved";
    this.colours = colours;
    this.lit = null;
    this.fresh = { from: Infinity, until: 0 };
    this.selected = -1;
    this.hovered = -1;
    this.found = new Set();
    this.texts = new Map();
    this.raster = new Raster();
    this.frames = 0;
    this.kx = this.ky = 1;
    this.ox = this.oy = MARGIN;
    this.pending = 0;
    this.theme();
    document.addEventListener("theme", () => { this.theme(); this.mini = null; this.draw(); }, { signal });
    const watching = new ResizeObserver(() => this.resize());
    watching.observe(canvas.parentElement);
    signal.addEventListener("abort", () => watching.disconnect());
    listen(this, signal);
    this.resize();
  }

  theme() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.paint = Object.fromEntries(
      ["bg", "panel", "sunken", "line", "line-strong", "text", "dim", "faint", "accent", "accent-soft", "bad", "snapshot", "warm", "diverged", "merge", "s0"].map((name) => [name, read(`--${name}`)]),
    );
    this.colours.theme(read);
    this.pixels = { ...Object.fromEntries(["panel", "line", "warm", "diverged", "bad"].map((name) => [name, pixel(this.paint[name])])) };
    this.pixels.of = new Map(this.colours.all.map((colour) => [colour, pixel(colour)]));
    // Nodes without a value stay visible.
    this.pixels.of.set(this.paint.s0, pixel(this.paint["line-strong"]));
    this.mono = read("--mono");
    this.sans = read("--sans");
  }

  resize() {
    const box = this.canvas.parentElement.getBoundingClientRect();
    const ratio = window.devicePixelRatio || 1;
    this.width = Math.max(50, Math.floor(box.width));
    this.height = Math.max(50, Math.floor(box.height));
    this.canvas.width = this.width * ratio;
    this.canvas.height = this.height * ratio;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.ratio = ratio;
    this.draw();
  }

  /** After a new layout, keep the anchor's item at its position. */
  changed() {
    this.mini = null;
    this.draw();
  }

  /** Scale and position as a text for the address. A text that is none changes nothing. */
  get at() {
    return [this.kx.toPrecision(4), this.ky.toPrecision(4), Math.round(this.ox), Math.round(this.oy)].join("_");
  }

  set at(text) {
    const at = text.split("_").map(Number);
    if (at.length !== 4 || at.some((n) => !Number.isFinite(n)) || at[0] <= 0 || at[1] <= 0) return;
    [this.kx, this.ky, this.ox, this.oy] = at;
    this.moved();
  }

  /** Return the nodes in sight whose texts can be read, at most 120. */
  inSight() {
    const seen = [];
    const { items } = this.model;
    if (this.kx * COL < LABELS_FROM) return seen;
    for (let k = items.at(-this.oy / (ROW * this.ky)); k < items.size && seen.length < 120; k++) {
      const i = items.byRow[k];
      const [x, y] = this.placeOf(i);
      if (y > this.height) break;
      if (x > -100 && x < this.width && !items.kind[i]) seen.push(items.node[i]);
    }
    return seen;
  }

  /** Show the whole tree as large as possible. */
  fit() {
    const { items } = this.model;
    this.kx = Math.min(1, (this.width - 2 * MARGIN - 120) / Math.max(1, (items.columns - 1) * COL));
    this.ky = Math.min(1, (this.height - 2 * MARGIN - BELOW) / Math.max(1, (items.rows - 1) * ROW));
    this.ox = this.oy = MARGIN;
    this.moved();
  }

  /** Begin with the whole tree if it is small, or else with the root at a readable size. */
  begin() {
    const { items } = this.model;
    const fits = (this.width - 2 * MARGIN - 120) / Math.max(1, (items.columns - 1) * COL) > 0.56 && (this.height - 2 * MARGIN) / Math.max(1, items.rows * ROW) > 0.56;
    if (fits) {
      this.fit();
      // A small tree has room for longer labels and wider rows.
      this.kx = Math.min(2.4, Math.max(this.kx, (this.width - 2 * MARGIN - 190) / Math.max(1, (items.columns - 1) * COL)));
      this.ky = Math.min(1.5, Math.max(this.ky, (this.height - 2 * MARGIN - BELOW) / Math.max(1, (items.rows - 1) * ROW)));
      return this.moved();
    }
    this.kx = this.ky = 1;
    this.ox = this.oy = MARGIN;
    return this.moved();
  }

  zoom(factor, x = this.width / 2, y = this.height / 2) {
    const { items } = this.model;
    const least = (span, room) => Math.min(1, room / Math.max(1, span)) * 0.9;
    const kx = Math.min(2.4, Math.max(least(items.columns * COL, this.width - 100), this.kx * factor));
    const ky = Math.min(1.6, Math.max(least(items.rows * ROW, this.height - 60), this.ky * factor));
    this.ox = x - ((x - this.ox) * kx) / this.kx;
    this.oy = y - ((y - this.oy) * ky) / this.ky;
    this.kx = kx;
    this.ky = ky;
    this.moved();
  }

  pan(dx, dy) {
    this.ox += dx;
    this.oy += dy;
    this.moved();
  }

  moved() {
    const { items } = this.model;
    const wide = items.columns * COL * this.kx;
    const tall = items.rows * ROW * this.ky;
    this.ox = Math.min(this.width - 60, Math.max(60 - wide, this.ox));
    this.oy = Math.min(this.height - 40, Math.max(40 - tall, this.oy));
    this.draw();
    this.on.moved();
  }

  /** Scroll to an item; with `centre`, centre it at a readable size. */
  show(item, centre = false) {
    const { items } = this.model;
    if (centre && this.kx * COL < LABELS_FROM) this.kx = this.ky = 1;
    const x = items.col[item] * COL * this.kx + this.ox;
    const y = items.row[item] * ROW * this.ky + this.oy;
    const room = { left: 70, right: this.width - 190, top: 30, bottom: this.height - 40 };
    if (centre && (x < room.left || x > room.right || y < room.top || y > room.bottom)) this.pan(this.width * 0.35 - x, this.height * 0.45 - y);
    else this.pan(Math.max(0, room.left - x) + Math.min(0, room.right - x), Math.max(0, room.top - y) + Math.min(0, room.bottom - y));
  }

  draw() {
    this.pending ||= requestAnimationFrame(() => {
      this.pending = 0;
      this._draw();
    });
  }

  _draw() {
    this.frames++;
    const { context: c, model, paint } = this;
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.fillStyle = paint.panel;
    c.fillRect(0, 0, this.width, this.height);
    const { items } = model;
    if (!items?.byRow) return;
    const top = items.at((-this.oy - 30) / (ROW * this.ky));
    const bottom = items.at((this.height - this.oy + 30) / (ROW * this.ky) + 1);
    if (ROW * this.ky < SHAPES_FROM || COL * this.kx < SHAPES_FROM) drawFar(this, top, bottom);
    else drawNear(this, top, bottom);
    drawLit(this);
    drawMerges(this, this.selected);
    if (this.hovered !== this.selected && this.hovered < items.size) drawMerges(this, this.hovered);
    drawMinimap(this);
    // New nodes are ringed for a moment: draw until that is over.
    if (performance.now() < this.fresh.until) this.draw();
  }

  placeOf(item) {
    const { items } = this.model;
    return [items.col[item] * COL * this.kx + this.ox, items.row[item] * ROW * this.ky + this.oy];
  }

  /** Return the colour of an item by the chosen measure. */
  colourOf(i) {
    return this.colours.of(this.model.items.node[i]);
  }

  /** Return the radius of an item by the chosen measure. */
  radiusOf(i) {
    const { model } = this;
    const v = model.items.node[i];
    const measure = { saved: model.saved[v], hits: model.hits[v] + model.seen_hits[v], seconds: model.seconds[v], observations: model.seen[v] }[this.size];
    const unit = { saved: 0.05, hits: 1, seconds: 0.05, observations: 1 }[this.size];
    const small = Math.min(1, Math.min(COL * this.kx, ROW * this.ky) / 34);
    return (4.5 + Math.min(4.5, Math.log2(1 + measure / unit) * 0.85)) * Math.max(0.5, small);
  }

  /** Return the item at a point of the canvas; -1 for none. */
  hit(x, y) {
    const { items } = this.model;
    const row = (y - this.oy) / (ROW * this.ky);
    const reach = Math.max(0.5, 6 / (ROW * this.ky));
    let best = -1;
    let nearest = 1e9;
    for (let k = items.at(row - reach); k < items.at(row + reach + 1); k++) {
      const i = items.byRow[k];
      const [px, py] = this.placeOf(i);
      const right = COL * this.kx >= LABELS_FROM ? COL * this.kx - 22 : Math.max(8, COL * this.kx * 0.5);
      if (x < px - 12 || x > px + right || Math.abs(y - py) > Math.max(6, ROW * this.ky * 0.5)) continue;
      const far = Math.abs(y - py) + Math.abs(x - px) * 0.2;
      if (far < nearest) [best, nearest] = [i, far];
    }
    return best;
  }
}
