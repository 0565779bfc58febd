// Two rollouts side by side: their common calls, where they diverge, and the calls after that.

import { PAGE, get, names } from "./api.js";
import { grid, h, icon, panel, showPanels } from "./dom.js";
import { count, line, plural, seconds } from "./format.js";

const MOST = 10_000;
const SHOWN = 1500;

export async function compareView({ main, signal }, task, a, b) {
  const [one, other] = await Promise.all([a, b].map((name) => withSteps(task, name, MOST, signal)));
  const fork = forkPoint(one.steps, other.steps, one.start === other.start);
  const link = (rollout) => h("a", { class: "mono", href: `#/t/${names(task)}/r/${names(rollout.rollout)}` }, rollout.rollout);
  const node = fork === 0 ? one.start : one.steps[fork - 1].node;
  const rest = [one, other].map((rollout) => Math.max(0, rollout.steps.length - fork));
  const parts = rest.some(Boolean);
  const states = parts && rest.every(Boolean) && one.root === other.root ? h("a", { class: "button", href: `#/t/${names(task)}/diff/${one.node}/${other.node}` }, "Compare states") : null;
  showPanels(
    main,
    panel(
      {},
      [h("h1", {}, link(one), " and ", link(other)), h("span", { class: "note" }, `${plural(fork, "call")} in common`), h("span", { class: "gap" }), states],
      grid(
        { class: "compare" },
        h("thead", {}, h("tr", {}, h("th", { class: "num", scope: "col" }, "#"), h("th", { scope: "col" }, one.rollout), h("th", { scope: "col" }, other.rollout))),
        h("tbody", {}, rows(one.steps, other.steps, fork, () => forkRow(task, node, one, other, rest))),
      ),
    ),
  );
}

/** Return a rollout with a list of its first calls. */
export async function withSteps(task, name, most, signal) {
  const path = `tasks/${names(task)}/rollouts/${names(name)}?limit=${Math.min(PAGE, most)}`;
  let shown = await get(path, { signal });
  const steps = [...shown.steps.items];
  while (shown.steps.next && steps.length < most) {
    shown = await get(`${path}&cursor=${shown.steps.next}`, { signal });
    steps.push(...shown.steps.items);
  }
  return { ...shown, steps };
}

/** Return the number of calls that two rollouts have in common from the beginning: the same records. */
function forkPoint(one, other, together = true) {
  let shared = 0;
  if (together) while (shared < one.length && shared < other.length && one[shared].record === other[shared].record) shared++;
  return shared;
}

function forkRow(task, node, one, other, rest) {
  if (one.start !== other.start) return h("tr", { class: "fork" }, h("td", { colspan: 3 }, h("span", {}, icon("fork"), " They began at different nodes, ", nodeLink(task, one.start), " and ", nodeLink(task, other.start))));
  const text = rest.every(Boolean) ? "They diverge at " : rest.some(Boolean) ? `${rest[0] ? other.rollout : one.rollout} ends at ` : "Both are at ";
  return h("tr", { class: "fork" }, h("td", { colspan: 3 }, h("span", {}, icon("fork"), " ", text, nodeLink(task, node))));
}

const nodeLink = (task, node) => h("a", { class: "mono", href: `#/t/${names(task)}?node=${node}` }, node);

function rows(one, other, fork, mark) {
  const made = [];
  const length = Math.min(SHOWN, Math.max(one.length, other.length));
  for (let i = 0; i <= length; i++) {
    if (i === fork) made.push(mark());
    if (i < length) made.push(h("tr", { class: i < fork ? "same" : "" }, h("td", { class: "num faint" }, count(i + 1)), side(one[i], ""), side(other[i], "mid")));
  }
  return made;
}

function side(step, kind) {
  if (!step) return h("td", { class: kind });
  const call = step.call ? line(step.call) : h("span", { class: "null" }, "forgotten");
  return h(
    "td", { class: kind },
    h("div", { class: "step" }, h("span", { class: `chip o-${step.outcome}` }, step.outcome), h("span", { class: "mono", title: line(step.call) }, call), h("span", { class: "faint" }, seconds(step.seconds))),
  );
}
