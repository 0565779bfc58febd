// The legend of the map: its marks, and the scale of the colours.

import { h, put, svg } from "../dom.js";

export function legend() {
  const shape = (...parts) => svg("svg", { width: 14, height: 12, viewBox: "0 0 14 12", "aria-hidden": "true" }, parts);
  const ring = (colour, dash) => shape(svg("circle", { cx: 7, cy: 6, r: 4, fill: "var(--s1)", stroke: colour, "stroke-width": 1.8, "stroke-dasharray": dash }));
  const title = h("span", { class: "strong" });
  const swatches = h("span", { class: "swatches" });
  const marks = [
    [shape(svg("path", { d: "M7 2l4 4-4 4-4-4Z", fill: "var(--snapshot)" })), "snapshot", "A snapshot of the state is kept"],
    [shape(svg("path", { d: "M3 10l4-7 4 7Z", fill: "var(--warm)" })), "warm fork", "A sandbox that waits for the next miss"],
    [shape(svg("rect", { x: 4, y: 3, width: 6, height: 6, fill: "none", stroke: "var(--warm)" })), "sandbox", "A live sandbox in this state"],
    [shape(svg("path", { d: "M4 2l7 4-7 4Z", fill: "var(--accent)" })), "rollout", "Rollouts at this state"],
    [shape(svg("circle", { cx: 7, cy: 6, r: 2.6, fill: "var(--s1)", stroke: "var(--faint)" })), "reads", "Calls that changed nothing"],
    [ring("var(--bad)"), "failed", "The call failed"],
    [ring("var(--diverged)", "2 2"), "diverged", "A replay met another state, or the record is private"],
    [shape(svg("path", { d: "M1 2h7v7h4", fill: "none", stroke: "var(--merge)", "stroke-width": 1.8 })), "merge", "Another history leads to the same state: shown at the node under the pointer and at the chosen one"],
  ];
  const element = h(
    "details",
    { class: "key", open: window.innerHeight > 600 },
    h("summary", {}, "Legend"),
    h("div", { class: "scale" }, title, swatches),
    h("div", { class: "marks" }, marks.map(([picture, word, meaning]) => h("span", { title: meaning }, picture, word))),
  );
  return {
    element,
    /** Show the scale of a measure: pairs of a colour and its words. */
    show(name, scale) {
      title.textContent = `Colour: ${name}`;
      put(swatches, scale.map(([colour, word]) => h("span", { style: { "--c": colour } }, word)));
    },
  };
}
