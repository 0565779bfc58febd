// The timeline: hits, waits, misses and replays of each second as stacked columns, newest at the right.

import { get } from "./api.js";
import { h, put, svg } from "./dom.js";
import { count } from "./format.js";
import { onSecond, paused } from "./live.js";

const PARTS = [
  ["replays", "Replays", "var(--replay)"],
  ["bypasses", "Bypasses", "var(--bypass)"],
  ["misses", "Misses", "var(--miss)"],
  ["waits", "Waits", "var(--wait)"],
  ["hits", "Hits", "var(--hit)"],
];
const SLOTS = 120;
const HEIGHT = 104;

export function timeline(signal) {
  const chart = svg("svg", { class: "timeline", viewBox: `0 0 ${SLOTS * 10} 132`, preserveAspectRatio: "none", role: "img" });
  const labels = h("div", { class: "axis" });
  const peak = h("span", { class: "note" });
  const samples = new Map();

  const draw = () => {
    const now = Math.floor(Date.now() / 1000);
    const shown = Array.from({ length: SLOTS }, (_, i) => samples.get(now - SLOTS + 1 + i));
    const most = Math.max(1, ...shown.map((s) => (s ? PARTS.reduce((sum, [name]) => sum + s[name], 0) : 0)));
    const bars = [];
    shown.forEach((sample, i) => {
      let y = HEIGHT + 14;
      if (!sample) return;
      for (const [name, , colour] of [...PARTS].reverse()) {
        const height = (sample[name] / most) * HEIGHT;
        if (height > 0) bars.push(svg("rect", { x: i * 10 + 1, width: 8, y: (y - height).toFixed(1), height: height.toFixed(1), style: { fill: colour } }));
        y -= height;
      }
    });
    put(
      chart,
      svg("line", { x1: 0, x2: SLOTS * 10, y1: HEIGHT + 14.5, y2: HEIGHT + 14.5, style: { stroke: "var(--line-strong)" } }),
      svg("line", { x1: 0, x2: SLOTS * 10, y1: 14, y2: 14, style: { stroke: "var(--line)" } }),
      bars,
    );
    const sums = PARTS.map(([name]) => shown.reduce((sum, s) => sum + (s ? s[name] : 0), 0));
    chart.setAttribute("aria-label", `The last two minutes: ${PARTS.map(([, title], i) => `${sums[i]} ${title.toLowerCase()}`).join(", ")}`);
    peak.textContent = `at most ${count(most)} per second`;
  };

  put(labels, h("span", { style: { left: "0%" } }, "2 min ago"), h("span", { style: { left: "50%" } }, "1 min"), h("span", { style: { left: "100%" } }, "now"));
  const element = h(
    "section",
    { class: "panel", "aria-labelledby": "line-h" },
    h(
      "header",
      {},
      h("h2", { id: "line-h" }, "Calls per second"),
      peak,
      h("span", { class: "gap" }),
      h("div", { class: "legend" }, [...PARTS].reverse().map(([, title, colour]) => h("span", { style: { "--c": colour } }, title))),
    ),
    h("div", { class: "body" }, chart, labels),
  );
  const take = (second) => samples.set(Math.floor(second.at), second);
  onSecond((second) => {
    take(second);
    for (const old of samples.keys()) if (old < second.at - SLOTS - 5) samples.delete(old);
    if (!document.hidden && !paused()) draw();
  }, signal);
  draw();
  // The proxy has the seconds before the page was opened.
  get(`timeline?span_s=${SLOTS}&step_s=1`, { signal }).then((view) => {
    view.seconds.forEach(take);
    draw();
  }, () => {});
  return { element };
}
