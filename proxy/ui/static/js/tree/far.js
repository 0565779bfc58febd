// The map at small scales: nodes as blocks of a few pixels, written directly into the canvas's pixels.

import { COL, ROW } from "./scale.js";
import { MARK } from "./model.js";

/** Draw nodes as blocks of colour; failed and diverged nodes are drawn on top. */
export function drawFar(map, top, bottom) {
  const { model, raster, pixels, ratio } = map;
  const { items } = model;
  const [px, py, ox, oy] = [COL * map.kx * ratio, ROW * map.ky * ratio, map.ox * ratio, map.oy * ratio];
  raster.resize(map.context, map.canvas.width, map.canvas.height);
  raster.clear(pixels.panel);
  lines(map, top, bottom, px, py, ox, oy);
  const w = Math.max(1.5, Math.min(7 * ratio, px * 0.62));
  const hgt = Math.max(1, Math.min(6 * ratio, py * 0.66));
  const taken = cells(map, Math.ceil(raster.width / 2 + 2) * (raster.height + 2));
  const across = Math.ceil(raster.width / 2 + 2);
  const special = [];
  for (let k = top; k < bottom; k++) {
    const i = items.byRow[k];
    const x = items.col[i] * px + ox;
    const y = items.row[i] * py + oy;
    if (x < -8 || x > raster.width || y < -8 || y > raster.height) continue;
    const v = items.node[i];
    if (model.failed[v] & 1 || model.marks[v] & MARK.diverged || map.found.has(v) || i === map.selected) special.push(i);
    const cell = Math.max(0, y | 0) * across + Math.max(0, x >> 1);
    if (taken[cell]) continue;
    taken[cell] = 1;
    raster.rect(x - w / 2, y - hgt / 2, items.kind[i] ? Math.min(w * 2, px) : w, hgt, pixels.of.get(map.colourOf(i)));
  }
  for (const i of special) {
    const v = items.node[i];
    const chosen = i === map.selected || map.found.has(v);
    const size = i === map.selected ? 9 * ratio : chosen ? 7 * ratio : Math.max(1.5, Math.min(3.5 * ratio, hgt));
    const colour = chosen ? pixels.warm : model.marks[v] & MARK.diverged ? pixels.diverged : pixels.bad;
    raster.rect(items.col[i] * px + ox - size / 2, items.row[i] * py + oy - size / 2, size, size, colour);
  }
  raster.show(map.context);
}

function lines(map, top, bottom, px, py, ox, oy) {
  const { raster, pixels } = map;
  const { items } = map.model;
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

function cells(map, size) {
  if (!map.cells || map.cells.length < size) map.cells = new Uint8Array(size);
  else map.cells.fill(0, 0, size);
  return map.cells;
}
