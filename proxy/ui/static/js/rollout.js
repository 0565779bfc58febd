// The list of a task's rollouts, and a single rollout with its calls and the time that each took or saved.

import { get, names } from "./api.js";
import { h, put, say } from "./dom.js";
import { ago, count, line, oneLine, percent, plural, seconds } from "./format.js";
import { watch } from "./live.js";
import { treesOf } from "./trees.js";

const PAGE = 500;
const WORDS = { "saved o-hit": "saved", "o-wait": "waited", "o-replay": "restored and replayed", "o-miss": "ran", "o-bypass": "ran" };

export async function rolloutList({ main, params, signal, setParams }, task) {
  const body = h("tbody");
  const note = h("span", { class: "note" });
  const search = h("input", { type: "search", placeholder: "Name, state, label=value", "aria-label": "Filter rollouts", value: params.get("q") ?? "", on: { input: () => { setParams({ q: search.value }); draw(); } } });
  const compare = h("button", { disabled: true, on: { click: () => (location.hash = `#/t/${names(task)}/r/${names(picked[0])}/vs/${names(picked[1])}`) } }, "Compare");
  const environment = h("th", { scope: "col", hidden: true }, "Environment");
  let found = [];
  let titles = new Map();
  let picked = [];
  const draw = () => {
    // Each word of the filter is part of the name, of the state, or of a label such as `run=r7`.
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = found.filter((r) => { const text = `${r.rollout} ${r.state} ${labelText(r)}`.toLowerCase(); return words.every((word) => text.includes(word)); });
    put(body, [...chosen].reverse().slice(0, 1000).map((rollout) => row(rollout)));
    say(note, plural(found.length, "rollout"));
  };
  const pick = (name, on) => {
    picked = on ? [...picked, name].slice(-2) : picked.filter((other) => other !== name);
    compare.disabled = picked.length !== 2;
    draw();
  };
  const row = (r) =>
    h(
      "tr", { data: { rollout: r.rollout } },
      h("td", {}, h("input", { type: "checkbox", checked: picked.includes(r.rollout), "aria-label": `Compare ${r.rollout}`, on: { change: (event) => pick(r.rollout, event.target.checked) } })),
      h("td", {}, h("a", { class: "mono", href: `#/t/${names(task)}/r/${names(r.rollout)}` }, r.rollout)),
      h("td", {}, h("span", { class: r.state === "running" ? "chip live" : "chip" }, r.state)),
      h("td", { class: "cut", title: labelText(r) }, labelText(r)),
      h("td", { class: "num" }, count(r.calls)),
      environment.hidden ? null : h("td", { class: "cut" }, h("a", { href: `#/t/${names(task)}?root=${r.root}` }, titles.get(r.root) ?? r.root)),
      h("td", {}, h("a", { class: "mono", href: `#/t/${names(task)}?node=${r.start}` }, r.start)),
      h("td", {}, h("a", { class: "mono", href: `#/t/${names(task)}?node=${r.node}` }, r.node)),
      h("td", { class: "num" }, ago(r.created_at)),
    );
  const look = async () => {
    const [listed, trees] = await Promise.all([get(`tasks/${names(task)}/rollouts`, { signal }), treesOf(task, signal)]);
    found = listed;
    titles = new Map(trees.map((tree) => [tree.root, oneLine(tree.title)]));
    environment.hidden = trees.length < 2;
    // Do not replace the rows while one of them has the focus.
    if (!body.contains(document.activeElement)) draw();
  };
  await look();
  put(
    main,
    h("div", { class: "wrap" }, h("section", { class: "panel" }, h("header", {}, h("h1", {}, "Rollouts"), note, h("span", { class: "gap" }), search, compare), h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, headOf(["", ""], ["Rollout", ""], ["State", ""], ["Labels", ""], ["Calls", "num"]), environment, headOf(["Began at", ""], ["Stands at", ""], ["Begun", "num"]))), body)))),
  );
  watch(look, signal, 2000);
}

const labelText = (rollout) => Object.entries(rollout.labels).map(([name, value]) => `${name}=${value}`).join(" ");

const headOf = (...columns) => columns.map(([text, kind]) => h("th", { scope: "col", class: kind }, text || h("span", { class: "sr" }, "Compare")));

