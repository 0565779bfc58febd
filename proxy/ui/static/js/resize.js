// A handle at the left edge of a panel: drag it, or use the arrow keys, to change the panel's width. The width is kept.

import { h } from "./dom.js";

const KEY = "forkpoint-side";
const LEAST = 320;

const clip = (width) => Math.round(Math.max(LEAST, Math.min(window.innerWidth * 0.8, width)));

/** Return the handle of a panel at the right side of the window. */
export function resizable(panel) {
  const set = (width) => {
    panel.style.setProperty("--side", `${clip(width)}px`);
    handle.setAttribute("aria-valuenow", clip(width));
    localStorage.setItem(KEY, clip(width));
  };
  const handle = h("div", {
    class: "drag", role: "separator", tabindex: "0", "aria-orientation": "vertical", "aria-label": "Width of the panel", "aria-valuemin": LEAST, "aria-valuemax": 4000, "aria-valuenow": 480, title: "Drag to change the width",
    on: {
      pointerdown: (event) => handle.setPointerCapture(event.pointerId),
      pointermove: (event) => { if (handle.hasPointerCapture(event.pointerId)) set(panel.getBoundingClientRect().right - event.clientX); },
      keydown: (event) => {
        const step = { ArrowLeft: 40, ArrowRight: -40 }[event.key];
        if (!step) return;
        event.preventDefault();
        event.stopPropagation();
        set(panel.offsetWidth + step);
      },
    },
  });
  const kept = Number(localStorage.getItem(KEY));
  if (kept >= LEAST) panel.style.setProperty("--side", `${clip(kept)}px`);
  return handle;
}
