// A rollout: its calls in order, with the time that each took or saved, and the answer that it was given.

import { get, names } from "./api.js";
import { answer } from "./answer.js";
import { grid, h, notice, panel, put, showPanels, thead } from "./dom.js";
import { ago, count, line, percent, seconds } from "./format.js";
import { flash, watch } from "./live.js";
import { command } from "./node.js";
import { WORDS, asIfExecuted, realTime } from "./waterfall.js";

const PAGE = 500;
const LEGEND = [["o-hit", "hit: saved time"], ["o-wait", "wait"], ["o-restore", "restore"], ["o-replay", "replay"], ["o-miss", "tool"], ["o-bypass", "bypass"], ["o-think", "the agent thinks"]];

export async function rolloutView({ main, params, signal, setParams }, task, name) {
  const path = `tasks/${names(task)}/rollouts/${names(name)}`;
  let [shown, timings] = await Promise.all([get(`${path}?limit=${PAGE}`, { signal }), get(`${path}/timings`, { signal })]);
  const steps = [...shown.steps.items];
  // The cursor of the last page. It is read again for the calls that a running rollout has made since.
  let cursor = "";
  const head = h("section", { class: "panel" });
  const body = h("tbody");
  const axis = h("div", { class: "axis" });
  const more = h("button", { on: { click: async () => { await load(); draw(); } } }, "Show more calls");
  const load = async () => {
    cursor = shown.steps.next ?? cursor;
    [shown, timings] = await Promise.all([get(`${path}?limit=${PAGE}${cursor && `&cursor=${cursor}`}`, { signal }), get(`${path}/timings`, { signal })]);
    steps.push(...shown.steps.items.filter((step) => step.turn >= steps.length));
  };
  const opened = new Map();
  let real = params.get("time") === "real";
  const modes = ["As if executed", "Real time"].map((text, i) => h("button", { on: { click: () => { real = i === 1; setParams({ time: real ? "real" : null }); draw(); } } }, text));
  const draw = () => {
    drawHead(head, task, shown, steps);
    const timed = realTime(steps, timings, shown.created_at);
    modes[1].disabled = !timed;
    modes[1].title = timed ? "" : "The times of answers are known for calls since the proxy started";
    modes.forEach((mode, i) => mode.setAttribute("aria-pressed", String((real && Boolean(timed)) === (i === 1))));
    const { rows, span } = (real && timed) || asIfExecuted(steps, timings);
    put(body, rows.map((row, i) => {
      const step = steps[i];
      const on = Number(params.get("turn")) === step.turn && params.has("turn");
      return [stepRow(task, step, row, span, on, opened.has(step.turn), () => toggle(step)), opened.get(step.turn)];
    }));
    put(axis, [0, 0.25, 0.5, 0.75, 1].map((share) => h("span", { style: { left: `${share * 100}%` } }, seconds(span * share))));
    more.hidden = steps.length >= shown.calls;
  };
  const toggle = (step) => {
    if (!opened.delete(step.turn)) opened.set(step.turn, answerRow(task, path, step, signal));
    draw();
    body.querySelector(`[data-turn="${step.turn}"] button`)?.focus();
  };
  showPanels(
    main,
    head,
    panel(
      { "aria-label": "Calls" },
      [h("h2", {}, "Calls"), h("div", { class: "group", role: "group", "aria-label": "Time" }, modes), h("span", { class: "gap" }), h("div", { class: "legend" }, LEGEND.map(([kind, text]) => h("span", { class: kind }, text)))],
      grid({ class: "waterfall" }, thead([["#", "num"], ["Answered"], ["Call"], ["Node"], ["Seconds", "num"], [axis, "bars"]]), body),
      h("div", { class: "body" }, more),
    ),
  );
  draw();
  body.querySelector("tr.on")?.scrollIntoView({ block: "center" });
  watch(async () => {
    if (shown.finished || shown.steps.next) return;
    const before = steps.length;
    await load();
    if (steps.length === before && !shown.finished) return;
    draw();
    for (const step of steps.slice(before)) flash(body.querySelector(`[data-turn="${step.turn}"]`));
  }, signal);
}

