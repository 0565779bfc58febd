// The rollouts of a tree as lanes, grouped by run, step and group: a lane has a cell for each call, coloured by how the
// call was answered. A line shows where the rollouts of a group part.

import { names } from "../api.js";
import { h, put } from "../dom.js";
import { percent, plural } from "../format.js";
import { rewardOf, shared } from "./ways.js";

const LANES = 300;
const CELLS = 120;
const KINDS = { h: ["hit", "o-hit"], m: ["miss", "o-miss"], w: ["wait", "o-wait"], b: ["bypass", "o-bypass"] };

/** Show lanes in an element. on: `light(way)` for the way under the pointer or null, `go(node)`. */
export function lanes(element, task, ways, on) {
  let room = LANES;
  const groups = ways.groups.map((group) => {
    const shown = group.ways.slice(0, Math.max(0, room));
    room -= shown.length;
    return shown.length ? groupPart(task, group, shown, on) : null;
  });
  put(
    element,
    h("div", { class: "node-head" }, h("div", { class: "title" }, h("h2", { class: "words" }, "Rollouts"), h("span", { class: "dim" }, `${plural(ways.list.length, "newest rollout")}${ways.truncated || room < 0 ? ", older ones are left out" : ""}`)),
      h("div", { class: "legend" }, Object.values(KINDS).map(([word, kind]) => h("span", { class: kind }, word)), h("span", { class: "part-mark" }, "the group parts"))),
    ways.list.length ? groups : h("p", { class: "empty" }, "No rollout has begun in this tree."),
  );
}

function groupPart(task, group, shown, on) {
  const rewards = group.ways.map(rewardOf).filter((reward) => reward !== null);
  const calls = group.ways.reduce((sum, way) => sum + way.outcomes.length, 0);
  const hits = group.ways.reduce((sum, way) => sum + [...way.outcomes].filter((kind) => kind === "h" || kind === "w").length, 0);
  const common = group.ways.length > 1 ? shared(group.ways) : new Map();
  const title = group.labels.length ? group.labels.map(([name, value]) => `${name} ${value}`).join(" · ") : "without labels";
  const facts = [plural(group.ways.length, "rollout"), `${percent(calls ? hits / calls : 0)} hits`, rewards.length ? `reward ${mean(rewards).toPrecision(3)}` : ""];
  const every = `#/t/${names(task)}/compare?r=${group.ways.slice(0, 24).map((way) => names(way.rollout)).join(",")}`;
  return h(
    "section",
    { class: "part lanes" },
    h("h3", {}, title),
    h("p", { class: "faint" }, facts.filter(Boolean).join(" · "), group.ways.length > 1 ? [" · ", h("a", { href: every }, "compare")] : null),
    h("ul", { class: "list" }, shown.map((way) => lane(task, way, common.get(way) ?? -1, on))),
  );
}

function lane(task, way, common, on) {
  const reward = rewardOf(way);
  const cells = [...way.outcomes.slice(0, CELLS)].map((kind, at) => h("i", { class: `${KINDS[kind][1]}${at === common ? " parts" : ""}`, title: `call ${at + 1}: ${KINDS[kind][0]}` }));
  const light = (lit) => ({ pointerenter: () => on.light(lit ? way : null) });
  return h(
    "li",
    { class: "lane", data: { rollout: way.rollout }, on: { ...light(true), pointerleave: () => on.light(null), focusin: () => on.light(way), focusout: () => on.light(null) } },
    h("a", { class: "mono", href: `#/t/${names(way.task)}/r/${names(way.rollout)}`, title: way.rollout }, way.rollout),
    h("span", { class: "cells", role: "img", "aria-label": `${plural(way.outcomes.length, "call")}` }, cells, way.outcomes.length > CELLS ? "…" : null),
    h("span", { class: "num faint" }, reward === null ? "" : reward.toPrecision(2)),
  );
}

const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;
