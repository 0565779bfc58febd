// The frame of the page: navigation, theme and keyboard shortcuts.

import { h, icon, notice, put } from "./dom.js";
import { onState, pause, paused } from "./live.js";
import { help } from "./help.js";
import { palette } from "./palette.js";

const NAME = "([^/?]+)";
/** Addresses, what loads the view of each, and its title. The frame is painted before a view is there. */
const ROUTES = [
  [/^\/?$/, async () => (await import("./overview.js")).overview, "Overview"],
  [/^\/sandboxes$/, async () => (await import("./machine.js")).sandboxes, "Sandboxes"],
  [/^\/snapshots$/, async () => (await import("./machine.js")).snapshots, "Snapshots"],
  [/^\/runs$/, async () => (await import("./runs.js")).runsView, "Runs"],
  [/^\/system$/, async () => (await import("./system.js")).systemView, "System"],
  [new RegExp(`^/t/${NAME}$`), async () => (await import("./tree.js")).treeView, "Tree"],
  [new RegExp(`^/t/${NAME}/rollouts$`), async () => (await import("./rollouts.js")).rolloutList, "Rollouts"],
  [new RegExp(`^/t/${NAME}/compare$`), async () => (await import("./compare_group.js")).compareGroup, "Rollouts compared"],
  [new RegExp(`^/t/${NAME}/audit$`), async () => (await import("./audit.js")).auditView, "Audit"],
  [new RegExp(`^/t/${NAME}/r/${NAME}$`), async () => (await import("./rollout.js")).rolloutView, "Rollout"],
  [new RegExp(`^/t/${NAME}/n/${NAME}$`), async () => (await import("./node.js")).nodeView, "Node"],
  [new RegExp(`^/t/${NAME}/n/${NAME}/terminal$`), async () => (await import("./terminal.js")).terminalView, "Terminal"],
  [new RegExp(`^/t/${NAME}/diff/${NAME}/${NAME}$`), async () => (await import("./diff.js")).diffView, "What changed"],
];
/** When the dark colours apply, by theme: a media query. */
const DARK_WHEN = { auto: "(prefers-color-scheme: dark)", light: "not all", dark: "all" };
const THEMES = Object.keys(DARK_WHEN);

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
  const found = ROUTES.map(([pattern, load, title]) => [pattern.exec(path), load, title]).find(([match]) => match);
  leaving.abort();
  leaving = new AbortController();
  const main = document.getElementById("main");
  put(main);
  main.className = "";
  delete main.dataset.ready;
  const [match, load, title] = found ?? [[], () => lost, "Not found"];
  const args = match.slice(1).map(decodeURIComponent);
  document.title = [...args.slice(0, 2).reverse(), title].slice(0, 2).join(" · ") + " · Forkpoint";
  frame(path, args[0]);
  current = { path, view: null };
  const context = { main, params, signal: leaving.signal, setParams: (changes) => setParams(path, changes) };
  const mine = current;
  const signal = leaving.signal;
  Promise.resolve()
    .then(load)
    .then((view) => (signal.aborted ? null : view(context, ...args)))
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
        link("#/runs", "Runs", path === "/runs"),
        link("#/sandboxes", "Sandboxes", path === "/sandboxes"),
        link("#/snapshots", "Snapshots", path === "/snapshots"),
        link("#/system", "System", path === "/system"),
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
      h("button", { class: "quiet icon", title: "Find anything (Ctrl-K)", "aria-label": "Find anything", on: { click: openPalette } }, icon("find")),
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
  DARK.media = DARK_WHEN[localStorage.getItem("forkpoint-theme") ?? "auto"];
  coloursChanged();
}

const DARK = document.getElementById("dark");
const coloursChanged = () => document.dispatchEvent(new Event("theme"));

const taskInAddress = () => /^#\/t\/([^/?]+)/.exec(location.hash)?.[1];

/** What the palette offers in each address. */
function commands() {
  const to = (text, address) => [text, () => (location.hash = address)];
  const task = taskInAddress();
  const own = task ? [to("Tree of this task", `#/t/${task}`), to("Rollouts of this task", `#/t/${task}/rollouts`), to("Rollouts as lanes", `#/t/${task}?lanes=1`), to("Audit of this task", `#/t/${task}/audit`)] : [];
  const actions = [[paused() ? "Resume live updates" : "Pause live updates", () => pause(!paused())], ["Switch the theme", () => document.querySelector("#top button[aria-label^=Theme]").click()], ["All keys", () => help()]];
  return [...own, to("Overview", "#/"), to("Runs", "#/runs"), to("Sandboxes", "#/sandboxes"), to("Snapshots", "#/snapshots"), to("System: budgets, warnings, doctor, settings", "#/system"), ...actions];
}

const openPalette = () => palette(taskInAddress() ? decodeURIComponent(taskInAddress()) : null, commands());

const GO = { o: "#/", r: "#/runs", s: "#/sandboxes", n: "#/snapshots", y: "#/system" };
let going = -Infinity;

function keys(event) {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    openPalette();
    return;
  }
  const typing = event.target.closest?.("input, textarea, select, .term-box, dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  // `g` and a letter within a second go to a view.
  const went = performance.now() - going < 1000;
  going = event.key === "g" ? performance.now() : -Infinity;
  const chosen = went
    ? { t: toTree, l: () => toTree("/rollouts"), ...Object.fromEntries(Object.entries(GO).map(([key, address]) => [key, () => (location.hash = address)])) }[event.key]
    : { "?": () => help(), "/": focusSearch, o: () => (location.hash = "#/"), t: () => toTree(), p: () => pause(!paused()), j: () => row(1), k: () => row(-1) }[event.key];
  if (chosen) {
    event.preventDefault();
    chosen();
  }
}

/** Move the focus to the link of the next or previous row of a table. */
function row(step) {
  const links = [...document.querySelectorAll("main tbody tr")].map((tr) => tr.querySelector("a, button")).filter(Boolean);
  const at = links.findIndex((link) => link.closest("tr") === document.activeElement?.closest("tr"));
  links[at < 0 ? 0 : Math.max(0, Math.min(links.length - 1, at + step))]?.focus();
}

function focusSearch() {
  document.querySelector('main input[type="search"]')?.focus();
}

function toTree(under = "") {
  const task = taskInAddress();
  if (task) location.hash = `#/t/${task}${typeof under === "string" ? under : ""}`;
}

applyTheme();
// A browser may load a style sheet that does not apply after this script.
DARK.addEventListener("load", coloursChanged);
window.matchMedia(DARK_WHEN.auto).addEventListener("change", coloursChanged);
window.addEventListener("hashchange", route);
window.addEventListener("keydown", keys);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  document.getElementById("main").focus();
});
route();
