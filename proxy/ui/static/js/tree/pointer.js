// Pointer input: drag, choose, zoom, and jump in the minimap.

import { MINIMAP } from "./minimap.js";
import { marksAt } from "./near.js";
import { COL, ROW } from "./scale.js";

export function listen(map, signal) {
  const { canvas } = map;
  let from = null;
  let dragged = false;
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  };
  const toMini = ([x, y]) => {
    const { items } = map.model;
    map.ox = map.width / 2 - ((x - map.miniBox.x) / MINIMAP.width) * items.columns * COL * map.kx;
    map.oy = map.height / 2 - ((y - map.miniBox.y) / MINIMAP.height) * items.rows * ROW * map.ky;
    map.moved();
  };
  const inMini = ([x, y]) => map.miniBox && x >= map.miniBox.x && y >= map.miniBox.y && x < map.miniBox.x + MINIMAP.width && y < map.miniBox.y + MINIMAP.height;
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
      map.pan(dx, dy);
      [from[0], from[1]] = now;
      return;
    }
    const item = inMini(now) ? -1 : map.hit(...now);
    const near = item < 0 ? null : markNear(map, item, now);
    if (item === map.hovered && near === map.nearMark) return;
    map.hovered = item;
    map.nearMark = near;
    canvas.style.cursor = item >= 0 ? "pointer" : "";
    map.on.hover(item, now, near);
    map.draw();
  }, { signal });
  canvas.addEventListener("pointerup", (event) => {
    const clicked = from && !from.mini && !dragged ? map.hit(...at(event)) : -1;
    from = null;
    canvas.classList.remove("dragging");
    if (clicked >= 0) map.on.choose(clicked);
  }, { signal });
  canvas.addEventListener("pointercancel", () => (from = null), { signal });
  canvas.addEventListener("pointerleave", () => { map.hovered = -1; map.on.hover(-1); map.draw(); }, { signal });
  canvas.addEventListener("dblclick", (event) => map.zoom(1.8, ...at(event)), { signal });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const step = event.deltaMode ? 30 : 1;
    if (event.shiftKey) map.pan(-(event.deltaX || event.deltaY) * step, 0);
    else map.zoom(Math.exp(-event.deltaY * step * 0.0016), ...at(event));
  }, { signal, passive: false });
}

/** Return the mark of an item at a point; null for none. */
function markNear(map, item, [x, y]) {
  if (ROW * map.ky < 20) return null;
  const mark = marksAt(map, item).find(([, mx, my]) => Math.abs(mx - x) <= 6 && Math.abs(my - y) <= 5);
  return mark ? mark[0] : null;
}
