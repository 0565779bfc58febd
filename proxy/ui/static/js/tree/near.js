// The map at large scales: nodes with their marks, edges, and if there is room, the calls.

import { seconds, short } from "../format.js";
import { MARK } from "./model.js";
import { COL, LABELS_FROM, ROW, level } from "./scale.js";

export const FRESH_MS = 2000;

/** Draw nodes with their marks, and if there is room, their calls. */
export function drawNear(map, top, bottom) {
  const { context: c, model, kx, ky, ox, oy } = map;
  const { items } = model;
  lines(map, top, bottom);
  const readable = COL * kx >= LABELS_FROM && ROW * ky >= 26;
  const wanted = [];
  c.textBaseline = "alphabetic";
  for (let k = top; k < bottom; k++) {
    const i = items.byRow[k];
    const x = items.col[i] * COL * kx + ox;
    if (x < -COL * kx || x > map.width + 20) continue;
    const y = items.row[i] * ROW * ky + oy;
    // Beside a lit way, the others step back.
    c.globalAlpha = map.lit && !map.lit.nodes.has(items.node[i]) ? 0.4 : 1;
    if (items.kind[i]) fold(map, i, x, y, readable);
    else node(map, i, x, y);
    if (readable) label(map, i, x, y, wanted);
  }
  c.globalAlpha = 1;
  if (wanted.length) map.on.labels(wanted);
}

/** Draw the edges: along the row to the first child, down and along to the others. */
function lines(map, top, bottom) {
  const { context: c, model, kx, ky, ox, oy, paint } = map;
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
    const x1 = Math.min(map.width + 5, items.col[i] * px + ox);
    const thick = Math.min(3, 1 + Math.log2(1 + model.passes[items.node[i]]) * 0.35);
    if (x1 > x0) c.fillRect(x0, y - thick / 2, x1 - x0, thick);
  }
  for (const i of items.forks) {
    const x = items.col[i] * px + ox;
    const from = Math.max(-2, items.row[i] * py + oy);
    const to = Math.min(map.height + 2, items.lastRow[i] * py + oy);
    if (x >= -2 && x <= map.width && to > from) c.fillRect(Math.round(x) - 0.5, from, 1, to - from);
  }
}

function node(map, i, x, y) {
  const { context: c, model, paint } = map;
  const v = model.items.node[i];
  const r = map.radiusOf(i);
  const marks = model.marks[v];
  if (i === map.selected || map.found.has(v)) {
    c.fillStyle = i === map.selected ? paint["accent-soft"] : "#f0a93a44";
    c.beginPath();
    c.arc(x, y, r + 6, 0, 7);
    c.fill();
    if (i === map.selected) {
      c.strokeStyle = paint.accent;
      c.lineWidth = 1.5;
      c.stroke();
    }
  }
  c.beginPath();
  c.arc(x, y, r, 0, 7);
  c.fillStyle = model.parent[v] < 0 ? paint.text : map.colourOf(i);
  c.fill();
  c.lineWidth = 1;
  c.strokeStyle = i === map.hovered ? paint.text : paint.faint;
  if (marks & (MARK.diverged | MARK.private)) c.setLineDash([2, 2]);
  if (model.failed[v] & 1) [c.strokeStyle, c.lineWidth] = [paint.bad, 2];
  if (marks & (MARK.diverged | MARK.unreproducible)) [c.strokeStyle, c.lineWidth] = [paint.diverged, 2];
  c.stroke();
  c.setLineDash([]);
  if (v >= map.fresh.from && performance.now() < map.fresh.until) ring(map, x, y, r);
  if (model.meets.size && model.merged(v)) {
    c.fillStyle = paint.merge;
    c.fillRect(x - r - 5, y - 4, 2.5, 8);
  }
  reads(map, v, x, y, r);
  badges(map, x, y, r, marks, model.places[v], model.standing[v]);
  if (model.items.hidden[i]) more(map, x + r + 5, y, `+${short(model.items.hidden[i])}`);
}

/** Return the marks of a node with their places on the canvas, for the tooltip. */
export function marksAt(map, i) {
  const { model } = map;
  const v = model.items.node[i];
  const [x, y] = map.placeOf(i);
  const r = map.radiusOf(i);
  if (model.items.kind[i]) return [];
  return [
    model.marks[v] & MARK.snapshot && [model.marks[v] & MARK.pinned ? "pinned" : "snapshot", x + r, y + r],
    model.places[v] && [model.places[v] === 2 ? "warm" : "sandbox", x + r + 3, y - r - 3],
    model.standing[v] && ["rollouts", x - r - 6, y - r - 1],
    model.seen[v] && ["reads", x - r - 2, y + r + 2],
    model.merged(v) && ["merge", x - r - 4, y],
    model.items.hidden[i] && ["hidden", x + r + 18, y],
  ].filter(Boolean);
}

/** Ring a node that is new. */
function ring(map, x, y, r) {
  const { context: c, paint } = map;
  const age = 1 - (map.fresh.until - performance.now()) / FRESH_MS;
  c.beginPath();
  c.arc(x, y, r + 3 + age * 7, 0, 7);
  c.globalAlpha = 1 - age;
  c.strokeStyle = paint.accent;
  c.lineWidth = 2;
  c.stroke();
  c.globalAlpha = 1;
}

/** Draw the observations of a node as a dot at its lower left, sized by their number and hits. */
function reads(map, v, x, y, r) {
  const { context: c, model, paint } = map;
  if (!model.seen[v]) return;
  const size = Math.min(4.5, 1.6 + Math.log2(1 + model.seen[v]) * 0.6);
  c.beginPath();
  c.arc(x - r - 2, y + r + 2, size, 0, 7);
  c.fillStyle = map.colours.blues[level(model.seen_hits[v], 1)];
  c.fill();
  c.lineWidth = 1;
  c.strokeStyle = model.failed[v] & 2 ? paint.bad : paint.faint;
  c.stroke();
}

