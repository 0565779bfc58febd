// Any number of rollouts of a task beside one another: what they have in common, where they part, what each was told, and
// how each did. They are aligned by state: a row has the next call of each that changed its state, with the calls before
// it that only read. Rollouts in the same state have the same colour.

import { PAGE, get, names } from "./api.js";
import { answer } from "./answer.js";
import { h, icon, notice, panel, put, showPanels, thead } from "./dom.js";
import { line, oneLine, percent, plural, seconds, visible } from "./format.js";
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
  for (const rollout of rollouts) rollout.rows = rowsOf(rollout);
  const found = await get(`tasks/${names(task)}/compare?${rollouts.map((r) => `rollout=${names(r.rollout)}`).join("&")}`, { signal });
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
    const unfold = h("button", { class: "quiet", on: { click: () => { folded = false; draw(); } } }, `${plural(parting, "change")} in common: show`);
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
  const [one, other] = rollouts;
  const states = rollouts.length === 2 && one.root === other.root && one.node !== other.node ? h("a", { class: "button", href: `#/t/${names(task)}/diff/${one.node}/${other.node}` }, "Compare states") : null;
  showPanels(
    main,
    panel(
      {},
      [h("h1", {}, `${plural(rollouts.length, "rollout")} compared`), h("span", { class: "note" }, common < 0 ? "all changes in common" : `${plural(parting, "change")} in common`), ends(task, rollouts), h("span", { class: "gap" }), states],
      h("div", { class: "scroll group-scroll", tabindex: "0" }, h("table", { class: "group-compare" }, thead([["#", "num"], ...rollouts.map((r) => [headOf(task, r)])]), body)),
    ),
    winners(task, found),
  );
  draw();
}

/** Return a rollout with a list of its first calls. */
async function withSteps(task, name, most, signal) {
  const path = `tasks/${names(task)}/rollouts/${names(name)}?limit=${Math.min(PAGE, most)}`;
  let shown = await get(path, { signal });
  const steps = [...shown.steps.items];
  while (shown.steps.next && steps.length < most) {
    shown = await get(`${path}&cursor=${shown.steps.next}`, { signal });
    steps.push(...shown.steps.items);
  }
  return { ...shown, steps };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Return the calls of a rollout as rows: a call that changed the state, or null after the last, and the reads before it. */
function rowsOf({ steps }) {
  const rows = [];
  let reads = [];
  for (const step of steps) {
    if (step.effect.length === 1 && step.effect[0] === "none") reads.push(step);
    else reads = (rows.push({ change: step, reads }), []);
  }
  return reads.length ? [...rows, { change: null, reads }] : rows;
}

/** Return for each row and rollout the number of its state: rollouts in one state share the number of the first; -1 after its end. */
function branchesOf(rollouts) {
  const rows = [];
  const numbers = new Map();
  let at = rollouts.map((r) => r.start);
  for (let row = 0; row < Math.max(...rollouts.map((r) => r.rows.length)); row++) {
    at = rollouts.map((r, i) => r.rows[row]?.change?.node ?? at[i]);
    rows.push(rollouts.map((r, i) => {
      if (!r.rows[row]) return -1;
      if (!numbers.has(at[i])) numbers.set(at[i], at.indexOf(at[i]));
      return numbers.get(at[i]);
    }));
  }
  return rows;
}

/** Say which rollouts end in the same state. */
function ends(task, rollouts) {
  const by = Map.groupBy(rollouts, (r) => r.node);
  const shared = [...by].filter(([, list]) => list.length > 1);
  return h("span", { class: "note" }, shared.map(([node, list], i) => [i ? "; " : "", `${list.length === rollouts.length ? "all" : list.map((r) => r.rollout).join(", ")} end at `, h("a", { class: "mono", href: `#/t/${names(task)}?node=${node}` }, node)]));
}

/** Show what only rollouts with a high reward did; nothing if rewards do not tell the rollouts apart. */
function winners(task, { above, high, winning_states: states, winning_calls: calls }) {
  if (above === null) return null;
  const row = ({ node, call, rollouts }) => h("li", {}, node ? h("a", { class: "mono", href: `#/t/${names(task)}?node=${node}` }, node) : h("span", { class: "mono" }, visible(oneLine(call ?? "unreadable"))), h("span", { class: "faint" }, rollouts.join(", ")));
  const part = (text, list) => [h("h3", {}, text), h("ul", { class: "list" }, list.length ? list.map(row) : h("li", { class: "faint" }, "none"))];
  return panel({}, [h("h2", {}, "What only winners did"), h("span", { class: "note" }, `${plural(high.length, "rollout")} with a reward above ${above.toPrecision(3)}`)], h("div", { class: "body" }, part("States", states), part("Calls", calls)));
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

function partRow(task, rollouts, row) {
  const starts = [...new Set(rollouts.map((r) => r.start))];
  const link = (node) => h("a", { class: "mono", href: `#/t/${names(task)}?node=${node}` }, node);
  const at = row === 0 ? starts[0] : rollouts.find((r) => r.rows[row - 1])?.rows[row - 1].change?.node;
  const text = starts.length > 1 ? ["They began at different nodes, ", starts.map((node, i) => [i ? " and " : "", link(node)])] : ["They part at ", at ? link(at) : "the start"];
  return h("tr", { class: "fork" }, h("td", { colspan: rollouts.length + 1 }, h("span", {}, icon("fork"), " ", text)));
}

function callRow(rollouts, branch, row, same, open, toggle) {
  const text = (step) => (step.call ? line(step.call) : "forgotten");
  return h(
    "tr", { class: same ? "same" : "", data: { turn: row } },
    h("td", { class: "num" }, h("button", { class: "quiet turn", "aria-expanded": String(open), title: "Show what each was told", on: { click: toggle } }, String(row + 1))),
    rollouts.map((r, at) => {
      if (!r.rows[row]) return h("td", { class: "faint" }, row === r.rows.length ? "ended" : "");
      const { change, reads } = r.rows[row];
      const read = reads.map((step) => h("p", { class: "faint mono", title: text(step) }, text(step)));
      return h("td", { class: `branch b${branch[at] % COLOURS}`, title: change ? text(change) : "" }, read, change ? [h("span", { class: `chip o-${change.outcome}` }, change.outcome), " ", h("span", { class: "mono" }, text(change))] : null);
    }),
  );
}

/** Return the row below a call with the answer that each rollout was given: to the change, or else to its last read. */
function answersRow(task, rollouts, row, signal) {
  const cells = rollouts.map((r) => {
    const step = r.rows[row]?.change ?? r.rows[row]?.reads.at(-1);
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
