// The legend of the map.

import { h, svg } from "../dom.js";

export function legend() {
  const shape = (...parts) => svg("svg", { width: 14, height: 12, viewBox: "0 0 14 12", "aria-hidden": "true" }, parts);
  const ring = (colour, dash) => shape(svg("circle", { cx: 7, cy: 6, r: 4, fill: "var(--s1)", stroke: colour, "stroke-width": 1.8, "stroke-dasharray": dash }));
  return h(
    "div",
    { class: "key", "aria-hidden": "true" },
    h("span", {}, shape(svg("path", { d: "M7 2l4 4-4 4-4-4Z", fill: "var(--snapshot)" })), "snapshot"),
    h("span", {}, shape(svg("path", { d: "M3 10l4-7 4 7Z", fill: "var(--warm)" })), "warm fork"),
    h("span", {}, shape(svg("rect", { x: 4, y: 3, width: 6, height: 6, fill: "none", stroke: "var(--warm)" })), "sandbox"),
    h("span", {}, shape(svg("path", { d: "M4 2l7 4-7 4Z", fill: "var(--accent)" })), "rollout"),
    h("span", {}, shape(svg("circle", { cx: 7, cy: 6, r: 2.6, fill: "var(--s1)", stroke: "var(--faint)" })), "reads"),
    h("span", {}, ring("var(--bad)"), "failed"),
    h("span", {}, ring("var(--diverged)", "2 2"), "diverged"),
  );
}