function drawHead(head, task, shown, steps) {
  const of = (...kinds) => steps.filter((step) => kinds.includes(step.outcome));
  const sum = (list) => list.reduce((total, step) => total + step.seconds, 0);
  const given = of("hit", "wait");
  const figures = [
    ["Calls", count(shown.calls)],
    ["Hit rate", percent(steps.length ? given.length / steps.length : 0)],
    ["Saved", seconds(sum(given))],
    ["Executed", seconds(sum(of("miss", "bypass")))],
    ...Object.entries(shown.marks).map(([mark, calls]) => [`Marked ${mark}`, count(calls)]),
  ];
  const other = h("input", { type: "text", placeholder: "another rollout", "aria-label": "Compare with", size: "16" });
  const go = (event) => {
    event.preventDefault();
    if (other.value.trim()) location.hash = `#/t/${names(task)}/compare?r=${names(shown.rollout)},${names(other.value.trim())}`;
  };
  if (head.contains(document.activeElement)) return;
  put(
    head,
    h("header", {}, h("h1", { class: "mono" }, shown.rollout), h("span", { class: shown.state === "running" ? "chip live" : "chip" }, shown.state), h("span", { class: "note" }, "at ", h("a", { class: "mono", href: `#/t/${names(task)}?node=${shown.node}` }, shown.node), `, began ${ago(shown.created_at)}`), h("span", { class: "gap" }), h("form", { class: "split", on: { submit: go } }, other, h("button", {}, "Compare"))),
    h("dl", { class: "figures" }, figures.map(([name, text]) => h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, h("div", { class: "value" }, text))))),
  );
}

/** Return the row below a call that shows its whole text and its answer. */
function answerRow(task, rollout, step, signal) {
  const stage = h("td", { colspan: 6, class: "inline-answer" }, h("p", { class: "dim" }, "…"));
  const path = `tasks/${names(task)}/nodes/${step.node}`;
  const reason = h("div", { class: "dim" });
  if (step.outcome === "miss" || step.outcome === "bypass") {
    get(`${rollout}/why?turn=${step.turn}`, { signal }).then(({ items: [why] }) => put(reason, why && whyNot(task, why)), (error) => put(reason, notice(error)));
  }
  if (!step.node) put(stage, h("p", { class: "dim" }, "The record of this call was forgotten."));
  else {
    get(`${path}/calls/${step.record}`, { signal }).then(
      (call) => put(stage, h("div", { class: "stack" }, command(call), reason, answer(call.answer, `${path}/answer?record=${step.record}`, signal))),
      (error) => put(stage, notice(error)),
    );
  }
  return h("tr", { class: "answer-row" }, stage);
}

/** Return why a call was no hit: what the reason means, what helps, and the nearest state that knew the call. */
function whyNot(task, { reason, meaning, remedy, node, nearest }) {
  const to = (text, where) => h("a", { href: `#/t/${names(task)}${where}` }, text);
  return [
    h("p", {}, h("span", { class: "chip" }, reason), ` ${meaning} ${remedy}`),
    nearest && h("p", {}, "It was known at ", to(nearest.node, `?node=${nearest.node}`), `: after ${nearest.last_common}, ${[nearest.here && `here ${nearest.here}`, nearest.there && `there ${nearest.there}`].filter(Boolean).join(", ")}. `, to("What differs", `/diff/${nearest.node}/${node}`)),
  ];
}

function stepRow(task, step, { from, parts, hit }, span, on, open, toggle) {
  let at = from;
  const bars = parts.filter(([, length]) => length > 0).map(([kind, length]) => {
    const bar = h("i", { class: kind, style: { left: `${(at / span) * 100}%`, width: `${(length / span) * 100}%` } });
    at += length;
    return bar;
  });
  // A hit in real time takes microseconds: a mark.
  if (hit) bars.push(h("i", { class: "o-hit", style: { left: `${(at / span) * 100}%` } }));
  const text = step.call ? line(step.call) : h("span", { class: "null" }, "forgotten");
  return h(
    "tr", { class: on ? "on" : "", data: { turn: step.turn, outcome: step.outcome } },
    h("td", { class: "num faint" }, step.turn + 1),
    h("td", {}, h("span", { class: `chip o-${step.outcome}` }, step.outcome), step.marks.map((mark) => [" ", h("span", { class: "chip bad" }, mark)])),
    h("td", { class: "cut" }, h("button", { class: "call mono", "aria-expanded": String(open), title: step.call ? line(step.call) : "", on: { click: toggle } }, text)),
    h("td", {}, step.node ? h("a", { class: "mono", href: `#/t/${names(task)}?node=${step.node}` }, step.node) : "–"),
    h("td", { class: "num" }, seconds(step.seconds)),
    h("td", { class: "bars", title: [...parts, ...(hit ? [["saved o-hit", step.seconds]] : [])].filter(([, length]) => length > 0).map(([kind, length]) => `${WORDS[kind]} ${seconds(length)}`).join(", ") }, h("div", { class: "bars-track", "aria-hidden": "true" }, bars)),
  );
}
