// Where the time of a rollout's calls went, as segments on an axis. Pure.
//
// As if executed: every call takes its tool's time, one after another, so that a hit is as wide as the time that it saved.
// Real time: each call ends when it was answered. What lies between an answer and the next call is the agent's thinking.

import { unix } from "./format.js";

export const WORDS = { "saved o-hit": "saved", "o-think": "the agent thinks", "o-wait": "waited", "o-restore": "restored", "o-replay": "replayed", "o-miss": "ran", "o-bypass": "ran" };

/** Return for each step where its bar begins and its parts (kind and seconds), and the length of the axis. */
export function asIfExecuted(steps, timings) {
  let at = 0;
  const rows = steps.map((step) => {
    const parts = step.outcome === "hit" ? [["saved o-hit", step.seconds]] : spent(step, timings[step.turn]);
    const row = { from: at, parts };
    at += sum(parts);
    return row;
  });
  return { rows, span: at || 1 };
}

/** The same in real time since the rollout began; null if the times of answers are not known (any more). */
export function realTime(steps, timings, beganAt) {
  if (!steps.length || steps.some((step) => timings[step.turn]?.answered_at == null)) return null;
  const first = steps[0];
  let before = first.turn === 0 ? unix(beganAt) : unix(timings[first.turn].answered_at) - sum(spent(first, timings[first.turn]));
  const zero = before;
  const rows = steps.map((step) => {
    const end = Math.max(before, unix(timings[step.turn].answered_at));
    const parts = step.outcome === "hit" ? [] : spent(step, timings[step.turn]);
    const busy = Math.min(sum(parts), end - before);
    const row = { from: before - zero, parts: [["o-think", end - before - busy], ...parts], hit: step.outcome === "hit" };
    before = end;
    return row;
  });
  return { rows, span: before - zero || 1 };
}

function spent(step, timing) {
  const kind = step.outcome === "bypass" ? "o-bypass" : "o-miss";
  if (!timing) return [[step.outcome === "wait" ? "o-wait" : kind, step.seconds]];
  if (step.outcome === "wait") return [["o-wait", timing.wait_s]];
  return [["o-wait", timing.wait_s], ["o-restore", timing.restore_s], ["o-replay", timing.replay_s], [kind, timing.tool_s]];
}

const sum = (parts) => parts.reduce((total, [, length]) => total + length, 0);
