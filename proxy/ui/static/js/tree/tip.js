// The tooltip of the map: the call of a node, its figures, and what its marks mean. A mark under the pointer comes first.

import { h, put } from "../dom.js";
import { count, plural, seconds, short } from "../format.js";
import { marksOf } from "./table.js";

const MEANINGS = {
  snapshot: "A snapshot of this state is kept.",
  pinned: "A snapshot of this state is kept and never evicted.",
  warm: "A warm fork waits here for the next miss.",
  sandbox: "A live sandbox is in this state.",
  rollouts: "Rollouts are at this state.",
  reads: "Calls that changed nothing were made here.",
  merge: "Another history leads to the same state.",
  hidden: "A collapsed subtree. Click to expand it.",
};

/** Fill the tooltip for an item. near: the mark under the pointer, or null. */
export function showTip(tip, view, item, near, at) {
  const { model, map, texts, ways } = view;
  const v = model.items.node[item];
  const fold = model.items.kind[item];
  const label = fold ? { text: `${count(model.items.count[item])} calls in a chain without branches` } : v === 0 ? { text: "start: the task's root state" } : texts.get(v);
  if (!label) texts.want([v]);
  const marks = marksOf(model.bits(item), model.names?.[model.id[v]]);
  const reward = fold ? null : ways.reward(model.id[v]);
  const merges = fold ? 0 : model.mergesAt(v).length;
  put(
    tip,
    near ? h("div", { class: "mark" }, near === "reads" ? `${plural(model.seen[v], "read")}, ${plural(model.seen_hits[v], "hit")} on them. ` : "", MEANINGS[near]) : null,
    h("div", { class: fold ? "" : "mono" }, label?.text ?? "…"),
    h("div", { class: "dim" }, [
      fold ? "" : `n${model.id[v]}`, seconds(model.sum(item, model.seconds)), plural(model.sum(item, model.hits), "hit"), plural(model.sum(item, model.seen), "read"),
      `${seconds(model.sum(item, model.saved))} saved`, `${short(model.below[fold ? model.items.last[item] : v])} below`,
      merges ? plural(merges, "merge") : "", reward === null ? "" : `mean reward ${reward.toPrecision(3)}`,
    ].filter(Boolean).join(" · ")),
    marks.length ? h("div", { class: "chips" }, marks.map(([word, kind]) => h("span", { class: `chip ${kind}` }, word))) : null,
  );
  tip.style.left = `${Math.max(4, Math.min(at[0] + 14, map.width - Math.min(420, tip.offsetWidth) - 8))}px`;
  tip.style.top = `${at[1] + 16 > map.height - 90 ? at[1] - tip.offsetHeight - 10 : at[1] + 16}px`;
}
