// A node: its call and answer, what changed, past rollouts, observations, and why it has a snapshot or not.

import { download, get, items, names } from "./api.js";
import { actions } from "./actions.js";
import { answer } from "./answer.js";
import { changes } from "./diff.js";
import { h, notice, put } from "./dom.js";
import { bytes, count, moment, oneLine, plural, seconds, visible } from "./format.js";

const READS = 200;
// As many as the proxy keeps.
const OUTSIDE = 1000;
// Walking along nodes with the keys must not fork two sandboxes at each.
const SETTLED_MS = 400;

/** Show a node as a whole page. */
export async function nodeView({ main, signal }, task, node) {
  const panel = h("div", { class: "panel" });
  put(main, h("div", { class: "wrap" }, panel));
  await nodePanel(panel, task, node, signal, { gone: (parent) => (location.hash = `#/t/${names(task)}?root=${parent}`), whole: true });
}

/** Show a node in an element. on: `gone(parent)` after it was forgotten, `go(node)` to show another node, `own` for the reads of this task alone. */
export async function nodePanel(element, task, node, signal, on) {
  const path = `tasks/${names(task)}`;
  const show = async () => {
    const [detail, { spec }, titles] = await Promise.all([get(`${path}/nodes/${node}`, { signal }), get(path, { signal }), items(`${path}/titles?nodes=${node.slice(1)}&root=${node}`, { signal })]);
    const record = titles[0]?.record;
    const call = record === undefined ? null : await get(`${path}/nodes/${node}/calls/${record}`, { signal });
    const reads = detail.observations.length ? await items(`${path}/nodes/${node}/observations${on.own ? "?own=true" : ""}`, { signal, most: READS }) : [];
    if (signal.aborted) return;
    put(
      element,
      head(task, detail, call, { ...on, again: show, driver: spec.driver }, signal),
      call ? answerPart(task, node, call, signal) : null,
      detail.parent ? changesPart(task, detail, signal) : null,
      reads.length ? readsPart(task, node, reads, on.own ? reads.length : detail.observations.length, signal) : null,
      statePart(task, detail),
      filesPart(task, node, signal),
      outsidePart(task, node, signal),
      passedPart(task, detail, call),
    );
  };
  try {
    await show();
  } catch (error) {
    if (!signal.aborted) put(element, h("section", { class: "part" }, notice(error)));
  }
}

function head(task, detail, call, on, signal) {
  const title = on.whole ? "h1" : "h2";
  const chips = [
    ...detail.effect.filter((effect) => effect !== "none").map((effect) => h("span", { class: "chip" }, `changed ${effect}`)),
    detail.exit_code ? h("span", { class: "chip bad" }, `exit code ${detail.exit_code}`) : null,
    ...detail.flags.map((flag) => h("span", { class: flag === "diverged" ? "chip diverged" : "chip" }, flag)),
    detail.snapshot ? h("span", { class: "chip" }, "snapshot") : null,
    ...detail.rollouts.slice(0, 6).map((name) => h("a", { class: "chip live", href: `#/t/${names(task)}/r/${names(name)}` }, `▸ ${name}`)),
    detail.rollouts.length > 6 ? h("span", { class: "chip live" }, `and ${detail.rollouts.length - 6} more`) : null,
  ];
  return h(
    "div",
    { class: "node-head" },
    h(
      "div",
      { class: "title" },
      h(title, {}, detail.id),
      h("span", { class: "dim" }, call ? [seconds(detail.seconds), plural(detail.hits, "hit"), `${seconds(detail.hits * detail.seconds)} saved`].join(" · ") : "the task's root state"),
    ),
    call ? command(call) : null,
    h("div", { class: "chips" }, chips),
    detail.diverged ? h("div", { class: "notice" }, h("strong", {}, "Diverged"), h("p", {}, detail.diverged)) : null,
    h(
      "p",
      { class: "dim" },
      detail.parent ? ["from ", nodeLink(task, detail.parent, on), " · "] : "",
      detail.leads_to.length ? ["leads to ", detail.leads_to.slice(0, 12).map((to, i) => [i ? ", " : "", nodeLink(task, to, on)]), detail.leads_to.length > 12 ? ` and ${detail.leads_to.length - 12} more` : ""] : detail.observations.length ? "no call has changed this state yet" : "no call was made here yet",
    ),
    actions(task, detail, call, on, signal),
  );
}

const nodeLink = (task, node, on) => h("a", { class: "mono", href: on.whole ? `#/t/${names(task)}/n/${node}` : `#/t/${names(task)}?node=${node}`, on: on.go ? { click: (event) => { event.preventDefault(); on.go(node); } } : {} }, node);

