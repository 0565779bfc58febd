// Trees travel: a task's tree as one file, and back.

import { download, names, root, send, token } from "./api.js";
import { busy, question } from "./actions.js";
import { h, toast } from "./dom.js";
import { plural } from "./format.js";

/** What saves a tree with its answers: a link, written to disk as it comes, or where a token must go along, a button. */
export function exportLink(task, tree) {
  const path = `tasks/${names(task)}/export?root=${tree}`;
  const file = `${task}.forkpoint.tar`;
  const title = "Save this tree with its answers as one file";
  if (!token()) return h("a", { class: "button", href: new URL(`api/v1/${path}`, root).href, download: file, title }, "Export");
  return h("button", { title, on: { click: (event) => busy(event.currentTarget, () => download(path, file)) } }, "Export");
}

/** A button that takes such a file as the tree of a new task. */
export function importButton() {
  const file = h("input", { type: "file", accept: ".tar", hidden: true, "aria-label": "File to import" });
  const button = h("button", { title: "Take an exported tree as that of a new task", on: { click: () => file.click() } }, "Import");
  file.addEventListener("change", () => busy(button, () => take(file)));
  return [file, button];
}

async function take(file) {
  const [chosen] = file.files;
  file.value = "";
  if (!chosen) return;
  const task = await question({ title: `Import ${chosen.name}`, text: "It becomes the tree of a task which has none yet.", field: "Task", value: chosen.name.split(".")[0], yes: "Import" });
  if (!task) return;
  const found = await send("POST", `tasks/${names(task)}/import`, chosen);
  toast(`${plural(found.nodes, "node")} imported`);
  location.hash = `#/t/${names(task)}${found.current ? "" : `?root=${found.root}`}`;
}
