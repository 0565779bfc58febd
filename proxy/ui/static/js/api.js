// Client of the proxy's REST API: JSON requests and responses, problem details as errors, and the token.

import { h } from "./dom.js";

/** The proxy's base URL, relative to the page, so that it works behind a reverse proxy's path prefix. */
export const root = new URL("..", document.baseURI);
const TOKEN = "forkpoint-token";
/** Items of a page, the most that the proxy gives in one. */
export const PAGE = 1000;
let asking = null;

export class Problem extends Error {
  constructor(status, problem) {
    super(problem.detail || problem.title || `The proxy answered ${status}.`);
    this.status = status;
    this.title = problem.title ?? "Request failed";
    this.slug = String(problem.type ?? "").replace("urn:forkpoint:", "");
  }
}

export const token = () => sessionStorage.getItem(TOKEN);

/** Send a request to a path below /api/v1. Returns the response; throws an ApiError for a failure. */
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

/** Return a list, `{items, total}`, from as many of its pages as it takes; about `most` of its items at most. */
export async function list(path, { most = Infinity, ...options } = {}) {
  const found = [];
  const joint = path.includes("?") ? "&" : "?";
  let page = { next: "" };
  do {
    page = await get(`${path}${joint}limit=${Math.min(PAGE, most)}${page.next && `&cursor=${page.next}`}`, options);
    found.push(...page.items);
  } while (page.next && found.length < most);
  return { items: found, total: page.total };
}

/** Return the items of a list. */
export const items = async (path, options) => (await list(path, options)).items;

export async function send(method, path, body, options) {
  const response = await ask(method, path, { body, ...options });
  return response.status === 204 ? null : response.json();
}

/** Download a file from the proxy. */
export async function download(path, name) {
  save(await (await ask("GET", path)).blob(), name);
}

export function save(blob, name) {
  const link = h("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Open a WebSocket. Browsers cannot add headers to one, so the token is sent as a subprotocol. */
export function socket(path) {
  const url = new URL(`api/v1/${path}`, root);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return token() ? new WebSocket(url, ["forkpoint", `token.${token()}`]) : new WebSocket(url);
}

export const names = (...segments) => segments.map((segment) => encodeURIComponent(segment)).join("/");

/** Show the token dialog; all requests that need the token share it. */
export function askForToken(detail) {
  asking ??= new Promise((resolve) => {
    const field = h("input", { type: "password", name: "token", autocomplete: "off", required: true, "aria-label": "Token" });
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", {}, "This proxy requires a token"),
      h("p", {}, detail ?? "The token is set by FORKPOINT_TOKEN or FORKPOINT_TOKEN_FILE of the proxy."),
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
