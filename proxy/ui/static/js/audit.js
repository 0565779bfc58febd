// The results of a task's audits: rates of wrong answers, the calls that differ, and the noise masks.

import { get, names, send } from "./api.js";
import { grid, h, panel, put, showPanels, thead, toast } from "./dom.js";
import { ago, count, oneLine, percent, plural } from "./format.js";
import { watch } from "./live.js";
import { TreeChoice, preferred, treesOf } from "./trees.js";

export async function auditView({ main, params, signal, setParams }, task) {
  const path = `tasks/${names(task)}`;
  const bounds = h("tbody");
  const findings = h("tbody");
  const none = h("p", { class: "empty" }, "No recorded call differs.");
  const state = h("span", { class: "note", role: "status" });
  const trees = await treesOf(task, signal);
  let tree = params.get("root") ?? preferred(trees);
  const masks = h("div", { class: "body" });
  const sample = h("input", { type: "text", inputmode: "numeric", value: "100", size: "6", "aria-label": "Number of calls" });
  const act = (run) => async () => {
    try {
      await run();
      await look();
    } catch (error) {
      toast(error.message, true);
    }
  };
  const begin = h("button", { class: "primary", on: { click: act(() => send("POST", `${path}/verify`, { node: tree, sample: Math.max(1, Math.floor(Number(sample.value)) || 100) })) } }, "Verify");
  const stop = h("button", { hidden: true, on: { click: act(() => send("DELETE", `${path}/verify?root=${tree}`)) } }, "Stop");
  const choice = new TreeChoice((root) => {
    tree = root;
    setParams({ root });
    act(() => {})();
  });
  const look = async () => {
    const asked = tree;
    const view = await get(`${path}/audit?root=${encodeURIComponent(tree)}`, { signal });
    if (asked !== tree) return;
    // The address may name any node of the tree; the audit covers the whole tree.
    tree = view.root;
    choice.show(trees, tree);
    put(bounds, view.bounds.map(boundRow));
    put(findings, view.findings.map((found) => findingRow(task, found)));
    none.hidden = view.findings.length > 0;
    const { running } = view;
    begin.hidden = Boolean(running);
    stop.hidden = !running;
    state.textContent = running ? `${count(running.checked)} of ${plural(running.of, "call")} run again, ${count(running.differing)} differ` : `quarantine is ${view.quarantine ? "on: a record that differs no longer answers calls" : "off"}`;
    put(masks, maskList(view.masks));
  };
  await look();
  showPanels(
    main,
    panel(
      {},
      [h("h1", {}, "Audit"), state, h("span", { class: "gap" }), choice.element, h("label", { class: "inline" }, "sample of", sample, "calls"), begin, stop],
      grid({}, thead([["Checked"], ["Calls", "num"], ["Differ", "num"], ["Rate", "num"], ["Confidence interval", "num"], ["Confidence", "num"], ["Unreachable", "num"], ["Last", "num"]]), bounds),
    ),
    panel({}, h("h2", {}, "Calls that differ"), grid({}, thead([["Call"], ["From"], ["Leads to"], ["Why"], ["State"], ["Found", "num"]]), findings), none),
    panel({}, h("h2", {}, "Ignored in comparisons"), masks),
  );
  watch(look, signal, 1000);
}

function boundRow(bound) {
  const words = { hits: "hits that were given", records: "recorded calls" };
  const exact = (x) => (x > 0 && x < 0.001 ? `${(x * 100).toPrecision(2)} %` : percent(x));
  return h("tr", {}, h("td", {}, words[bound.kind] ?? bound.kind), [count(bound.checked), count(bound.differing), exact(bound.rate), `${exact(bound.low)} to ${exact(bound.high)}`, percent(bound.confidence), count(bound.unreachable), bound.last_at ? ago(bound.last_at) : "–"].map((text) => h("td", { class: "num" }, text)));
}

function findingRow(task, found) {
  const link = (node) => h("a", { class: "mono", href: `#/t/${names(task)}?node=${node}` }, node);
  return h("tr", {}, h("td", { class: "cut mono", title: oneLine(found.title) }, oneLine(found.title)), h("td", {}, link(found.node)), h("td", {}, link(found.leads_to)), h("td", { class: "wide dim" }, found.why), h("td", {}, h("span", { class: found.quarantined ? "chip diverged" : "chip" }, found.quarantined ? "quarantined" : "served")), h("td", { class: "num" }, ago(found.found_at)));
}

/** Return the noise masks: built-in names and patterns. */
function maskList(masks) {
  const on = Object.entries(masks).flatMap(([name, value]) => (value === true ? [name] : Array.isArray(value) ? value.map((part) => (typeof part === "string" ? part : JSON.stringify(part))) : []));
  return on.length ? h("div", { class: "chips" }, on.map((name) => h("span", { class: "chip mono" }, name))) : h("p", { class: "dim" }, "Nothing is ignored. Set noise masks with PUT …/audit/masks.");
}
