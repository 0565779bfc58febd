// What the cache did by run, step, group, task or endpoint: hit rate, seconds, money and tokens saved, percentiles and
// rewards.

import { get, names } from "./api.js";
import { grid, h, panel, put, say, showPanels, thead } from "./dom.js";
import { count, oneLine, percent, seconds, visible } from "./format.js";
import { watch } from "./live.js";

const BY = ["run", "task", "endpoint"];
const PRICE = "forkpoint-price";
const COLUMNS = ["Rollouts", "Calls", "Hit rate", "Executed", "Saved", "Spent, money", "Saved, money", "p95 of tools", "p95 with the cache", "Reward"];

export async function runsView({ main, params, signal, setParams }) {
  const body = h("tbody");
  const total = h("tfoot");
  const arms = h("tbody");
  const calls = h("tbody");
  const remedies = h("div", { class: "body" });
  const note = h("span", { class: "note" });
  const head = h("tr");
  const by = h("select", { on: { change: () => { setParams({ by: by.value === "run" ? null : by.value }); look(); } } }, BY.map((name) => h("option", { value: name }, name)));
  const offer = (name) => [...by.options].some((each) => each.value === name) || by.append(h("option", { value: name }, name));
  offer(params.get("by") ?? "run");
  by.value = params.get("by") ?? "run";
  const price = h("input", { type: "text", inputmode: "decimal", size: "6", value: localStorage.getItem(PRICE) ?? "1", "aria-label": "Price of an hour of tool time", on: { change: () => { localStorage.setItem(PRICE, price.value); look(); } } });
  const look = async () => {
    const view = await get(`report?by=${by.value}&price=${Math.max(0, Number(price.value) || 0)}`, { signal });
    // Few tasks ask models, so most reports have no tokens.
    const tokens = view.total.executed_tokens + view.total.saved_tokens > 0;
    const columns = tokens ? [...COLUMNS, "Tokens of models", "Tokens saved"] : COLUMNS;
    view.label_names.forEach(offer);
    put(head, h("th", { scope: "col" }, by.value[0].toUpperCase() + by.value.slice(1)), columns.map((text) => h("th", { scope: "col", class: "num" }, text)));
    put(body, view.rows.map((row) => rowOf(row, by.value, tokens)));
    put(total, rowOf({ ...view.total, group: "all" }, "", tokens));
    put(arms, view.arms.map((arm) => h("tr", {}, h("td", {}, { none: "no cache", stateless: "stateless cache", stateful: "this proxy" }[arm.cache] ?? arm.cache), [count(arm.executed), seconds(arm.tool_s), percent(arm.hit_rate), arm.cache === "stateful" ? "see audits" : count(arm.wrong)].map((text) => h("td", { class: "num" }, text)))));
    put(calls, view.calls.map((call) => h("tr", {}, h("td", { class: "cut mono", title: oneLine(call.title) }, visible(oneLine(call.title))), h("td", {}, h("a", { class: "mono", href: `#/t/${names(call.task)}` }, call.task)), h("td", {}, h("span", { class: "chip", title: call.remedy }, call.reason)), [count(call.executed), count(call.saved), count(call.states) + (call.differing ? ` (${call.differing} differ)` : ""), seconds(call.executed_s)].map((text) => h("td", { class: "num" }, text)))));
    put(remedies, [...new Set(view.calls.filter((call) => call.remedy).map((call) => `${call.reason}: ${call.remedy}`))].map((text) => h("p", { class: "dim" }, text)));
    say(note, view.truncated ? "the first groups" : "");
  };
  await look();
  showPanels(
    main,
    panel(
      {},
      [h("h1", {}, "Runs"), note, h("span", { class: "gap" }), h("label", { class: "inline" }, "by", by), h("label", { class: "inline" }, "price of an hour of tool time", price)],
      grid({}, h("thead", {}, head), body, total),
    ),
    panel({}, h("h2", {}, "Calls whose executions took longest"), grid({}, thead([["Call"], ["Task"], ["Why it ran"], ["Executed", "num"], ["Saved", "num"], ["States", "num"], ["Executed time", "num"]]), calls), remedies),
    panel({}, h("h2", {}, "The same calls with other caches"), grid({}, thead([["Cache"], ["Executed calls", "num"], ["Tool time", "num"], ["Hit rate", "num"], ["Wrong answers", "num"]]), arms)),
  );
  watch(look, signal, 5000);
}

function rowOf(row, by, tokens) {
  const name = row.group ?? "without label";
  const cells = [
    count(row.rollouts), count(row.calls), percent(row.hit_rate), seconds(row.executed_s), seconds(row.saved_s), row.executed_cost.toFixed(2), row.saved_cost.toFixed(2),
    seconds(row.p95_s), seconds(row.paid_p95_s), row.reward === null ? "–" : row.reward.toPrecision(3),
    ...(tokens ? [count(row.executed_tokens), count(row.saved_tokens)] : []),
  ];
  const link = by === "task" && row.group ? h("a", { class: "mono", href: `#/t/${names(row.group)}` }, name) : h("span", { class: by ? "mono" : "strong" }, name);
  return h("tr", {}, h("td", {}, link), cells.map((text) => h("td", { class: "num" }, text)));
}
