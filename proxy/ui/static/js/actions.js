// What can be done at a node, and with a task's whole tree.

import { download, names, send } from "./api.js";
import { h, put, toast } from "./dom.js";
import { plural, seconds } from "./format.js";
import { answer } from "./answer.js";

/** The buttons of a node. */
export function actions(task, detail, call, on, signal) {
  const path = `tasks/${names(task)}/nodes/${detail.id}`;
  const root = detail.parent === null;
  const pinned = detail.flags.includes("pinned");
  const act = (text, title, run, kind = "") => h("button", { class: kind, title, data: { act: text.toLowerCase() }, on: { click: (event) => busy(event.currentTarget, run) } }, text);
  return h(
    "div",
    { class: "actions", role: "group", "aria-label": `What can be done at ${detail.id}` },
    act("Fork", "Begin a rollout that stands here", () => fork(task, detail)),
    h("a", { class: "button", href: `#/t/${names(task)}/n/${detail.id}/terminal`, title: "A shell in a throw-away fork of this state; the tree is not touched" }, "Terminal"),
    act("Try", "Run a call in a throw-away fork; nothing is recorded", () => attempt(path, detail, signal)),
    act(pinned ? "Unpin" : "Pin", "Keep this state's snapshot whatever the budget says", async () => {
      await send("POST", `${path}/pin`, { pinned: !pinned });
      toast(pinned ? `${detail.id} is no longer pinned` : `${detail.id} is pinned`);
      await on.again();
    }),
    act("Snapshot", "Keep this state now", async () => {
      const kept = await send("POST", `${path}/snapshot`);
      toast(kept.snapshot ? `The state ${detail.id} is kept` : `The state ${detail.id} could not be kept`);
      await on.again();
    }),
    root ? null : act("Verify", "Run this call and those after it again, in fresh sandboxes, and compare", async () => {
      const found = await send("POST", `tasks/${names(task)}/verify`, { node: detail.id, sample: 100 });
      toast(`${plural(found.of, "call")} at ${detail.id} and after it: being run again`);
      location.hash = `#/t/${names(task)}/audit?root=${detail.id}`;
    }),
    call ? act("Download answer", "The answer's bytes as they were recorded", () => download(`${path}/answer?record=${call.record}`, `${task}-${detail.id}${suffix(call.answer.media_type)}`)) : null,
    root ? null : act("Forget", "Forget this call and all that came after it", () => forget(path, detail, on), "danger"),
  );
}

const suffix = (type) => ({ "application/json": ".json", "text/plain": ".txt", "image/png": ".png", "image/jpeg": ".jpg" })[type.split(";")[0].trim()] ?? ".bin";

/** Run what a button stands for; it waits, and what goes wrong is told. */
export async function busy(button, run) {
  button.disabled = true;
  try {
    await run();
  } catch (error) {
    if (error.name !== "AbortError") toast(error.message, true);
  } finally {
    button.disabled = false;
  }
}

/** Ask for something; resolves with the field's text, or null. */
export function question({ title, text, field, value = "", yes, danger = false, extra = null, wide = false }) {
  return new Promise((resolve) => {
    const input = field ? h("input", { type: "text", value, required: true, spellcheck: "false", "aria-label": field }) : null;
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", {}, title),
      text ? h("p", {}, text) : null,
      input ? h("label", { class: "field" }, field, input) : null,
      extra,
      h("div", { class: "row" }, h("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel"), h("button", { class: danger ? "danger primary" : "primary", value: "yes" }, yes)),
    );
    const dialog = h("dialog", { "aria-label": title, class: wide ? "wide" : "" }, form);
    let told = null;
    form.addEventListener("submit", () => (told = input ? input.value.trim() : "yes"));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(told);
    });
    document.body.append(dialog);
    dialog.showModal();
    input?.select();
  });
}

async function fork(task, detail) {
  const name = await question({
    title: `Fork a rollout at ${detail.id}`,
    text: "A new rollout stands here; point an agent's tool base URL at it.",
    field: "Name", value: `fork-${detail.id}-${Math.random().toString(36).slice(2, 6)}`, yes: "Fork",
  });
  if (!name) return;
  const rollout = await send("POST", `tasks/${names(task)}/nodes/${detail.id}/fork`, { name });
  const url = h("input", { type: "text", value: rollout.base_url, readonly: true, "aria-label": "Base URL" });
  const copy = await question({ title: `Rollout ${rollout.rollout} stands at ${detail.id}`, text: "Its agent's tool base URL:", yes: "Show it", extra: url });
  if (copy) location.hash = `#/t/${names(task)}/r/${names(rollout.rollout)}`;
}

/** A call in a throw-away fork, answered in the dialog. */
async function attempt(path, detail, signal) {
  const stage = h("div", { class: "stack" });
  const input = h("input", { type: "text", spellcheck: "false", "aria-label": "Command", placeholder: "ls -la" });
  const run = h("button", { type: "button", class: "primary" }, "Run");
  const go = () =>
    busy(run, async () => {
      put(stage, h("p", { class: "dim" }, "A fork is being made …"));
      try {
        const found = await send("POST", `${path}/exec`, { command: input.value }, { signal });
        put(stage, answer({ exact: true, ...found.answer }, "", signal), h("p", { class: "dim" }, [found.effect.join() === "none" ? "changed nothing" : `changed ${found.effect.join(", ")}`, seconds(found.seconds), found.known ? `the tree knows this call: it leads to ${found.leads_to}` : "the tree does not know this call"].join(" · ")));
      } catch (error) {
        put(stage);
        throw error;
      }
    });
  run.addEventListener("click", go);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    go();
  });
  await question({
    title: `Try a command at ${detail.id}`, text: "It runs in a throw-away fork: the tree is not touched, nothing is recorded.", yes: "Done", wide: true,
    extra: h("div", { class: "stack" }, h("div", { class: "split" }, input, run), stage),
  });
}

async function forget(path, detail, on) {
  const end = h("input", { type: "checkbox" });
  const sure = await question({
    title: `Forget ${detail.id} and all that came after it?`,
    text: "Their calls run again when a rollout makes them. This cannot be undone.", yes: "Forget", danger: true,
    extra: h("label", { class: "inline" }, end, "End the rollouts that stand there"),
  });
  if (!sure) return;
  const gone = await send("DELETE", `${path}${end.checked ? "?end_rollouts=true" : ""}`);
  const told = [`${plural(gone.nodes, "node")} forgotten`, gone.rollouts.length ? `${plural(gone.rollouts.length, "rollout")} ended` : "", gone.going_on.length ? `${plural(gone.going_on.length, "rollout")} going on alone` : ""];
  toast(told.filter(Boolean).join(", "));
  on.gone(detail.parent);
}
