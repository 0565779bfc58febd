// Draws a model on a canvas, as coarse as the zoom allows, and takes the pointer's word.

import { short, seconds } from "../format.js";
import { MARK } from "./model.js";
import { Raster, pixel } from "./raster.js";

export const COL = 176;
export const ROW = 40;
const MARGIN = 36;
const LABELS_FROM = 96;
const SHAPES_FROM = 11;
const MINIMAP = { width: 168, height: 104, pad: 10 };
const EFFECTS = ["--s1", "--accent", "--replay", "--miss", "--wait", "--bad"];

/** A colour of 0 to 5 for a number: each step is a fourfold. */
export function level(value, unit) {
  return value <= 0 ? 0 : Math.max(1, Math.min(5, 1 + Math.ceil(Math.log(value / unit) / Math.log(4))));
}

export class TreeMap {
  /** on: `select(node)`, `open(item)`, `labels(nodes)`, `moved()`. */
  constructor(canvas, model, on, signal) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
    this.model = model;
    this.on = on;
    this.size = "saved";
    this.colour = "hits";
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
    this._listen(signal);
    this.resize();
  }

  theme() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    this.paint = Object.fromEntries(
      ["bg", "panel", "sunken", "line", "line-strong", "text", "dim", "faint", "accent", "accent-soft", "bad", "snapshot", "warm", "diverged", "s0"].map((name) => [name, read(`--${name}`)]),
    );
    this.scale = [0, 1, 2, 3, 4, 5].map((n) => read(`--s${n}`));
    this.effects = EFFECTS.map(read);
    this.pixels = { ...Object.fromEntries(["panel", "line", "warm", "diverged", "bad"].map((name) => [name, pixel(this.paint[name])])) };
    this.pixels.of = new Map([...this.scale, ...this.effects].map((colour) => [colour, pixel(colour)]));
    // What was never hit is seen all the same.
    this.pixels.of.set(this.scale[0], pixel(this.paint["line-strong"]));
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

  /** The model was laid out anew: keep what stands at the anchor where it was. */
  changed() {
    this.mini = null;
    this.draw();
  }

  /** Show all of it, as large as it may be. */
  fit() {
    const { items } = this.model;
    this.kx = Math.min(1, (this.width - 2 * MARGIN - 120) / Math.max(1, (items.columns - 1) * COL));
    this.ky = Math.min(1, (this.height - 2 * MARGIN) / Math.max(1, (items.rows - 1) * ROW));
    this.ox = this.oy = MARGIN;
    this.moved();
  }

  /** Begin where the root can be read, or with all of it where that is small enough. */
  begin() {
    const { items } = this.model;
    const fits = (this.width - 2 * MARGIN - 120) / Math.max(1, (items.columns - 1) * COL) > 0.56 && (this.height - 2 * MARGIN) / Math.max(1, items.rows * ROW) > 0.56;
    if (fits) {
      this.fit();
      // A small tree has room for longer texts.
      this.kx = Math.min(1.7, Math.max(this.kx, (this.width - 2 * MARGIN - 220) / Math.max(1, (items.columns - 1) * COL)));
      return this.moved();
    }
    this.kx = this.ky = 1;
    this.ox = this.oy = MARGIN;
    return this.moved();
  }

  zoom(factor, x = this.width / 2, y = this.height / 2) {
    const { items } = this.model;
    const least = (span, room) => Math.min(1, room / Math.max(1, span)) * 0.9;
    const kx = Math.min(1.8, Math.max(least(items.columns * COL, this.width - 100), this.kx * factor));
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

  /** Bring an item into sight; with `centre` to the middle, and where it can be read. */
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
    if (ROW * this.ky < SHAPES_FROM || COL * this.kx < SHAPES_FROM) this._coarse(top, bottom);
    else this._fine(top, bottom);
    this._minimap();
  }

  /** Far away: blocks of colour, at most one for each few pixels; what failed or diverged over them. */
  _coarse(top, bottom) {
    const { model, raster, pixels, ratio } = this;
    const { items } = model;
    const [px, py, ox, oy] = [COL * this.kx * ratio, ROW * this.ky * ratio, this.ox * ratio, this.oy * ratio];
    raster.resize(this.context, this.canvas.width, this.canvas.height);
    raster.clear(pixels.panel);
    this._coarseLines(top, bottom, px, py, ox, oy);
    const w = Math.max(1.5, Math.min(7 * ratio, px * 0.62));
    const hgt = Math.max(1, Math.min(6 * ratio, py * 0.66));
    const taken = this._cells(Math.ceil(raster.width / 2 + 2) * (raster.height + 2));
    const across = Math.ceil(raster.width / 2 + 2);
    const special = [];
    for (let k = top; k < bottom; k++) {
      const i = items.byRow[k];
      const x = items.col[i] * px + ox;
      const y = items.row[i] * py + oy;
      if (x < -8 || x > raster.width || y < -8 || y > raster.height) continue;
      const v = items.node[i];
      if (model.failed[v] & 1 || model.marks[v] & MARK.diverged || this.found.has(v) || i === this.selected) special.push(i);
      const cell = Math.max(0, y | 0) * across + Math.max(0, x >> 1);
      if (taken[cell]) continue;
      taken[cell] = 1;
      raster.rect(x - w / 2, y - hgt / 2, items.kind[i] ? Math.min(w * 2, px) : w, hgt, pixels.of.get(this._colour(i)));
    }
    for (const i of special) {
      const v = items.node[i];
      const chosen = i === this.selected || this.found.has(v);
      const size = i === this.selected ? 9 * ratio : chosen ? 7 * ratio : Math.max(1.5, Math.min(3.5 * ratio, hgt));
      const colour = chosen ? pixels.warm : model.marks[v] & MARK.diverged ? pixels.diverged : pixels.bad;
      raster.rect(items.col[i] * px + ox - size / 2, items.row[i] * py + oy - size / 2, size, size, colour);
    }
    raster.show(this.context);
  }

  _coarseLines(top, bottom, px, py, ox, oy) {
    const { raster, pixels } = this;
    const { items } = this.model;
    for (const i of items.forks) {
      const x = items.col[i] * px + ox;
      if (x < 0 || x > raster.width) continue;
      const from = items.row[i] * py + oy;
      const to = items.lastRow[i] * py + oy;
      if (to > 0 && from < raster.height && to - from > 2) raster.rect(x, Math.max(0, from), 1, Math.min(raster.height, to) - Math.max(0, from), pixels.line);
    }
    for (let k = top; k < bottom; k++) {
      const i = items.byRow[k];
      const up = items.up[i];
      if (up < 0) continue;
      const x0 = items.col[up] * px + ox;
      const x1 = items.col[i] * px + ox;
      if (x0 < raster.width && x1 > 0) raster.rect(x0, items.row[i] * py + oy, x1 - x0, 1, pixels.line);
    }
  }

  _cells(size) {
    if (!this.cells || this.cells.length < size) this.cells = new Uint8Array(size);
    else this.cells.fill(0, 0, size);
    return this.cells;
  }

  /** Near: nodes with their marks, and from some width on their calls. */
  _fine(top, bottom) {
    const { context: c, model, kx, ky, ox, oy } = this;
    const { items } = model;
    this._meetings();
    this._lines(top, bottom);
    const readable = COL * kx >= LABELS_FROM && ROW * ky >= 26;
    const wanted = [];
    c.textBaseline = "alphabetic";
    for (let k = top; k < bottom; k++) {
      const i = items.byRow[k];
      const x = items.col[i] * COL * kx + ox;
      if (x < -COL * kx || x > this.width + 20) continue;
      const y = items.row[i] * ROW * ky + oy;
      if (items.kind[i]) this._fold(i, x, y, readable);
      else this._node(i, x, y);
      if (readable) this._label(i, x, y, wanted);
    }
    if (wanted.length) this.on.labels(wanted);
  }

  /** What leads where: along a row to the first child, down and along to the others. */
  _lines(top, bottom) {
    const { context: c, model, kx, ky, ox, oy, paint } = this;
    const { items } = model;
    const px = COL * kx;
    const py = ROW * ky;
    c.fillStyle = paint["line-strong"];
    for (let k = top; k < bottom; k++) {
      const i = items.byRow[k];
      const up = items.up[i];
      if (up < 0) continue;
      const y = Math.round(items.row[i] * py + oy);
      const x0 = Math.max(-5, items.col[up] * px + ox);
      const x1 = Math.min(this.width + 5, items.col[i] * px + ox);
      const thick = Math.min(3, 1 + Math.log2(1 + model.passes[items.node[i]]) * 0.35);
      if (x1 > x0) c.fillRect(x0, y - thick / 2, x1 - x0, thick);
    }
    for (const i of items.forks) {
      const x = items.col[i] * px + ox;
      const from = Math.max(-2, items.row[i] * py + oy);
      const to = Math.min(this.height + 2, items.lastRow[i] * py + oy);
      if (x >= -2 && x <= this.width && to > from) c.fillRect(Math.round(x) - 0.5, from, 1, to - from);
    }
  }

  /** Where another history comes to a node that was known: a dashed line. */
  _meetings() {
    const { context: c, model, paint } = this;
    c.strokeStyle = paint.faint;
    c.lineWidth = 1;
    c.setLineDash([2, 4]);
    c.beginPath();
    for (const [from, to] of model.meets.slice(-2000)) {
      const [a, b] = [model.index.get(from), model.index.get(to)].map((v) => (v === undefined ? -1 : model.itemOf[v]));
      if (a < 0 || b < 0 || a === b) continue;
      const [ax, ay] = this.placeOf(a);
      const [bx, by] = this.placeOf(b);
      if (Math.max(ay, by) < 0 || Math.min(ay, by) > this.height || Math.max(ax, bx) < 0 || Math.min(ax, bx) > this.width) continue;
      c.moveTo(ax, ay);
      c.quadraticCurveTo((ax + bx) / 2 + 24, (ay + by) / 2, bx, by);
    }
    c.stroke();
    c.setLineDash([]);
  }

  placeOf(item) {
    const { items } = this.model;
    return [items.col[item] * COL * this.kx + this.ox, items.row[item] * ROW * this.ky + this.oy];
  }

  _colour(i) {
    const { model } = this;
    const v = model.items.node[i];
    if (this.colour === "effect") return this.effects[effectOf(model.effect[v])];
    if (this.colour === "seconds") return this.scale[level(model.seconds[v], 0.01)];
    if (this.colour === "saved") return this.scale[level(model.saved[v], 0.1)];
    return this.scale[level(model.hits[v] + model.seen_hits[v], 1)];
  }

  _radius(i) {
    const { model } = this;
    const v = model.items.node[i];
    const told = { saved: model.saved[v], hits: model.hits[v] + model.seen_hits[v], seconds: model.seconds[v], observations: model.seen[v] }[this.size];
    const unit = { saved: 0.05, hits: 1, seconds: 0.05, observations: 1 }[this.size];
    const small = Math.min(1, Math.min(COL * this.kx, ROW * this.ky) / 34);
    return (3.5 + Math.min(5.5, Math.log2(1 + told / unit) * 0.85)) * Math.max(0.5, small);
  }

  _node(i, x, y) {
    const { context: c, model, paint } = this;
    const v = model.items.node[i];
    const r = this._radius(i);
    const marks = model.marks[v];
    if (i === this.selected || this.found.has(v)) {
      c.fillStyle = i === this.selected ? paint["accent-soft"] : "#f0a93a44";
      c.beginPath();
      c.arc(x, y, r + 6, 0, 7);
      c.fill();
      if (i === this.selected) {
        c.strokeStyle = paint.accent;
        c.lineWidth = 1.5;
        c.stroke();
      }
    }
    c.beginPath();
    c.arc(x, y, r, 0, 7);
    c.fillStyle = model.parent[v] < 0 ? paint.text : this._colour(i);
    c.fill();
    c.lineWidth = 1;
    c.strokeStyle = i === this.hovered ? paint.text : paint.faint;
    if (marks & (MARK.diverged | MARK.private)) c.setLineDash([2, 2]);
    if (model.failed[v] & 1) [c.strokeStyle, c.lineWidth] = [paint.bad, 2];
    if (marks & (MARK.diverged | MARK.unreproducible)) [c.strokeStyle, c.lineWidth] = [paint.diverged, 2];
    c.stroke();
    c.setLineDash([]);
    this._reads(v, x, y, r);
    this._badges(x, y, r, marks, model.places[v], model.standing[v]);
    if (model.items.hidden[i]) this._more(x + r + 5, y, `+${short(model.items.hidden[i])}`);
  }

  /** The calls that changed nothing here: a smaller dot below left, by how many there are and how often they were hit. */
  _reads(v, x, y, r) {
    const { context: c, model, paint } = this;
    if (!model.seen[v]) return;
    const size = Math.min(4.5, 1.6 + Math.log2(1 + model.seen[v]) * 0.6);
    c.beginPath();
    c.arc(x - r - 2, y + r + 2, size, 0, 7);
    c.fillStyle = this.scale[level(model.seen_hits[v], 1)];
    c.fill();
    c.lineWidth = 1;
    c.strokeStyle = model.failed[v] & 2 ? paint.bad : paint.faint;
    c.stroke();
  }

  /** A snapshot below right, a warm fork above right, rollouts that stand here above left. */
  _badges(x, y, r, marks, place, standing) {
    const { context: c, paint } = this;
    if (marks & MARK.snapshot) this._polygon([[x + r, y + r - 4], [x + r + 4, y + r], [x + r, y + r + 4], [x + r - 4, y + r]], paint.snapshot);
    if (marks & MARK.pinned) {
      c.fillStyle = paint.text;
      c.fillRect(x + r - 1, y + r - 1, 2, 2);
    }
    if (place === 2) this._polygon([[x + r - 1, y - r + 1], [x + r + 3, y - r - 6], [x + r + 7, y - r + 1]], paint.warm);
    else if (place === 1) {
      c.strokeStyle = paint.warm;
      c.lineWidth = 1;
      c.strokeRect(x + r, y - r - 5, 5, 5);
    }
    if (!standing) return;
    this._polygon([[x - r - 9, y - r - 5], [x - r - 9, y - r + 3], [x - r - 2, y - r - 1]], paint.accent);
    if (standing > 1) {
      c.fillStyle = paint.accent;
      c.font = `600 10px ${this.sans}`;
      c.textAlign = "right";
      c.fillText(short(standing), x - r - 11, y - r + 3);
      c.textAlign = "left";
    }
  }

  _polygon(points, colour) {
    const { context: c } = this;
    c.beginPath();
    points.forEach(([x, y], n) => (n ? c.lineTo(x, y) : c.moveTo(x, y)));
    c.closePath();
    c.fillStyle = colour;
    c.fill();
    c.strokeStyle = this.paint.panel;
    c.lineWidth = 1;
    c.stroke();
  }

  _fold(i, x, y, readable) {
    const { context: c, model, paint } = this;
    const bits = model.bits(i);
    const text = readable ? `${short(model.items.count[i])} calls` : "";
    c.font = `500 11px ${this.sans}`;
    const w = readable ? c.measureText(text).width + 22 : Math.max(8, COL * this.kx * 0.5);
    const hgt = readable ? 20 : Math.max(5, Math.min(12, ROW * this.ky * 0.4));
    c.beginPath();
    c.roundRect(x - 8, y - hgt / 2, w, hgt, hgt / 2);
    c.fillStyle = i === this.selected ? paint["accent-soft"] : paint.sunken;
    c.fill();
    c.lineWidth = i === this.selected ? 1.5 : 1;
    c.strokeStyle = i === this.selected ? paint.accent : bits.failed & 1 ? paint.bad : bits.marks & MARK.diverged ? paint.diverged : paint["line-strong"];
    c.stroke();
    if (readable) {
      c.fillStyle = paint.dim;
      c.fillText(text, x + 3, y + 4);
    }
    this._badges(x + w - 12, y, 4, bits.marks & MARK.snapshot, bits.places, bits.standing);
  }

  _more(x, y, text) {
    const { context: c, paint } = this;
    c.font = `600 10px ${this.sans}`;
    const w = c.measureText(text).width + 10;
    c.beginPath();
    c.roundRect(x, y - 8, w, 16, 8);
    c.fillStyle = paint["accent-soft"];
    c.fill();
    c.fillStyle = paint.accent;
    c.fillText(text, x + 5, y + 3.5);
  }

  _label(i, x, y, wanted) {
    const { context: c, model, paint, kx } = this;
    if (model.items.kind[i]) return;
    const v = model.items.node[i];
    const told = v === 0 ? { text: "start" } : this.texts.get(v);
    if (!told) {
      wanted.push(v);
      return;
    }
    const left = x + this._radius(i) + (model.items.hidden[i] ? 44 : model.places[v] ? 12 : 8);
    const room = Math.floor((COL * kx - (left - x) - 14) / 6.65);
    if (room < 4) return;
    c.font = `11px ${this.mono}`;
    // Any spacing keeps a font from drawing two signs of a command as one.
    c.letterSpacing = "0.01px";
    c.fillStyle = model.failed[v] & 1 ? paint.bad : paint.text;
    c.fillText(told.text.length > room ? `${told.text.slice(0, room - 1)}…` : told.text, left, y - 6);
    c.letterSpacing = "0px";
    if (v === 0) return;
    c.font = `10px ${this.sans}`;
    c.fillStyle = paint.dim;
    const hits = model.hits[v];
    const parts = [seconds(model.seconds[v]), hits && `${short(hits)} hit${hits === 1 ? "" : "s"}`, model.seen[v] && `${short(model.seen[v])} read${model.seen_hits[v] ? ` · ${short(model.seen_hits[v])}` : ""}`];
    c.fillText(parts.filter(Boolean).join("  ·  ").slice(0, Math.floor(room * 1.3)), left, y + 14);
  }

  /** All of it in a corner, where it is larger than the window. */
  _minimap() {
    const { context: c, model, paint } = this;
    const { items } = model;
    const wide = items.columns * COL * this.kx;
    const tall = items.rows * ROW * this.ky;
    this.miniBox = null;
    if (wide < this.width * 1.3 && tall < this.height * 1.3) return;
    this.mini ??= this._drawMini();
    const x = this.width - MINIMAP.width - MINIMAP.pad;
    const y = this.height - MINIMAP.height - MINIMAP.pad;
    this.miniBox = { x, y };
    c.globalAlpha = 0.94;
    c.drawImage(this.mini, x, y, MINIMAP.width, MINIMAP.height);
    c.globalAlpha = 1;
    c.strokeStyle = paint["line-strong"];
    c.lineWidth = 1;
    c.strokeRect(x + 0.5, y + 0.5, MINIMAP.width - 1, MINIMAP.height - 1);
    const clip = (value, most) => Math.max(0, Math.min(most, value));
    const x0 = clip((-this.ox / wide) * MINIMAP.width, MINIMAP.width - 3);
    const y0 = clip((-this.oy / tall) * MINIMAP.height, MINIMAP.height - 3);
    const x1 = clip(((this.width - this.ox) / wide) * MINIMAP.width, MINIMAP.width);
    const y1 = clip(((this.height - this.oy) / tall) * MINIMAP.height, MINIMAP.height);
    c.strokeStyle = paint.accent;
    c.lineWidth = 1.5;
    c.strokeRect(x + x0 + 0.5, y + y0 + 0.5, Math.max(3, x1 - x0 - 1), Math.max(3, y1 - y0 - 1));
  }

  _drawMini() {
    const { model, paint, ratio } = this;
    const { items } = model;
    const mini = document.createElement("canvas");
    mini.width = MINIMAP.width * ratio;
    mini.height = MINIMAP.height * ratio;
    const c = mini.getContext("2d", { alpha: false });
    c.scale(ratio, ratio);
    c.fillStyle = paint.bg;
    c.fillRect(0, 0, MINIMAP.width, MINIMAP.height);
    const fx = (MINIMAP.width - 6) / Math.max(1, items.columns);
    const fy = (MINIMAP.height - 6) / Math.max(1, items.rows);
    const taken = new Uint8Array((MINIMAP.width + 4) * (MINIMAP.height + 4));
    for (let i = 0; i < items.size; i++) {
      const x = 3 + items.col[i] * fx;
      const y = 3 + items.row[i] * fy;
      const cell = (y | 0) * (MINIMAP.width + 4) + (x | 0);
      if (taken[cell]) continue;
      taken[cell] = 1;
      c.fillStyle = this._colour(i) === this.scale[0] ? paint["line-strong"] : this._colour(i);
      c.fillRect(x, y, Math.max(1, Math.min(4, fx * 0.8)), Math.max(1, Math.min(2, fy * 0.8)));
    }
    return mini;
  }

  /** The item at a point of the canvas; -1 for none. */
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

  _listen(signal) {
    const { canvas } = this;
    let from = null;
    let dragged = false;
    const at = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const toMini = ([x, y]) => {
      const { items } = this.model;
      this.ox = this.width / 2 - ((x - this.miniBox.x) / MINIMAP.width) * items.columns * COL * this.kx;
      this.oy = this.height / 2 - ((y - this.miniBox.y) / MINIMAP.height) * items.rows * ROW * this.ky;
      this.moved();
    };
    const inMini = ([x, y]) => this.miniBox && x >= this.miniBox.x && y >= this.miniBox.y && x < this.miniBox.x + MINIMAP.width && y < this.miniBox.y + MINIMAP.height;
    canvas.addEventListener("pointerdown", (event) => {
      from = at(event);
      from.mini = inMini(from);
      dragged = false;
      canvas.setPointerCapture(event.pointerId);
      if (from.mini) toMini(from);
    }, { signal });
    canvas.addEventListener("pointermove", (event) => {
      const now = at(event);
      if (from?.mini) {
        toMini(now);
        return;
      }
      if (from) {
        const [dx, dy] = [now[0] - from[0], now[1] - from[1]];
        if (!dragged && Math.hypot(dx, dy) < 4) return;
        dragged = true;
        canvas.classList.add("dragging");
        this.pan(dx, dy);
        [from[0], from[1]] = now;
        return;
      }
      const item = inMini(now) ? -1 : this.hit(...now);
      if (item !== this.hovered) {
        this.hovered = item;
        canvas.style.cursor = item >= 0 ? "pointer" : "";
        this.on.hover(item, now);
        this.draw();
      }
    }, { signal });
    canvas.addEventListener("pointerup", (event) => {
      const clicked = from && !from.mini && !dragged ? this.hit(...at(event)) : -1;
      from = null;
      canvas.classList.remove("dragging");
      if (clicked >= 0) this.on.choose(clicked);
    }, { signal });
    canvas.addEventListener("pointercancel", () => (from = null), { signal });
    canvas.addEventListener("pointerleave", () => { this.hovered = -1; this.on.hover(-1); this.draw(); }, { signal });
    canvas.addEventListener("dblclick", (event) => this.zoom(1.8, ...at(event)), { signal });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const step = event.deltaMode ? 30 : 1;
      if (event.shiftKey) this.pan(-(event.deltaX || event.deltaY) * step, 0);
      else this.zoom(Math.exp(-event.deltaY * step * 0.0016), ...at(event));
    }, { signal, passive: false });
  }
}

/** Which of the effects' colours: none, files, session, processes, database, unknown. */
function effectOf(bits) {
  if (bits & 16) return 5;
  if (bits & 8) return 4;
  if (bits & 4) return 3;
  return bits & 1 ? 1 : bits & 2 ? 2 : 0;
}
