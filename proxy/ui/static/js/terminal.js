// A terminal in a scratch fork of a node. Nothing in it is recorded, and the fork is closed with the terminal.

import { names, socket } from "./api.js";
import { h, put } from "./dom.js";

export async function terminalView({ main, signal }, task, node) {
  const [{ Terminal }, { FitAddon }] = await Promise.all([import("../vendor/xterm.mjs"), import("../vendor/addon-fit.mjs")]);
  if (signal.aborted) return;
  const box = h("div", { class: "term-box", "aria-label": `Terminal in a scratch fork of ${node}` });
  const state = h("span", { class: "note", role: "status" }, "making a scratch fork …");
  main.className = "tree";
  put(
    main,
    h(
      "div",
      { class: "wrap", style: { flex: "1", "min-height": "0" } },
      h("div", { class: "split" }, h("h1", {}, "Terminal in a scratch fork of ", h("a", { class: "mono", href: `#/t/${names(task)}?node=${node}` }, node)), state, h("span", { class: "gap" }), h("span", { class: "dim" }, "The tree does not change. The fork is closed when you leave.")),
      box,
    ),
  );
  const terminal = new Terminal({
    cursorBlink: true, fontSize: 13, scrollback: 5000, allowProposedApi: false, documentOverride: styleless(signal),
    fontFamily: getComputedStyle(document.documentElement).getPropertyValue("--mono"),
    theme: { background: "#101113", foreground: "#e6e7e9", cursor: "#7aa7f5", selectionBackground: "#2c4570" },
    // Links in the output are disabled: a tool's output must not lead anywhere.
    linkHandler: { activate: () => {} },
  });
  const fit = new FitAddon();
  terminal.loadAddon(fit);
  terminal.open(box);
  fit.fit();
  connect(terminal, fit, box, state, signal, task, node);
  return {};
}

function connect(terminal, fit, box, state, signal, task, node) {
  const wire = socket(`tasks/${names(task)}/nodes/${node}/terminal?columns=${terminal.cols}&rows=${terminal.rows}`);
  const encoder = new TextEncoder();
  wire.binaryType = "arraybuffer";
  wire.onopen = () => {
    state.textContent = "connected";
    terminal.focus();
  };
  wire.onmessage = ({ data }) => {
    if (typeof data !== "string") {
      terminal.write(new Uint8Array(data));
      return;
    }
    const message = JSON.parse(data);
    state.textContent = message.exit ?? message.detail ?? message.title ?? "";
  };
  wire.onclose = (event) => {
    if (state.textContent === "connected") state.textContent = "the connection has ended";
    else if (event.code === 1006) state.textContent = "the terminal could not be opened";
    terminal.options.cursorBlink = false;
  };
  terminal.onData((text) => wire.readyState === WebSocket.OPEN && wire.send(encoder.encode(text)));
  terminal.onResize(({ cols, rows }) => wire.readyState === WebSocket.OPEN && wire.send(JSON.stringify({ resize: [cols, rows] })));
  const watching = new ResizeObserver(() => fit.fit());
  watching.observe(box);
  signal.addEventListener("abort", () => {
    watching.disconnect();
    wire.close();
    terminal.dispose();
  });
}

/**
 * A document for xterm.js in whose elements a style element becomes a style sheet instead of a child: this page's policy
 * lets no markup set styles. All else is the document itself.
 */
function styleless(signal) {
  const create = (...args) => {
    const element = document.createElement(...args);
    element.appendChild = (child) => (child instanceof HTMLStyleElement ? asSheet(child, signal) : Node.prototype.appendChild.call(element, child));
    return element;
  };
  return new Proxy(document, {
    get: (target, name) => {
      if (name === "createElement") return create;
      const value = Reflect.get(target, name, target);
      return typeof value === "function" ? value.bind(target) : value;
    },
  });
}

/** Mirror the text of a style element outside the document into a constructed style sheet. */
function asSheet(element, signal) {
  const sheet = new CSSStyleSheet();
  let text = "";
  const set = (content) => {
    text = content;
    sheet.replaceSync(content);
  };
  Object.defineProperty(element, "textContent", { get: () => text, set });
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  signal.addEventListener("abort", () => (document.adoptedStyleSheets = document.adoptedStyleSheets.filter((other) => other !== sheet)));
  return element;
}
