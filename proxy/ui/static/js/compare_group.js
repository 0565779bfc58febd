// Any number of rollouts of a task beside one another: what they have in common, where they part, what each was told, and
// how each did. Rollouts that have made the same calls so far have the same colour.

import { get, names } from "./api.js";
import { answer } from "./answer.js";
import { withSteps } from "./compare.js";
import { h, icon, notice, panel, put, showPanels, thead } from "./dom.js";
import { line, percent, plural, seconds } from "./format.js";
import { rewardOf } from "./tree/ways.js";

const MOST = 24;
const CALLS = 400;
const COLOURS = 8;

export async function compareGroup({ main, params, signal }, task) {
  const wanted = (params.get("r") ?? "").split(",").filter(Boolean).map(decode).slice(0, MOST);
  const rollouts = await Promise.all(wanted.map((name) => withSteps(task, name, CALLS, signal)));
  if (rollouts.length < 2) {
    put(main, h("h1", { class: "sr" }, "Rollouts compared"), h("p", { class: "empty" }, "Choose at least two rollouts in ", h("a", { href: `#/t/${names(task)}/rollouts` }, "the list of rollouts"), "."));
    return;
  }
  const branches = branchesOf(rollouts);
  const common = branches.findIndex((row) => new Set(row).size > 1);
  const parting = common < 0 ? branches.length : common;
  const body = h("tbody");
  let folded = parting > 3;
  const opened = new Map();
  const toggle = (turn) => {
    if (!opened.delete(turn)) opened.set(turn, answersRow(task, rollouts, turn, signal));
    draw();
    body.querySelector(`[data-turn="${turn}"] button`)?.focus();
  };
  const draw = () => {
    const rows = [];
    const unfold = h("button", { class: "quiet", on: { click: () => { folded = false; draw(); } } }, `${plural(parting, "call")} in common: show`);
    if (folded) rows.push(h("tr", {}, h("td", { colspan: rollouts.length + 1 }, unfold)));
    branches.forEach((row, turn) => {
      if (folded && turn < parting) return;
      if (turn === parting && common >= 0) rows.push(partRow(task, rollouts, parting));
      rows.push(callRow(rollouts, row, turn, turn < parting, opened.has(turn), () => toggle(turn)));
      if (opened.has(turn)) rows.push(opened.get(turn));
    });
    put(body, rows);
  };
  // The answers at the place where they part are open from the start.
  if (common >= 0) opened.set(parting, answersRow(task, rollouts, parting, signal));
  showPanels(
    main,
    panel(
      {},
      [h("h1", {}, `${plural(rollouts.length, "rollout")} compared`), h("span", { class: "note" }, common < 0 ? "all calls in common" : `${plural(parting, "call")} in common`)],
      h("div", { class: "scroll group-scroll", tabindex: "0" }, h("table", { class: "group-compare" }, thead([["#", "num"], ...rollouts.map((r) => [headOf(task, r)])]), body)),
    ),
  );
  draw();
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Return for each call and rollout the number of its branch: rollouts with the same records so far share one; -1 after its end. */
function branchesOf(rollouts) {
  const rows = [];
  const numbers = new Map();
  let before = rollouts.map((r) => `at ${r.start}`);
  for (let turn = 0; turn < Math.max(...rollouts.map((r) => r.steps.length)); turn++) {
    before = rollouts.map((r, at) => (r.steps[turn] ? `${before[at]} ${r.steps[turn].record}` : before[at]));
    rows.push(rollouts.map((r, at) => {
      if (!r.steps[turn]) return -1;
      // A branch keeps its number while no other leaves it; the first of those that part keeps it.
      const first = before.indexOf(before[at]);
      if (!numbers.has(before[at])) numbers.set(before[at], first);
      return numbers.get(before[at]);
    }));
  }
  return rows;
}

function headOf(task, rollout) {
  const given = rollout.steps.filter((step) => step.outcome === "hit" || step.outcome === "wait");
  const reward = rewardOf(rollout);
  return [
    h("a", { class: "mono", href: `#/t/${names(task)}/r/${names(rollout.rollout)}` }, rollout.rollout),
    h("p", { class: "faint" }, [plural(rollout.calls, "call"), percent(rollout.steps.length ? given.length / rollout.steps.length : 0), `${seconds(given.reduce((sum, step) => sum + step.seconds, 0))} saved`].join(" · ")),
    reward === null ? null : h("p", {}, h("span", { class: "chip" }, `reward ${reward.toPrecision(3).replace(/\.?0+$/, "")}`)),
  ];
}

function partRow(task, rollouts, turn) {
  const at = turn === 0 ? rollouts[0].start : rollouts.find((r) => r.steps[turn - 1])?.steps[turn - 1].node;
  return h("tr", { class: "fork" }, h("td", { colspan: rollouts.length + 1 }, h("span", {}, icon("fork"), " They part at ", at ? h("a", { class: "mono", href: `#/t/${names(task)}?node=${at}` }, at) : "the start")));
}

function callRow(rollouts, row, turn, same, open, toggle) {
  return h(
    "tr", { class: same ? "same" : "", data: { turn } },
    h("td", { class: "num" }, h("button", { class: "quiet turn", "aria-expanded": String(open), title: "Show what each was told", on: { click: toggle } }, String(turn + 1))),
    rollouts.map((r, at) => {
      const step = r.steps[turn];
      if (!step) return h("td", { class: "faint" }, turn === r.steps.length ? "ended" : "");
      return h("td", { class: `branch b${row[at] % COLOURS}`, title: step.call ? line(step.call) : "" }, h("span", { class: `chip o-${step.outcome}` }, step.outcome), " ", h("span", { class: "mono" }, step.call ? line(step.call) : "forgotten"));
    }),
  );
}

/** Return the row below a call with the answer that each rollout was given. The same record is shown once for each. */
function answersRow(task, rollouts, turn, signal) {
  const cells = rollouts.map((r) => {
    const step = r.steps[turn];
    const cell = h("td", { class: "inline-answer" });
    if (!step?.node) return cell;
    const path = `tasks/${names(task)}/nodes/${step.node}`;
    get(`${path}/calls/${step.record}`, { signal }).then(
      (call) => put(cell, answer(call.answer, `${path}/answer?record=${step.record}`, signal)),
      (error) => put(cell, notice(error)),
    );
    return cell;
  });
  return h("tr", { class: "answer-row" }, h("td", {}), cells);
}