export async function rolloutView({ main, params, signal }, task, name) {
  const path = `tasks/${names(task)}/rollouts/${names(name)}`;
  let [shown, timings] = await Promise.all([get(`${path}?limit=${PAGE}`, { signal }), get(`${path}/timings`, { signal })]);
  const steps = [...shown.steps];
  const head = h("section", { class: "panel" });
  const body = h("tbody");
  const axis = h("div", { class: "axis" });
  const more = h("button", { on: { click: async () => { await load(); draw(); } } }, "Show more calls");
  const load = async () => {
    let next = null;
    [next, timings] = await Promise.all([get(`${path}?offset=${steps.length}&limit=${PAGE}`, { signal }), get(`${path}/timings`, { signal })]);
    steps.push(...next.steps);
    shown = next;
  };
  const draw = () => {
    drawHead(head, task, shown, steps);
    const { rows, span } = waterfall(steps, timings);
    put(body, rows.map((row, i) => stepRow(task, steps[i], row, span, Number(params.get("turn")) === steps[i].turn && params.has("turn"))));
    put(axis, [0, 0.25, 0.5, 0.75, 1].map((share) => h("span", { style: { left: `${share * 100}%` } }, seconds(span * share))));
    more.hidden = steps.length >= shown.calls;
  };
  put(
    main,
    h(
      "div",
      { class: "wrap" },
      head,
      h(
        "section",
        { class: "panel", "aria-label": "Calls" },
        h("header", {}, h("h2", {}, "Calls"), h("span", { class: "gap" }), h("div", { class: "legend" }, [["var(--hit)", "hit: saved time"], ["var(--wait)", "wait: shared execution"], ["var(--miss)", "miss: executed"], ["var(--replay)", "restore, replay"], ["var(--bypass)", "bypass"]].map(([colour, text]) => h("span", { style: { "--c": colour } }, text)))),
        h("div", { class: "scroll" }, h("table", { class: "waterfall" }, h("thead", {}, h("tr", {}, h("th", { class: "num", scope: "col" }, "#"), h("th", { scope: "col" }, "Answered"), h("th", { scope: "col" }, "Call"), h("th", { scope: "col" }, "Node"), h("th", { class: "num", scope: "col" }, "Seconds"), h("th", { scope: "col", class: "bars" }, axis))), body)),
        h("div", { class: "body" }, more),
      ),
    ),
  );
  draw();
  body.querySelector("tr.on")?.scrollIntoView({ block: "center" });
  watch(async () => {
    if (shown.finished || steps.length % PAGE === 0 && steps.length && steps.length < shown.calls) return;
    const before = steps.length;
    await load();
    if (steps.length !== before || shown.finished) draw();
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
  ];
  const other = h("input", { type: "text", placeholder: "another rollout", "aria-label": "Compare with", size: "16" });
  const go = (event) => {
    event.preventDefault();
    if (other.value.trim()) location.hash = `#/t/${names(task)}/r/${names(shown.rollout)}/vs/${names(other.value.trim())}`;
  };
  if (head.contains(document.activeElement)) return;
  put(
    head,
    h("header", {}, h("h1", { class: "mono" }, shown.rollout), h("span", { class: shown.finished ? "chip" : "chip live" }, shown.finished ? "finished" : "running"), h("span", { class: "note" }, "at ", h("a", { class: "mono", href: `#/t/${names(task)}?node=${shown.node}` }, shown.node), `, began ${ago(shown.created_at)}`), h("span", { class: "gap" }), h("form", { class: "split", on: { submit: go } }, other, h("button", {}, "Compare"))),
    h("dl", { class: "figures" }, figures.map(([name, text]) => h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, h("div", { class: "value" }, text))))),
  );
}

/** Return the start and the parts of each call's time if all calls ran one after another. */
export function waterfall(steps, timings) {
  let at = 0;
  const rows = steps.map((step) => {
    const parts = partsOf(step, timings[step.turn]);
    const row = { from: at, parts };
    at += parts.reduce((sum, [, length]) => sum + length, 0);
    return row;
  });
  return { rows, span: at || 1 };
}

function partsOf(step, timing) {
  if (step.outcome === "hit") return [["saved o-hit", step.seconds]];
  if (step.outcome === "wait") return [["o-wait", timing?.wait_s ?? step.seconds]];
  const kind = step.outcome === "bypass" ? "o-bypass" : "o-miss";
  return timing ? [["o-wait", timing.wait_s], ["o-replay", timing.restore_s + timing.replay_s], [kind, timing.tool_s]] : [[kind, step.seconds]];
}

function stepRow(task, step, { from, parts }, span, on) {
  let at = from;
  const bars = parts.filter(([, length]) => length > 0).map(([kind, length]) => {
    const bar = h("i", { class: kind, style: { left: `${(at / span) * 100}%`, width: `${(length / span) * 100}%` } });
    at += length;
    return bar;
  });
  return h(
    "tr", { class: on ? "on" : "", data: { turn: step.turn, outcome: step.outcome } },
    h("td", { class: "num faint" }, step.turn + 1),
    h("td", {}, h("span", { class: `chip o-${step.outcome}` }, step.outcome)),
    h("td", { class: "cut mono", title: line(step.call) }, step.call ? line(step.call) : h("span", { class: "null" }, "forgotten")),
    h("td", {}, step.node ? h("a", { class: "mono", href: `#/t/${names(task)}?node=${step.node}` }, step.node) : "–"),
    h("td", { class: "num" }, seconds(step.seconds)),
    h("td", { class: "bars", title: parts.map(([kind, length]) => `${WORDS[kind]} ${seconds(length)}`).join(", ") }, h("div", { class: "bars-track", "aria-hidden": "true" }, bars)),
  );
}
