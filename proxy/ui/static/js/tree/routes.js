// Lines over the map: the merges of the hovered or chosen node, and lit ways. All run along rows and between columns, so
// that none crosses the text of a call.

import { COL, ROW } from "./scale.js";

/** Return the corners of the line from one item to another: beside its row, then down before the column of the target. */
export function corners([ax, ay], [bx, by], row, r) {
  const lane = ay + (by < ay ? -1 : 1) * row * 0.42;
  const before = bx - r - 9;
  if (ay === by && bx > ax) return [[ax, ay], [ax, lane], [before, lane], [before, by], [bx - r, by]];
  return [[ax, ay], [ax, lane], [before, lane], [before, by], [bx - r, by]];
}

/** Draw the merges at a node: lines from where another history leads to its state, and to where its own calls lead. */
export function drawMerges(map, item) {
  if (item < 0) return;
  const { context: c, model, paint } = map;
  const v = model.items.node[item];
  c.strokeStyle = c.fillStyle = paint.merge;
  c.lineWidth = 1.8;
  for (const [from, to] of model.mergesAt(v)) {
    const [a, b] = [model.itemOf[from], model.itemOf[to]];
    if (a < 0 || b < 0 || a === b) continue;
    path(map, corners(map.placeOf(a), map.placeOf(b), ROW * map.ky, map.radiusOf(b)));
    arrow(c, map.placeOf(b), map.radiusOf(b));
  }
}

/** Draw the lit way: along the tree's edges, and along merges where the rollout took one. */
export function drawLit(map) {
  const { context: c, model, paint, lit } = map;
  if (!lit) return;
  c.strokeStyle = paint.accent;
  c.lineWidth = 3;
  c.lineJoin = "round";
  c.globalAlpha = 0.75;
  for (const [from, to] of lit.edges) {
    const [a, b] = [model.itemOf[from], model.itemOf[to]];
    if (a < 0 || b < 0 || a === b) continue;
    const [[ax, ay], [bx, by]] = [map.placeOf(a), map.placeOf(b)];
    if (model.items.up[b] === a) path(map, [[ax, ay], [ax, by], [bx, by]]);
    else path(map, corners([ax, ay], [bx, by], ROW * map.ky, map.radiusOf(b)));
  }
  c.globalAlpha = 1;
}

function path(map, points) {
  const { context: c } = map;
  const xs = points.map(([x]) => x);
  const ys = points.map(([, y]) => y);
  if (Math.max(...xs) < 0 || Math.min(...xs) > map.width || Math.max(...ys) < 0 || Math.min(...ys) > map.height) return;
  const round = Math.max(0, Math.min(6, COL * map.kx * 0.05, ROW * map.ky * 0.2));
  c.beginPath();
  c.moveTo(...points[0]);
  for (let i = 1; i < points.length - 1; i++) c.arcTo(...points[i], ...points[i + 1], round);
  c.lineTo(...points.at(-1));
  c.stroke();
}

function arrow(c, [x, y], r) {
  c.beginPath();
  c.moveTo(x - r, y);
  c.lineTo(x - r - 7, y - 4);
  c.lineTo(x - r - 7, y + 4);
  c.closePath();
  c.fill();
}

/** Return the lit parts of a way: its nodes, and the pairs of nodes between which it moved. Null for no way. */
export function litWay(model, way) {
  if (!way) return null;
  const nodes = new Set();
  const edges = [];
  let at = model.index.get(way.start);
  for (const id of way.nodes) {
    const v = model.index.get(id);
    if (v === undefined || v === at) continue;
    if (at !== undefined) edges.push([at, v]);
    nodes.add(at).add(v);
    at = v;
  }
  return { nodes, edges };
}
