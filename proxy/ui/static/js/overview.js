// The overview: live totals, a timeline, and a table of tasks.

import { get, items } from "./api.js";
import { h, put, say, showPanels } from "./dom.js";
import { bytes, count, percent, seconds, short } from "./format.js";
import { watch } from "./live.js";
import { taskTable } from "./tasks.js";
import { timeline } from "./timeline.js";
import { videos } from "./videos.js";

const FIGURES = [
  ["hit_rate", "Hit rate"],
  ["saved", "Saved"],
  ["executed", "Executed"],
  ["calls", "Calls"],
  ["p95", "p95 of a call"],
  ["wrong", "Wrong answers"],
  ["running", "Running rollouts"],
  ["sandboxes", "Sandboxes"],
  ["snapshots", "Snapshots"],
  ["checkpoints", "Checkpoints"],
  ["diverged", "Diverged"],
  ["failed", "Failed"],
];

const SUMS_MS = 15_000;
// The views' own state: the price that the view of runs asks for.
const price = () => Math.max(0, Number(localStorage.getItem("forkpoint-price") ?? "1") || 0);
const tasksOf = (signal) => items("tasks", { signal });

export async function overview({ main, params, signal, setParams }) {
  const figures = new Map(FIGURES.map(([name, title]) => [name, figure(title)]));
  const alerts = h("div", { class: "alerts", role: "status", hidden: true });
  const line = timeline(signal, params, setParams);
  const table = taskTable(params, setParams);
  // A token for some tasks may not see the totals of all.
  const hidden = (error) => {
    if (error.status !== 403) throw error;
    return null;
  };
  const [stats, totals] = await Promise.all([get("stats", { signal }).catch(hidden), tasksOf(signal)]);
  showPanels(
    main,
    h("h1", { class: "sr" }, "Overview"),
    alerts,
    stats && h("p", { class: "dim" }, "Calls, seconds and failures count since this proxy started: ", stats.since.replace("T", " ").slice(0, 16), " UTC."),
    stats && h("dl", { class: "figures totals", "aria-label": "Totals since this proxy started" }, [...figures.values()].map((f) => f.element)),
    stats && line.element,
    stats && videos(signal),
    table.element,
  );
  let lastTotals = 0;
  let known = totals;
  const show = (now) => {
    if (now) showFigures(figures, now, known);
    table.show(known);
  };
  show(stats);
  if (stats) {
    const sums = async () => {
      const raised = await items("system/alerts", { signal });
      alerts.hidden = raised.length === 0;
      put(alerts, raised.map(alertNotice));
      showSums(figures, ...(await Promise.all([get(`report?by=endpoint&price=${price()}`, { signal }), items("system/wrong-answers", { signal })])));
    };
    sums().catch(() => {});
    watch(sums, signal, SUMS_MS);
  }
  watch(async () => {
    const now = stats && (await get("stats", { signal }));
    if (Date.now() - lastTotals > 1900) {
      known = await tasksOf(signal);
      lastTotals = Date.now();
    }
    show(now);
  }, signal);
}

function figure(title) {
  const value = h("div", { class: "value" }, "–");
  const sub = h("div", { class: "sub" });
  const bar = h("span");
  const meter = h("span", { class: "meter", hidden: true }, bar);
  const element = h("div", { class: "figure" }, h("dt", {}, title), h("dd", {}, value, sub, meter));
  return {
    element,
    /** Replace the line below the value by a link, for good. */
    note(text, href) {
      put(sub, h("a", { href }, text));
      sub.title = text;
      sub.dataset.kept = "1";
    },
    show(text, under = "", share = null) {
      const [number, ...unit] = text.split(" ");
      if (value.dataset.text !== text) {
        value.dataset.text = text;
        put(value, number, unit.length ? h("span", { class: "unit" }, ` ${unit.join(" ")}`) : null);
      }
      if (!sub.dataset.kept) {
        say(sub, under);
        sub.title = under;
      }
      meter.hidden = share === null;
      if (share !== null) {
        bar.style.width = `${Math.min(100, share * 100)}%`;
        meter.classList.toggle("full", share > 0.95);
      }
    },
  };
}

