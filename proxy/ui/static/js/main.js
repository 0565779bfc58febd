// The frame of the page: navigation, theme and keyboard shortcuts.

import { h, icon, notice, put } from "./dom.js";
import { onState, pause, paused } from "./live.js";
import { overview } from "./overview.js";
import { sandboxes, snapshots } from "./machine.js";
import { treeView } from "./tree.js";
import { nodeView } from "./node.js";
import { rolloutView } from "./rollout.js";
import { rolloutList } from "./rollouts.js";
import { compareView } from "./compare.js";
import { compareGroup } from "./compare_group.js";
import { auditView } from "./audit.js";
import { diffView } from "./diff.js";
import { terminalView } from "./terminal.js";
import { help } from "./help.js";

const NAME = "([^/?]+)";
const ROUTES = [
  [/^\/?$/, overview, "Overview"],
  [/^\/sandboxes$/, sandboxes, "Sandboxes"],
  [/^\/snapshots$/, snapshots, "Snapshots"],
  [new RegExp(`^/t/${NAME}$`), treeView, "Tree"],
  [new RegExp(`^/t/${NAME}/rollouts$`), rolloutList, "Rollouts"],
  [new RegExp(`^/t/${NAME}/compare$`), compareGroup, "Rollouts compared"],
  [new RegExp(`^/t/${NAME}/audit$`), auditView, "Audit"],
  [new RegExp(`^/t/${NAME}/r/${NAME}$`), rolloutView, "Rollout"],
  [new RegExp(`^/t/${NAME}/r/${NAME}/vs/${NAME}$`), compareView, "Two rollouts"],
  [new RegExp(`^/t/${NAME}/n/${NAME}$`), nodeView, "Node"],
  [new RegExp(`^/t/${NAME}/n/${NAME}/terminal$`), terminalView, "Terminal"],
  [new RegExp(`^/t/${NAME}/diff/${NAME}/${NAME}$`), diffView, "What changed"],
];
const THEMES = ["auto", "light", "dark"];

let leaving = new AbortController();
let current = null;

/** Show the view that the address names. If only the query changed, the view may update itself. */
function route() {
  const [path, query = ""] = decodeHash();
  const params = new URLSearchParams(query);
  if (current?.path === path && current.view?.update) {
    current.view.update(params);
    return;
  }
  const found = ROUTES.map(([pattern, view, title]) => [pattern.exec(path), view, title]).find(([match]) => match);
  leaving.abort();
  leaving = new AbortController();
  const main = document.getElementById("main");
  put(main);
  main.className = "";
  delete main.dataset.ready;
  const [match, view, title] = found ?? [[], lost, "Not found"];
  const args = match.slice(1).map(decodeURIComponent);
  document.title = [...args.slice(0, 2).reverse(), title].slice(0, 2).join(" · ") + " · Forkpoint";
  frame(path, args[0]);
  current = { path, view: null };
  const context = { main, params, signal: leaving.signal, setParams: (changes) => setParams(path, changes) };
  const mine = current;
  const signal = leaving.signal;
  Promise.resolve()
    .then(() => view(context, ...args))
    .then((made) => {
      mine.view = made;
      if (!signal.aborted) main.dataset.ready = "1";
    })
    .catch((error) => {
      if (signal.aborted) return;
      put(main, h("div", { class: "wrap" }, notice(error)));
      main.dataset.ready = "1";
    });
  main.focus({ preventScroll: true });
  window.scrollTo(0, 0);
}

function decodeHash() {
  return location.hash.replace(/^#/, "").split("?");
}

/** Replace the address's query, so that the view can be linked without a history entry for each change. */
function setParams(path, changes) {
  const [now, query = ""] = decodeHash();
  if (now !== path) return;
  const params = new URLSearchParams(query);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "" || value === undefined) params.delete(name);
    else params.set(name, value);
  }
  const text = params.toString();
  history.replaceState(null, "", `#${path}${text ? `?${text}` : ""}`);
}

function lost({ main }) {
  put(main, h("h1", { class: "sr" }, "Not found"), h("p", { class: "empty" }, "There is no page at this address. ", h("a", { href: "#/" }, "Overview")));
}

function frame(path, task) {
  const link = (href, text, on) => h("a", { href, "aria-current": on ? "page" : null }, text);
  const inTask = path.startsWith("/t/");
  const rest = path.replace(/^\/t\/[^/]+/, "");
  const under = inTask ? `#/t/${encodeURIComponent(task)}` : "";
  const pulse = h("button", { class: "pulse quiet", title: "Pause or resume live updates (p)", on: { click: () => pause(!paused()) } }, "live");
  onState((state) => {
    pulse.dataset.state = state;
    pulse.textContent = { live: "live", hidden: "live", paused: "paused", lost: "no answer" }[state];
    pulse.setAttribute("aria-label", state === "paused" ? "paused: resume live updates" : `${pulse.textContent}: pause live updates`);
  });
  put(
    document.getElementById("top"),
    h(
      "div",
      { class: "bar" },
      h("a", { class: "brand", href: "#/" }, icon("mark"), "Forkpoint"),
      h(
        "nav",
        { "aria-label": "Views" },
        link("#/", "Overview", path === "" || path === "/"),
        link("#/sandboxes", "Sandboxes", path === "/sandboxes"),
        link("#/snapshots", "Snapshots", path === "/snapshots"),
        inTask && [
          h("span", { class: "crumb-sep", "aria-hidden": "true" }, "/"),
          h("span", { class: "crumb", title: task }, task),
          link(under, "Tree", !/^\/(rollouts|r|audit|compare)(\/|$)/.test(rest)),
          link(`${under}/rollouts`, "Rollouts", /^\/(rollouts|r|compare)(\/|$)/.test(rest)),
          link(`${under}/audit`, "Audit", rest === "/audit"),
        ],
      ),
      h("span", { class: "gap" }),
      pulse,
      themeSwitch(),
      h("button", { class: "quiet icon", title: "Keys (?)", "aria-label": "Keys", on: { click: () => help() } }, "?"),
    ),
  );
  document.querySelector("#top nav").scrollLeft = document.querySelector("#top nav a[aria-current]")?.offsetLeft - 40 || 0;
}

function themeSwitch() {
  const button = h("button", { class: "quiet icon", "aria-label": "Theme" });
  const show = () => {
    const theme = localStorage.getItem("forkpoint-theme") ?? "auto";
    put(button, icon({ auto: "auto", light: "sun", dark: "moon" }[theme]));
    button.title = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}`);
  };
  button.addEventListener("click", () => {
    const theme = localStorage.getItem("forkpoint-theme") ?? "auto";
    localStorage.setItem("forkpoint-theme", THEMES[(THEMES.indexOf(theme) + 1) % 3]);
    applyTheme();
    show();
  });
  show();
  return button;
}

function applyTheme() {
  const theme = localStorage.getItem("forkpoint-theme") ?? "auto";
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.dispatchEvent(new Event("theme"));
}

function keys(event) {
  const typing = event.target.closest?.("input, textarea, select, .term-box, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const chosen = { "?": () => help(), "/": focusSearch, o: () => (location.hash = "#/"), t: toTree, p: () => pause(!paused()) }[event.key];
  if (chosen) {
    event.preventDefault();
    chosen();
  }
}

function focusSearch() {
  document.querySelector('main input[type="search"]')?.focus();
}

function toTree() {
  const match = /^#(\/t\/[^/?]+)/.exec(location.hash);
  if (match) location.hash = `#${match[1]}`;
}

applyTheme();
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("theme")));
window.addEventListener("hashchange", route);
window.addEventListener("keydown", keys);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
route();
