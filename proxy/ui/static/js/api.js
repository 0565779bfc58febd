// The proxy's API: JSON in, JSON out, problems as errors; a token where one is asked for.

import { h } from "./dom.js";

/** Where the proxy is: one above the page, so that a prefix of a reverse proxy does no harm. */
export const root = new URL("..", document.baseURI);
const TOKEN = "forkpoint-token";
let asking = null;

export class Problem extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `The proxy answered ${status}.`);
    this.status = status;
    this.title = problem.title ?? "That did not work";
    this.slug = String(problem.type ?? "").replace("urn:forkpoint:", "");
  }
}

export const token = () => sessionStorage.getItem(TOKEN);

/** Ask the proxy; paths begin below /api/v1. Returns the Response of a success. */
export async function ask(method, path, { body, signal, headers = {} } = {}) {
  for (;;) {
    const sent = { ...headers };
    if (token()) sent.Authorization = `Bearer ${token()}`;
    if (body !== undefined && !(body instanceof Blob)) sent["Content-Type"] = "application/json";
    const response = await fetch(new URL(`api/v1/${path}`, root), {
      method,
      signal,
      headers: sent,
      body: body === undefined || body instanceof Blob ? body : JSON.stringify(body),
      credentials: "same-origin",
      redirect: "error",
    });
    if (response.ok) return response;
    const problem = await response.json().catch(() => ({}));
    if (response.status !== 401) throw new Problem(response.status, problem);
    await askForToken(problem.detail);
  }
}

export const get = async (path, options) => (await ask("GET", path, options)).json();

export async function send(method, path, body, options) {
  const response = await ask(method, path, { body, ...options });
  return response.status === 204 ? null : response.json();
}

/** Save a file that the proxy has. */
export async function download(path, name) {
  save(await (await ask("GET", path)).blob(), name);
}

export function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A websocket of the proxy. Browsers send no header of ours with one, so the token is a subprotocol. */
export function socket(path) {
  const url = new URL(`api/v1/${path}`, root);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return token() ? new WebSocket(url, ["forkpoint", `token.${token()}`]) : new WebSocket(url);
}

export const names = (...segments) => segments.map((segment) => encodeURIComponent(segment)).join("/");

/** Ask the person for the token, once for all who wait for it. */
function askForToken(detail) {
  asking ??= new Promise((resolve) => {
    const field = h("input", { type: "password", name: "token", autocomplete: "off", required: true, "aria-label": "Token" });
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", {}, "This proxy asks for a token"),
      h("p", {}, detail ?? "It is in the proxy's environment or in the file that its settings name."),
      h("label", { class: "field" }, "Token", field),
      h("div", { class: "row" }, h("button", { class: "primary" }, "Use it")),
    );
    const dialog = h("dialog", { "aria-label": "Token", class: "token" }, form);
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    form.addEventListener("submit", () => {
      sessionStorage.setItem(TOKEN, field.value.trim());
      document.dispatchEvent(new Event("token"));
      dialog.remove();
      asking = null;
      resolve();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}
