// The minimap: the whole tree in a corner, if it is larger than the window.

import { COL, ROW } from "./scale.js";

export const MINIMAP = { width: 168, height: 104, pad: 10 };

/** Draw the minimap. */
export function drawMinimap(map) {
  const { context: c, model, paint } = map;
  const { items } = model;
  const wide = items.columns * COL * map.kx;
  const tall = items.rows * ROW * map.ky;
  map.miniBox = null;
  if (wide < map.width * 1.3 && tall < map.height * 1.3) return;
  map.mini ??= picture(map);
  const x = map.width - MINIMAP.width - MINIMAP.pad;
  const y = map.height - MINIMAP.height - MINIMAP.pad;
  map.miniBox = { x, y };
  c.globalAlpha = 0.94;
  c.drawImage(map.mini, x, y, MINIMAP.width, MINIMAP.height);
  c.globalAlpha = 1;
  c.strokeStyle = paint["line-strong"];
  c.lineWidth = 1;
  c.strokeRect(x + 0.5, y + 0.5, MINIMAP.width - 1, MINIMAP.height - 1);
  const clip = (value, most) => Math.max(0, Math.min(most, value));
  const x0 = clip((-map.ox / wide) * MINIMAP.width, MINIMAP.width - 3);
  const y0 = clip((-map.oy / tall) * MINIMAP.height, MINIMAP.height - 3);
  const x1 = clip(((map.width - map.ox) / wide) * MINIMAP.width, MINIMAP.width);
  const y1 = clip(((map.height - map.oy) / tall) * MINIMAP.height, MINIMAP.height);
  c.strokeStyle = paint.accent;
  c.lineWidth = 1.5;
  c.strokeRect(x + x0 + 0.5, y + y0 + 0.5, Math.max(3, x1 - x0 - 1), Math.max(3, y1 - y0 - 1));
}

function picture(map) {
  const { model, paint, ratio } = map;
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
    const colour = map.colourOf(i);
    c.fillStyle = colour === paint.s0 ? paint["line-strong"] : colour;
    c.fillRect(x, y, Math.max(1, Math.min(4, fx * 0.8)), Math.max(1, Math.min(2, fy * 0.8)));
  }
  return mini;
}