function showFigures(figures, s, totals) {
  const show = (name, ...values) => figures.get(name).show(...values);
  const live = Object.values(s.sandboxes).reduce((a, b) => a + b, 0);
  const running = totals.reduce((sum, task) => sum + task.running, 0);
  const failures = Object.values(s.failures).reduce((a, b) => a + b, 0);
  show("hit_rate", percent(s.hit_rate), `${short(s.hits)} hits, ${short(s.waits)} waits`);
  show("saved", seconds(s.saved_s), "of tool time");
  show("executed", seconds(s.executed_s), `${seconds(s.replayed_s)} replayed`);
  show("calls", short(s.calls), `${short(s.misses)} misses${s.bypasses ? `, ${short(s.bypasses)} bypasses` : ""}`);
  show("running", count(running), `${short(totals.reduce((sum, task) => sum + task.rollouts, 0))} in all`);
  const most = s.sandboxes_budget ?? null;
  const states = [
    ...Object.entries(s.sandboxes).map(([name, n]) => `${n} ${name}`),
    ...(s.sandboxes_evicted ? [`${short(s.sandboxes_evicted)} closed early: short of ${s.sandboxes_bounded_by}`] : []),
  ].join(", ");
  show("sandboxes", most ? `${live} of ${most}` : String(live), states || "none", most ? live / most : null);
  budget(figures.get("snapshots"), s.snapshots, s.snapshot_bytes, s.snapshot_budget_bytes);
  budget(figures.get("checkpoints"), null, s.checkpoint_bytes, s.checkpoint_budget_bytes);
  const changes = s.root_changes ? `${s.root_changes} changes of a base: new rollouts begin new trees` : "replays that met another state";
  show("diverged", short(s.divergences), changes);
  if (s.divergences + s.root_changes + failures > 0) for (const name of ["diverged", "failed"]) figures.get(name).note(name === "failed" && failures ? `${s.recovered ? `${short(s.recovered)} more recovered: ` : ""}${Object.entries(s.failures).map(([kind, n]) => `${n} ${kind}`).join(", ")}` : "what was warned of", "#/system");
  show("failed", short(failures - s.recovered), Object.entries(s.failures).map(([kind, n]) => `${n} ${kind}`).join(", ") || "failures of the machine");
  figures.get("diverged").element.classList.toggle("bad", s.divergences + s.root_changes > 0);
  figures.get("failed").element.classList.toggle("bad", failures > s.recovered);
}

const alertNotice = (alert) => h("div", { class: "notice" }, h("strong", {}, alert.summary), h("p", {}, alert.what_to_do, " ", h("a", { href: "../manual/monitoring.html" }, "Alerts"), ` (${alert.severity}, since ${alert.timestamp.slice(11, 16)} UTC)`));

/** Show what is summed over all that is stored, not since the start. */
function showSums(figures, report, audits) {
  const { total } = report;
  const worst = audits.reduce((most, found) => (found.checked && (!most || found.high > most.high) ? found : most), null);
  figures.get("p95").show(seconds(total.paid_p95_s), `${seconds(total.p95_s)} without the cache`);
  figures.get("wrong").show(worst ? `≤${bound(worst.high)}` : "–", worst ? `${worst.differing} of ${count(worst.checked)} checked, 95 %` : "no audit yet");
  figures.get("saved").note(`worth ${total.saved_cost.toFixed(2)} at a price of ${price()} an hour`, "#/runs");
}

const bound = (x) => (x > 0 && x < 0.001 ? `${(x * 100).toPrecision(2)} %` : percent(x));

function budget(shown, number, used, most) {
  const what = number === null ? bytes(used) : `${short(number)}`;
  shown.show(what, number === null ? `of ${bytes(most)}` : `${bytes(used)} of ${bytes(most)}`, most ? used / most : 0);
}
