// The actions of a node: fork, terminal, try, pin, snapshot, verify, download and forget.

import { download, names, send } from "./api.js";
import { h, put, toast } from "./dom.js";
import { plural, seconds } from "./format.js";
import { answer } from "./answer.js";
import { menu } from "./menu.js";

/** Drivers without a shell. */
const SHELLLESS = new Set(["sqlite", "postgres", "video", "http", "client"]);

/** Return the buttons of a node. */
export function actions(task, detail, call, on, signal) {
  const path = `tasks/${names(task)}/nodes/${detail.id}`;
  const root = detail.parent === null;
  const shellless = SHELLLESS.has(on.driver);
  const pinned = detail.flags.includes("pinned");
  const act = (text, title, run, kind = "") => h("button", { class: kind, title, data: { act: text.toLowerCase() }, on: { click: (event) => busy(event.currentTarget, run) } }, text);
  return h(
    "div",
    { class: "actions", role: "group", "aria-label": `Actions at ${detail.id}` },
    act("Fork", "Begin a rollout at this node", () => fork(task, detail), "primary"),
    shellless ? null : h("a", { class: "button", href: `#/t/${names(task)}/n/${detail.id}/terminal`, title: "Open a shell in a scratch fork of this state; the tree does not change" }, "Terminal"),
    shellless ? null : act("Try", "Run a call in a scratch fork; nothing is recorded", () => attempt(path, detail, signal)),
    menu("More", [
      act(pinned ? "Unpin" : "Pin", "Never evict this state's snapshot", async () => {
        await send("POST", `${path}/pin`, { pinned: !pinned });
        toast(pinned ? `${detail.id} is no longer pinned` : `${detail.id} is pinned`);
        await on.again();
      }),
      act("Snapshot", "Take a snapshot of this state now", async () => {
        const kept = await send("POST", `${path}/snapshot`);
        toast(kept.snapshot ? `${detail.id} has a snapshot now` : `No snapshot of ${detail.id} could be taken`);
        await on.again();
      }),
      root ? null : act("Verify", "Run this call and its subtree again in fresh sandboxes, and compare the results", async () => {
        const audit = await send("POST", `tasks/${names(task)}/verify`, { node: detail.id, sample: 100 });
        toast(`Running ${plural(audit.of, "call")} at ${detail.id} and below again`);
        location.hash = `#/t/${names(task)}/audit?root=${detail.id}`;
      }),
      call ? act("Download answer", "Download the recorded bytes of the answer", () => download(`${path}/answer?record=${call.record}`, `${task}-${detail.id}${suffix(call.answer.media_type)}`)) : null,
      root ? null : act("Forget", "Forget this call and its subtree", () => forget(path, detail, on), "danger"),
    ]),
  );
}

const suffix = (type) => ({ "application/json": ".json", "text/plain": ".txt", "image/png": ".png", "image/jpeg": ".jpg" })[type.split(";")[0].trim()] ?? ".bin";

/** Run a button's action: the button is disabled meanwhile, and an error is shown. */
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

/** Show a dialog with a question. Resolves with the field's text, "yes" without a field, or null if cancelled. */
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
    let reply = null;
    form.addEventListener("submit", () => (reply = input ? input.value.trim() : "yes"));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(reply);
    });
    document.body.append(dialog);
    dialog.showModal();
    input?.select();
  });
}

async function fork(task, detail) {
  const name = await question({
    title: `Fork a rollout at ${detail.id}`,
    text: "The new rollout begins at this node. Set its URL as the tool base URL of an agent.",
    field: "Name", value: `fork-${detail.id}-${Math.random().toString(36).slice(2, 6)}`, yes: "Fork",
  });
  if (!name) return;
  const rollout = await send("POST", `tasks/${names(task)}/nodes/${detail.id}/fork`, { name });
  const url = h("input", { type: "text", value: rollout.base_url, readonly: true, "aria-label": "Base URL" });
  const copy = await question({ title: `Rollout ${rollout.rollout} began at ${detail.id}`, text: "Tool base URL for its agent:", yes: "Show it", extra: url });
  if (copy) location.hash = `#/t/${names(task)}/r/${names(rollout.rollout)}`;
}

/** Run calls in scratch forks, with the answers in the dialog. */
async function attempt(path, detail, signal) {
  const stage = h("div", { class: "stack" });
  const input = h("input", { type: "text", spellcheck: "false", "aria-label": "Command", placeholder: "ls -la" });
  const run = h("button", { type: "button", class: "primary" }, "Run");
  const go = () =>
    busy(run, async () => {
      put(stage, h("p", { class: "dim" }, "Making a scratch fork …"));
      try {
        const trial = await send("POST", `${path}/exec`, { command: input.value }, { signal });
        put(stage, answer({ exact: true, ...trial.answer }, "", signal), h("p", { class: "dim" }, [trial.effect.join() === "none" ? "changed nothing" : `changed ${trial.effect.join(", ")}`, seconds(trial.seconds), trial.known ? `the tree has a record of this call, which leads to ${trial.leads_to}` : "the tree has no record of this call"].join(" · ")));
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
    title: `Try a command at ${detail.id}`, text: "It runs in a scratch fork: the tree does not change, and nothing is recorded.", yes: "Done", wide: true,
    extra: h("div", { class: "stack" }, h("div", { class: "split" }, input, run), stage),
  });
}

async function forget(path, detail, on) {
  const end = h("input", { type: "checkbox" });
  const sure = await question({
    title: `Forget ${detail.id} and its subtree?`,
    text: "The forgotten calls run again when a rollout makes them. This cannot be undone.", yes: "Forget", danger: true,
    extra: h("label", { class: "inline" }, end, "End the rollouts in the subtree"),
  });
  if (!sure) return;
  const result = await send("DELETE", `${path}${end.checked ? "?end_rollouts=true" : ""}`);
  const parts = [`${plural(result.nodes, "node")} forgotten`, result.rollouts.length ? `${plural(result.rollouts.length, "rollout")} ended` : "", result.going_on.length ? `${plural(result.going_on.length, "rollout")} continuing without shared records` : ""];
  toast(parts.filter(Boolean).join(", "));
  on.gone(detail.parent);
}