/** Return the call: a command or statement as it was sent, other arguments as JSON. */
export function command({ call, upload_bytes: upload, resources }) {
  const { command, sql, ...others } = call.arguments;
  const main = typeof command === "string" ? command : typeof sql === "string" ? sql : null;
  const rest = main === null ? call.arguments : others;
  const extra = Object.entries(rest).filter(([, value]) => value !== null);
  return h(
    "div",
    { class: "stack" },
    main === null ? null : h("pre", { class: "command", tabindex: "0" }, lines(main)),
    h("p", { class: "faint mono" }, [`${call.endpoint} ${call.tool}`, ...(main === null ? [] : extra.map(([name, value]) => `${name}=${visible(JSON.stringify(value)).slice(0, 120)}`)), upload ? `${bytes(upload)} uploaded` : ""].filter(Boolean).join("  ")),
    main === null ? h("pre", { class: "command", tabindex: "0" }, lines(JSON.stringify(rest, null, 2))) : null,
    resources ? h("p", { class: "faint" }, used(resources)) : null,
  );
}

/** Return what a call used of the machine; what is not known is left out. */
function used({ cpu_s: cpu, peak_bytes: peak, read_bytes: read, written_bytes: written }) {
  const parts = [
    cpu !== null && `${seconds(cpu)} of CPU`, peak !== null && `${bytes(peak)} of memory at most`,
    read !== null && `${bytes(read)} read from disk`, written !== null && `${bytes(written)} written to disk`,
  ];
  return `Used ${parts.filter(Boolean).join(" · ")}`;
}

/** Return text of several lines, with control characters made visible. */
const lines = (text) => text.slice(0, 100_000).split("\n").map((row, i) => (i ? `\n${visible(row)}` : visible(row))).join("");

function answerPart(task, node, call, signal) {
  return h("section", { class: "part" }, h("h2", {}, "Answer"), answer(call.answer, `tasks/${names(task)}/nodes/${node}/answer?record=${call.record}`, signal));
}

/** Show what a call changed. The comparison of two scratch forks begins once the node has been shown for a moment. */
function changesPart(task, detail, signal) {
  const stage = h("div", { class: "stack" });
  const effects = detail.effect.filter((effect) => effect !== "none");
  const wide = `#/t/${names(task)}/diff/${detail.parent}/${detail.id}`;
  const button = h("button", { on: { click: () => compare() } }, `Compare with ${detail.parent}`);
  const compare = async () => {
    button.hidden = true;
    put(stage, h("p", { class: "dim" }, "Comparing two scratch forks …"));
    try {
      put(stage, changes(await get(`tasks/${names(task)}/nodes/${detail.parent}/diff/${detail.id}`, { signal })));
    } catch (error) {
      button.hidden = false;
      put(stage, notice(error));
    }
  };
  if (effects.length) {
    button.hidden = true;
    const soon = setTimeout(() => !signal.aborted && compare(), SETTLED_MS);
    signal.addEventListener("abort", () => clearTimeout(soon));
  }
  return h("section", { class: "part" }, h("h2", {}, "What changed"), h("div", { class: "split" }, h("span", { class: "dim" }, effects.join(", ") || "nothing"), h("span", { class: "gap" }), button, h("a", { class: "button quiet", href: wide }, "Open wide")), stage);
}

function readsPart(task, node, reads, total, signal) {
  const stage = h("div", {});
  const open = async (read) => {
    const path = `tasks/${names(task)}/nodes/${node}/calls/${read.record}`;
    put(stage, h("p", { class: "dim" }, "…"));
    try {
      const call = await get(path, { signal });
      put(stage, h("div", { class: "stack" }, command(call), answer(call.answer, `tasks/${names(task)}/nodes/${node}/answer?record=${read.record}`, signal)));
      stage.scrollIntoView({ block: "nearest" });
    } catch (error) {
      put(stage, notice(error));
    }
  };
  return h(
    "section",
    { class: "part" },
    h("h2", {}, "Read-only calls ", h("span", { class: "faint" }, total > reads.length ? `${reads.length} of ${count(total)}` : count(total))),
    h("ul", { class: "list reads" }, reads.map((read) => h("li", {}, h("button", { class: "row", title: oneLine(read.text), on: { click: () => open(read) } }, oneLine(read.text)), read.exit_code ? h("span", { class: "chip bad" }, `exit ${read.exit_code}`) : null, h("span", { class: "faint" }, [seconds(read.seconds), plural(read.hits, "hit")].join(" · "))))),
    stage,
  );
}

