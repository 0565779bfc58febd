// The description of the REST API: renders /openapi.json with this page's own elements, and loads nothing else.

import { askForToken, token } from "./api.js";
import { h, notice, put } from "./dom.js";

const METHODS = ["get", "put", "post", "patch", "delete", "head", "options", "trace"];
const place = document.getElementById("main");
// Relative to this file, so that it works below any path prefix, at /docs as at /ui/docs.html.
const description = new URL("../../openapi.json", import.meta.url);

async function load() {
  for (;;) {
    const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
    const response = await fetch(description, { headers, credentials: "same-origin", redirect: "error" });
    if (response.ok) return response.json();
    const problem = await response.json().catch(() => ({}));
    if (response.status !== 401) throw new Error(problem.detail ?? `The proxy answered ${response.status}.`);
    await askForToken(problem.detail);
  }
}

/** Return a schema with its references resolved; one that contains itself is named where it comes again. */
function resolved(schema, all, above = []) {
  if (Array.isArray(schema)) return schema.map((part) => resolved(part, all, above));
  if (schema === null || typeof schema !== "object") return schema;
  const name = schema.$ref?.replace("#/components/schemas/", "");
  if (name !== undefined) return above.includes(name) || above.length > 6 ? name : resolved(all[name] ?? {}, all, [...above, name]);
  return Object.fromEntries(Object.entries(schema).map(([key, value]) => [key, resolved(value, all, above)]));
}

const json = (value) => h("pre", { tabindex: "0" }, JSON.stringify(value, null, 2));

/** Return what a request or response holds: its example first, and its members behind a click. */
function content(title, parts, all) {
  return Object.entries(parts ?? {}).map(([type, { schema, example }]) => [
    h("h3", {}, `${title}: ${type}`),
    example === undefined ? null : json(example),
    schema ? h("details", {}, h("summary", {}, "Schema"), json(resolved(schema, all))) : null,
  ]);
}

/** Return the operation as a command of curl and as lines of Python, with its example as the body. */
function calls(path, method, described) {
  const names = (described.parameters ?? []).filter((each) => each.in === "query" && each.required).map((each) => `${each.name}=…`);
  const target = `${path}${names.length ? `?${names.join("&")}` : ""}`;
  const body = described.requestBody?.content?.["application/json"]?.example;
  const text = body === undefined ? "" : JSON.stringify(body);
  const curl = [`curl -X ${method.toUpperCase()} "$FORKPOINT_URL${target}"`, ...(text ? ["-H 'Content-Type: application/json'", `-d '${text.replaceAll("'", `'\\''`)}'`] : [])].join(" \\\n  ");
  const python = `httpx.request("${method.toUpperCase()}", f"{url}${target}"${text ? `, json=json.loads(${JSON.stringify(text)})` : ""})`;
  return [h("h3", {}, "curl"), h("pre", { tabindex: "0" }, curl), h("h3", {}, "Python"), h("pre", { tabindex: "0" }, python)];
}

function operation(path, method, described, all) {
  const parameters = described.parameters ?? [];
  const details = h("details", {}, h("summary", {}, h("b", {}, method.toUpperCase()), h("code", {}, path), h("span", {}, described.description?.split("\n")[0] ?? described.summary ?? "")));
  // Filled when it is first opened: all schemas together are megabytes of text.
  details.addEventListener("toggle", () => fill(details, [path, method, described], parameters, all), { once: true });
  return details;
}

function fill(details, [path, method, described], parameters, all) {
  const rows = parameters.map((each) => {
    const where = each.required ? `${each.in}, required` : each.in;
    return h("tr", {}, h("td", {}, h("code", {}, each.name)), h("td", {}, where), h("td", {}, each.description ?? ""));
  });
  details.append(
    h("p", {}, described.description ?? ""),
    ...calls(path, method, described),
    h("table", {}, h("tbody", {}, rows)),
    ...content("Request", described.requestBody?.content, all).flat(),
    ...Object.entries(described.responses ?? {}).flatMap(([status, response]) => [
      h("p", {}, `${status}: ${response.description ?? ""}`),
      ...content(status, response.content, all).flat(),
    ]),
  );
}

try {
  const api = await load();
  const all = api.components?.schemas ?? {};
  put(
    place,
    h("h1", {}, `${api.info.title} ${api.info.version}: REST API`),
    h("p", {}, api.info.summary ?? "", " The same as JSON: ", h("a", { href: description.href }, "openapi.json")),
    api.tags.map(({ name, description: text }) => [
      h("h2", { id: name.replaceAll(" ", "-") }, name[0].toUpperCase() + name.slice(1)),
      h("p", {}, text),
      Object.entries(api.paths).flatMap(([path, methods]) =>
        METHODS.filter((method) => methods[method]?.tags?.[0] === name).map((method) => operation(path, method, methods[method], all)),
      ),
    ]),
  );
} catch (error) {
  put(place, notice(error));
}
