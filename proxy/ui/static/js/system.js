// The proxy itself: budgets, the latest warnings with links to what they are about, settings, and the checks of the machine.

import { get, items, names, send } from "./api.js";
import { grid, h, notice, panel, put, showPanels, thead } from "./dom.js";
import { bytes, count, oneLine, percent } from "./format.js";
import { watch } from "./live.js";

export async function systemView({ main, signal }) {
  const budgets = h("tbody");
  const events = h("tbody");
  const none = h("p", { class: "empty" }, "Nothing was warned of since this proxy started.");
  const settings = h("tbody");
  const look = async () => {
    const [stats, warnings] = await Promise.all([get("stats", { signal }), items("system/warnings", { signal })]);
    put(budgets, budgetsOf(stats).map(budgetRow));
    none.hidden = warnings.length > 0;
    if (!events.contains(document.activeElement)) put(events, warnings.map(warningRow));
  };
  const [known] = await Promise.all([items("system/settings", { signal }), look()]);
  put(settings, known.map(settingRow));
  const part = (title, id, heads, body, ...more) => panel({ id }, h("h2", {}, title), grid({}, thead(heads), body), more);
  showPanels(
    main,
    h("h1", {}, "System"),
    part("Budgets", "budgets", [["Budget"], ["Used", "num"], ["Of", "num"], ["Share"]], budgets),
    part("Warnings and errors", "events", [["When"], ["Level"], ["Event"], ["Where"], ["Details"]], events, none),
    doctorPart(signal),
    part("Settings", "settings", [["Setting"], ["Value"], ["What it does"]], settings),
  );
  watch(look, signal, 3000);
}

function budgetsOf(stats) {
  const live = Object.values(stats.sandboxes).reduce((a, b) => a + b, 0);
  return [
    ["Sandboxes", live, stats.sandboxes_budget, count],
    ["Snapshots", stats.snapshot_bytes, stats.snapshot_budget_bytes, bytes],
    ["Checkpoints of live processes", stats.checkpoint_bytes, stats.checkpoint_budget_bytes, bytes],
  ];
}

function budgetRow([name, used, most, shown]) {
  const share = most ? used / most : 0;
  return h("tr", {}, h("td", {}, name), h("td", { class: "num" }, shown(used)), h("td", { class: "num" }, most ? shown(most) : "–"), h("td", {}, h("span", { class: "dim" }, percent(share)), h("span", { class: share > 0.95 ? "meter full" : "meter" }, h("span", { style: { width: `${Math.min(100, share * 100)}%` } }))));
}

function warningRow(event) {
  const { timestamp, level, event: text, task, rollout, node, exception, ...others } = event;
  const where = task
    ? [h("a", { class: "mono", href: `#/t/${names(task)}` }, task), node ? [" ", h("a", { class: "mono", href: `#/t/${names(task)}/n/${names(node)}` }, node)] : null, rollout ? [" ", h("a", { class: "mono", href: `#/t/${names(task)}/r/${names(rollout)}` }, rollout)] : null]
    : "–";
  const details = Object.entries(others).map(([name, value]) => `${name}=${oneLine(value)}`).join(" ");
  return h("tr", {}, h("td", {}, (timestamp ?? "").replace("T", " ").slice(0, 19)), h("td", {}, h("span", { class: level === "warning" ? "chip" : "chip bad" }, level)), h("td", { class: "wide" }, oneLine(text ?? "")), h("td", {}, where), h("td", { class: "wide dim" }, details, exception ? h("details", {}, h("summary", {}, "traceback"), h("pre", { class: "output", tabindex: "0" }, exception)) : null));
}

function settingRow({ name, value, usual, about }) {
  const text = value === null ? "none" : typeof value === "string" ? value : JSON.stringify(value);
  return h("tr", {}, h("td", { class: "mono" }, name), h("td", { class: "wide mono" }, text, usual ? null : h("span", { class: "chip live" }, "set")), h("td", { class: "wide dim" }, about));
}

/** The checks of `forkpoint doctor`, which run for some seconds when asked for. */
function doctorPart(signal) {
  const body = h("tbody");
  const table = grid({}, thead([["Check"], ["State"], ["Found"], ["Remedy"]]), body);
  table.hidden = true;
  const stage = h("div", {});
  const button = h("button", {
    on: {
      click: async () => {
        button.disabled = true;
        put(stage, h("p", { class: "empty" }, "Checking the machine …"));
        try {
          const { items: found } = await send("POST", "system/doctor", undefined, { signal });
          put(stage);
          table.hidden = false;
          put(body, found.map((check) => h("tr", {}, h("td", {}, check.name), h("td", {}, h("span", { class: check.ok ? "chip" : check.required ? "chip bad" : "chip" }, check.ok ? "ok" : check.required ? "missing" : "optional")), h("td", { class: "wide" }, check.detail), h("td", { class: "wide dim" }, check.ok ? "" : check.remedy))));
        } catch (error) {
          put(stage, h("div", { class: "body" }, notice(error)));
        } finally {
          button.disabled = false;
        }
      },
    },
  }, "Check the machine");
  return panel({ id: "doctor" }, [h("h2", {}, "Doctor"), h("span", { class: "note" }, "what forkpoint doctor finds"), h("span", { class: "gap" }), button], stage, table);
}