function statePart(task, detail) {
  const kept = detail.snapshot_detail;
  const rows = [];
  if (detail.kept) rows.push(["State", detail.kept]);
  else rows.push(["State", kept ? `kept: ${kept.why}` : detail.unfreezable ? `not kept: ${detail.unfreezable}` : "not kept: replay rebuilds it"]);
  if (kept) {
    rows.push(["Snapshot", `${kept.kind}, ${bytes(kept.size_bytes)}, taken in ${seconds(kept.cost_s)}${kept.restore_s ? `, restored in ${seconds(kept.restore_s)}` : ""}`]);
    rows.push(["Used", `${plural(kept.uses, "time")}; about ${kept.expected_uses.toPrecision(2)} more expected. Each saves ${seconds(kept.saved_s - kept.risk_s)} of replay${kept.risk_s >= 1 ? `, and ${seconds(kept.risk_s)} that a lost rollout costs on average` : ""}`]);
  }
  if (detail.recorded_at) rows.push(["Recorded", moment(detail.recorded_at)]);
  return h("section", { class: "part" }, h("h2", {}, "State"), h("dl", { class: "kv" }, rows.map(([name, text]) => [h("dt", {}, name), h("dd", {}, text)])));
}

/** Show the files of a node, read without a sandbox, once somebody asks for them. */
function filesPart(task, node, signal) {
  const stage = h("div", { class: "stack" });
  const url = (path) => `tasks/${names(task)}/nodes/${node}/files/${path}`;
  const open = async (path) => {
    try {
      const folder = await get(url(path), { signal });
      const into = (text, to) => h("button", { class: "row mono", on: { click: () => open(to) } }, text);
      const row = ({ name, url: part, kind, size_bytes: size, target }) => h(
        "li", {},
        kind === "directory" ? into(`${oneLine(name)}/`, `${path}${part}/`) : kind === "file" ? h("button", { class: "row mono", title: "Download", on: { click: () => download(url(path) + part, name).catch((error) => put(stage, notice(error))) } }, visible(oneLine(name))) : h("span", { class: "mono" }, visible(oneLine(target === null ? name : `${name} → ${target}`))),
        h("span", { class: "faint" }, kind === "file" ? bytes(size) : kind),
      );
      put(
        stage,
        h("p", { class: "dim" }, h("span", { class: "mono" }, visible(folder.path)), folder.base ? "" : " · only what set-up and calls have changed", folder.truncated ? " · more were left out" : ""),
        h("ul", { class: "list reads" }, path ? h("li", {}, into("..", path.replace(/[^/]*\/$/, ""))) : null, folder.entries.map(row)),
      );
    } catch (error) {
      put(stage, notice(error));
    }
  };
  put(stage, h("button", { on: { click: () => open("") } }, "Show files"));
  return h("section", { class: "part" }, h("h2", {}, "Files"), stage);
}

/** Show what programs in sandboxes requested from hosts outside in the calls made at a node. Hidden if that is nothing. */
function outsidePart(task, node, signal) {
  const part = h("section", { class: "part", hidden: true });
  const load = async () => {
    const requests = (await items(`egress?task=${encodeURIComponent(task)}`, { signal, most: OUTSIDE })).filter((request) => request.node === node);
    if (signal.aborted || !requests.length) return;
    put(
      part,
      h("h2", {}, "Requests to hosts outside ", h("span", { class: "faint" }, count(requests.length))),
      h("p", { class: "dim" }, "Made by the calls at this node, since the proxy started."),
      h("ul", { class: "list" }, requests.slice(0, 100).map(({ method, url, outcome, status, size_bytes: size }) => h("li", {}, h("span", { class: "mono" }, visible(oneLine(`${method} ${url}`))), h("span", { class: "faint" }, [outcome, status, bytes(size)].join(" · "))))),
    );
    part.hidden = false;
  };
  load().catch((error) => {
    if (signal.aborted) return;
    put(part, notice(error));
    part.hidden = false;
  });
  return part;
}

function passedPart(task, detail, call) {
  const passed = call?.passed ?? [];
  if (!passed.length) return null;
  return h(
    "section",
    { class: "part" },
    h("h2", {}, "Rollouts that made this call ", h("span", { class: "faint" }, plural(detail.passes, "rollout"))),
    h("ul", { class: "list" }, passed.slice(0, 100).map((p) => h("li", {}, h("a", { class: "mono", href: `#/t/${names(task)}/r/${names(p.rollout)}?turn=${p.turn}` }, p.rollout), h("span", { class: "faint" }, `call ${p.turn + 1}`), h("span", { class: `chip o-${p.outcome}` }, p.outcome)))),
  );
}

