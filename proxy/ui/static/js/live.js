// Live updates: views reload when the proxy's event stream reports activity, and at long intervals without it. They do not
// reload while the page is hidden, and reload more rarely while the proxy does not answer.

import { root, token } from "./api.js";

const RARELY_MS = 10_000;
const MAX_MS = 20_000;
const SILENT_MS = 5000;
const COUNTED = ["hits", "misses", "waits", "bypasses", "replays", "errors", "refusals"];
const listeners = new Set();
const beats = new Set();
const resumes = new Set();
let state = "live";
let held = false;
let lastEventAt = performance.now();
let active = 0;
let sandboxes = -1;

/** Listen to the state: "live", "hidden" (nobody sees the page), "paused" (by the user) or "lost" (no answer). */
export function onState(listener) {
  listeners.clear();
  listeners.add(listener);
  listener(state);
}

function become(next) {
  if (next === state) return;
  state = next;
  for (const listener of listeners) listener(state);
}

/** Pause all views, or let them follow again. */
export function pause(on) {
  held = on;
  become(held ? "paused" : "live");
  if (!held) for (const resume of resumes) resume();
}

export const paused = () => held;

/** Mark an element as changed for a moment. */
export function flash(element) {
  element.classList.remove("fresh");
  // Reading the layout restarts the animation.
  void element.offsetWidth;
  element.classList.add("fresh");
}

/** Listen to the `second` events. */
export function onSecond(listener, signal) {
  beats.add(listener);
  signal.addEventListener("abort", () => beats.delete(listener));
}

/** Connect to the worker that reads the stream. Without a worker, views still reload at long intervals. */
function connect() {
  if (typeof SharedWorker === "undefined") return;
  const worker = new SharedWorker(new URL("stream.js", import.meta.url), { name: "forkpoint-events" });
  const hello = () => worker.port.postMessage({ url: new URL("api/v1/events", root).href, token: token() });
  worker.port.onmessage = ({ data }) => {
    if (data.event === "second") beat(data);
  };
  hello();
  window.addEventListener("pagehide", () => worker.port.postMessage({ bye: true }));
  window.addEventListener("pageshow", (event) => event.persisted && hello());
  document.addEventListener("token", hello);
}

function beat(second) {
  lastEventAt = performance.now();
  if (COUNTED.some((name) => second[name] > 0) || second.sandboxes !== sandboxes) active = lastEventAt;
  sandboxes = second.sandboxes;
  for (const listener of beats) listener(second);
}

/** Whether nothing happened in the last seconds, so that the last reload has seen everything. */
const quiet = () => lastEventAt - active > 4000 && performance.now() - lastEventAt < SILENT_MS;

/**
 * Call `look` while something happens, at most once in `every` ms, and now and then while nothing does, until `signal`
 * ends; never twice at once. At most a tenth of the time is spent on it. Returns a function that looks at once.
 */
export function watch(look, signal, every = 1000) {
  let wait = every;
  let last = performance.now();
  let busy = false;
  const run = async () => {
    if (busy || held || signal.aborted) return;
    busy = true;
    last = performance.now();
    try {
      await look();
      wait = Math.max(every, (performance.now() - last) * 9);
      if (!held) become("live");
    } catch (error) {
      if (!signal.aborted) {
        if (!(error.status < 500)) become("lost");
        wait = Math.min(MAX_MS, wait * 2);
      }
    } finally {
      busy = false;
    }
  };
  const consider = () => {
    if (held) return;
    if (document.hidden) {
      become("hidden");
      return;
    }
    const since = performance.now() - last;
    if (since >= wait - 50 && (!quiet() || since > RARELY_MS)) run();
  };
  const timer = setInterval(consider, every);
  document.addEventListener("visibilitychange", () => !document.hidden && run(), { signal });
  resumes.add(run);
  signal.addEventListener("abort", () => {
    clearInterval(timer);
    resumes.delete(run);
  });
  return run;
}

connect();
