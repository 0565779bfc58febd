// The timeline: hits, waits, misses and replays as stacked columns, newest at the right, with the hit rate as a line. The
// last two minutes are live; longer ranges come from what the proxy keeps, and outlive its restarts.

import { get } from "./api.js";
import { h, panel, put, svg } from "./dom.js";
import { count, percent, seconds, unix } from "./format.js";
import { onSecond, paused, watch } from "./live.js";

const PARTS = [
  ["replays", "Replays", "var(--replay)"],
  ["bypasses", "Bypasses", "var(--bypass)"],
  ["misses", "Misses", "var(--miss)"],
  ["waits", "Waits", "var(--wait)"],
  ["hits", "Hits", "var(--hit)"],
];
const SLOTS = 120;
const LIVE = 120;
const RANGES = [[LIVE, "2 min", "1 min"], [600, "10 min", "5 min"], [3600, "1 h", "30 min"], [86_400, "24 h", "12 h"]];
const AGAIN_MS = 15_000;
const HEIGHT = 104;

export function timeline(signal, params, setParams) {
  const chart = svg("svg", { class: "timeline", viewBox: `0 0 ${SLOTS * 10} 132`, preserveAspectRatio: "none", role: "img" });
  const labels = h("div", { class: "axis" });
  const peak = h("span", { class: "note" });
  const live = new Map();
  let span = RANGES.some(([length]) => String(length) === params.get("span")) ? Number(params.get("span")) : LIVE;
  let stored = { step_s: 1, steps: [] };

  const draw = () => {
    const now = Math.floor(Date.now() / 1000);
    const step = span === LIVE ? 1 : stored.step_s;
    const slots = Math.round(span / step);
    const shown = Array.from({ length: slots });
    if (span === LIVE) shown.forEach((_, i) => (shown[i] = live.get(now - slots + 1 + i)));
    else for (const sample of stored.steps) shown[Math.floor(slots - 1 - (now - unix(sample.at)) / step)] ??= sample;
    shown.length = slots;
    const total = (sample) => PARTS.reduce((sum, [name]) => sum + sample[name], 0);
    const most = Math.max(1, ...shown.map((sample) => (sample ? total(sample) : 0)));
    const width = (SLOTS * 10) / slots;
    const bars = [];
    const rate = [];
    shown.forEach((sample, i) => {
      let y = HEIGHT + 14;
      if (!sample) return;
      for (const [name, , colour] of [...PARTS].reverse()) {
        const height = (sample[name] / most) * HEIGHT;
        if (height > 0) bars.push(svg("rect", { x: (i * width + width * 0.1).toFixed(2), width: (width * 0.8).toFixed(2), y: (y - height).toFixed(1), height: height.toFixed(1), style: { fill: colour } }));
        y -= height;
      }
      const calls = sample.hits + sample.waits + sample.misses + sample.bypasses;
      if (calls) rate.push(`${((i + 0.5) * width).toFixed(1)},${(HEIGHT + 14 - ((sample.hits + sample.waits) / calls) * HEIGHT).toFixed(1)}`);
    });
    put(
      chart,
      svg("line", { x1: 0, x2: SLOTS * 10, y1: HEIGHT + 14.5, y2: HEIGHT + 14.5, style: { stroke: "var(--line-strong)" } }),
      svg("line", { x1: 0, x2: SLOTS * 10, y1: 14, y2: 14, style: { stroke: "var(--line)" } }),
      bars,
      rate.length > 1 && span !== LIVE ? svg("polyline", { points: rate.join(" "), class: "rate-line" }) : [],
    );
    const [, words, half] = RANGES.find(([length]) => length === span);
    const sums = PARTS.map(([name]) => shown.reduce((sum, s) => sum + (s ? s[name] : 0), 0));
    const [hits, waits, misses, bypasses] = ["hits", "waits", "misses", "bypasses"].map((name) => shown.reduce((sum, s) => sum + (s ? s[name] : 0), 0));
    const saved = shown.reduce((sum, s) => sum + (s ? s.saved_s : 0), 0);
    const calls = hits + waits + misses + bypasses;
    chart.setAttribute("aria-label", `The last ${words}: ${PARTS.map(([, title], i) => `${sums[i]} ${title.toLowerCase()}`).join(", ")}`);
    peak.textContent = [`${count(calls)} calls`, calls ? `${percent((hits + waits) / calls)} hits` : "", saved ? `${seconds(saved)} saved` : "", `at most ${count(most)} in ${step === 1 ? "a second" : step < 60 ? `${step} s` : `${step / 60} min`}`].filter(Boolean).join(" · ");
    put(labels, h("span", { style: { left: "0%" } }, `${words} ago`), h("span", { style: { left: "50%" } }, `${half} ago`), h("span", { style: { left: "100%" } }, "now"));
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(RANGES[i][0] === span)));
  };

  const load = async () => {
    if (span === LIVE) return;
    const wanted = span;
    const found = await get(`system/history?span_s=${span}`, { signal });
    if (wanted !== span) return;
    stored = found;
    draw();
  };
  const choose = (length) => {
    span = length;
    setParams({ span: span === LIVE ? null : String(span) });
    stored = { step_s: span / SLOTS, steps: [] };
    draw();
    load().catch(() => {});
  };
  const buttons = RANGES.map(([length, text]) => h("button", { on: { click: () => choose(length) } }, text));
  const element = panel(
    { "aria-labelledby": "line-h" },
    [
      h("h2", { id: "line-h" }, "Calls"),
      h("div", { class: "group", role: "group", "aria-label": "Range" }, buttons),
      h("a", { class: "button quiet", href: "#/runs" }, "by run"),
      peak,
      h("span", { class: "gap" }),
      h("div", { class: "legend" }, [...PARTS].reverse().map(([, title, colour]) => h("span", { style: { "--c": colour } }, title)), h("span", { style: { "--c": "var(--text)" } }, "Hit rate")),
    ],
    h("div", { class: "body" }, chart, labels),
  );
  const take = (second) => live.set(Math.floor(unix(second.at)), second);
  onSecond((second) => {
    take(second);
    for (const old of live.keys()) if (old < unix(second.at) - LIVE - 5) live.delete(old);
    if (!document.hidden && !paused() && span === LIVE) draw();
  }, signal);
  draw();
  load().catch(() => {});
  watch(load, signal, AGAIN_MS);
  // The proxy has the seconds before the page was opened.
  get(`timeline?span_s=${LIVE}&step_s=1`, { signal }).then((view) => {
    view.seconds.forEach(take);
    draw();
  }, () => {});
  return { element };
}
