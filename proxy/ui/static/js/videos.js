// Progress of preprocessing: the videos in progress and the last that ended. Hidden until there is one.

import { get } from "./api.js";
import { grid, h, panel, put, thead } from "./dom.js";
import { percent, seconds } from "./format.js";
import { watch } from "./live.js";

const ENDED = ["done", "failed"];

/** Return the panel. It appears with the first video, and reloads each second while one is in progress. */
export function videos(signal) {
  const body = h("tbody");
  const head = thead([["Video"], ["Stage"], ["At", "num"], ["Stage done", "num"], ["Seconds", "num"]]);
  const element = panel({ "aria-labelledby": "videos-h", hidden: true }, h("h2", { id: "videos-h" }, "Videos"), grid({}, head, body));
  const look = async () => {
    const { preprocesses } = await get("videos", { signal });
    element.hidden = preprocesses.length === 0;
    put(body, [...preprocesses].reverse().map(row));
    if (preprocesses.some((work) => !ENDED.includes(work.stage))) setTimeout(again, 1000);
  };
  const again = watch(look, signal);
  again();
  return element;
}

function row(work) {
  const bar = h("span", { style: { width: `${Math.min(100, work.share * 100)}%` } });
  const cells = [
    h("span", { class: "mono", title: work.video }, work.video.slice(0, 12)),
    h("span", { class: work.stage === "failed" ? "chip bad" : "chip", title: work.error ?? "" }, work.stage),
    `${seconds(work.at_s)} of ${seconds(work.of_s)}`,
    [percent(work.share), h("span", { class: "meter" }, bar)],
    seconds(work.seconds),
  ];
  return h("tr", {}, cells.map((cell, i) => h("td", { class: i > 1 ? "num" : "" }, cell)));
}
