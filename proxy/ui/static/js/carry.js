// Export and import of trees as files.

import { download, names, root, send, token } from "./api.js";
import { busy, question } from "./actions.js";
import { h, toast } from "./dom.js";
import { plural } from "./format.js";

/** Return the export control: a link that streams to disk, or a button if the request needs a token. */
export function exportLink(task, tree) {
  const path = `tasks/${names(task)}/export?root=${tree}`;
  const file = `${task}.forkpoint.tar`;
  const title = "Export this tree with its answers to a file";
  if (!token()) return h("a", { class: "button", href: new URL(`api/v1/${path}`, root).href, download: file, title }, "Export");
  return h("button", { title, on: { click: (event) => busy(event.currentTarget, () => download(path, file)) } }, "Export");
}

/** Return the button that imports a file into a new task. */
export function importButton() {
  const file = h("input", { type: "file", accept: ".tar", hidden: true, "aria-label": "File to import" });
  const button = h("button", { title: "Import an exported tree into a new task", on: { click: () => file.click() } }, "Import");
  file.addEventListener("change", () => busy(button, () => take(file)));
  return [file, button];
}

async function take(file) {
  const [chosen] = file.files;
  file.value = "";
  if (!chosen) return;
  const task = await question({ title: `Import ${chosen.name}`, text: "The tree is imported into a task that has no tree yet.", field: "Task", value: chosen.name.split(".")[0], yes: "Import" });
  if (!task) return;
  const found = await send("POST", `tasks/${names(task)}/import`, chosen);
  toast(`${plural(found.nodes, "node")} imported`);
  location.hash = `#/t/${names(task)}${found.current ? "" : `?root=${found.root}`}`;
}