/** Draw the marks: snapshot at the lower right, warm fork at the upper right, rollouts at the upper left. */
function badges(map, x, y, r, marks, place, standing) {
  const { context: c, paint } = map;
  if (marks & MARK.snapshot) polygon(map, [[x + r, y + r - 4], [x + r + 4, y + r], [x + r, y + r + 4], [x + r - 4, y + r]], paint.snapshot);
  if (marks & MARK.pinned) {
    c.fillStyle = paint.text;
    c.fillRect(x + r - 1, y + r - 1, 2, 2);
  }
  if (place === 2) polygon(map, [[x + r - 1, y - r + 1], [x + r + 3, y - r - 6], [x + r + 7, y - r + 1]], paint.warm);
  else if (place === 1) {
    c.strokeStyle = paint.warm;
    c.lineWidth = 1;
    c.strokeRect(x + r, y - r - 5, 5, 5);
  }
  if (!standing) return;
  polygon(map, [[x - r - 9, y - r - 5], [x - r - 9, y - r + 3], [x - r - 2, y - r - 1]], paint.accent);
  if (standing > 1) {
    c.fillStyle = paint.accent;
    c.font = `600 10px ${map.sans}`;
    c.textAlign = "right";
    c.fillText(short(standing), x - r - 11, y - r + 3);
    c.textAlign = "left";
  }
}

function polygon(map, points, colour) {
  const { context: c } = map;
  c.beginPath();
  points.forEach(([x, y], n) => (n ? c.lineTo(x, y) : c.moveTo(x, y)));
  c.closePath();
  c.fillStyle = colour;
  c.fill();
  c.strokeStyle = map.paint.panel;
  c.lineWidth = 1;
  c.stroke();
}

function fold(map, i, x, y, readable) {
  const { context: c, model, paint } = map;
  const bits = model.bits(i);
  const text = readable ? `${short(model.items.count[i])} calls` : "";
  c.font = `500 11px ${map.sans}`;
  const w = readable ? c.measureText(text).width + 22 : Math.max(8, COL * map.kx * 0.5);
  const hgt = readable ? 20 : Math.max(5, Math.min(12, ROW * map.ky * 0.4));
  c.beginPath();
  c.roundRect(x - 8, y - hgt / 2, w, hgt, hgt / 2);
  c.fillStyle = i === map.selected ? paint["accent-soft"] : paint.sunken;
  c.fill();
  c.lineWidth = i === map.selected ? 1.5 : 1;
  c.strokeStyle = i === map.selected ? paint.accent : bits.failed & 1 ? paint.bad : bits.marks & MARK.diverged ? paint.diverged : paint["line-strong"];
  c.stroke();
  if (readable) {
    c.fillStyle = paint.dim;
    c.fillText(text, x + 3, y + 4);
  }
  badges(map, x + w - 12, y, 4, bits.marks & MARK.snapshot, bits.places, bits.standing);
}

function more(map, x, y, text) {
  const { context: c, paint } = map;
  c.font = `600 10px ${map.sans}`;
  const w = c.measureText(text).width + 10;
  c.beginPath();
  c.roundRect(x, y - 8, w, 16, 8);
  c.fillStyle = paint["accent-soft"];
  c.fill();
  c.fillStyle = paint.accent;
  c.fillText(text, x + 5, y + 3.5);
}

function label(map, i, x, y, wanted) {
  const { context: c, model, paint, kx } = map;
  if (model.items.kind[i]) return;
  const v = model.items.node[i];
  const label = v === 0 ? { text: "start" } : map.texts.get(v);
  if (!label) {
    wanted.push(v);
    return;
  }
  const left = x + map.radiusOf(i) + (model.items.hidden[i] ? 44 : model.places[v] ? 12 : 8);
  const room = Math.floor((COL * kx - (left - x) - 16 - marksBefore(model, i)) / 6.65);
  if (room < 4) return;
  c.font = `11px ${map.mono}`;
  // Letter spacing disables ligatures, which would draw two characters of a command as one.
  c.letterSpacing = "0.01px";
  c.fillStyle = model.failed[v] & 1 ? paint.bad : paint.text;
  c.fillText(label.text.length > room ? `${label.text.slice(0, room - 1)}…` : label.text, left, y - 6);
  c.letterSpacing = "0px";
  if (v === 0) return;
  c.font = `10px ${map.sans}`;
  c.fillStyle = paint.dim;
  const hits = model.hits[v];
  const parts = [seconds(model.seconds[v]), hits && `${short(hits)} hit${hits === 1 ? "" : "s"}`, model.seen[v] && `${short(model.seen[v])} read${model.seen_hits[v] ? ` · ${short(model.seen_hits[v])}` : ""}`];
  c.fillText(whole(parts.filter(Boolean), (text) => c.measureText(text).width <= room * 6.65), left, y + 14);
}

/** Return the width of the marks at the left of the next node in the row, which a label must leave free. */
function marksBefore(model, i) {
  const { items } = model;
  const next = i + 1;
  if (next >= items.size || items.up[next] !== i || items.row[next] !== items.row[i] || items.kind[next]) return 0;
  const standing = model.standing[items.node[next]];
  return (standing ? 12 : 0) + (standing > 1 ? 3 + 6 * short(standing).length : 0);
}

/** Return the first parts that fit, joined. A part that was cut could have another meaning. */
export function whole(parts, fits) {
  const line = (count) => parts.slice(0, count).join("  ·  ");
  let count = parts.length;
  while (count > 0 && !fits(line(count))) count -= 1;
  return line(count);
}
