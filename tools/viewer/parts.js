// SPDX-License-Identifier: Apache-2.0
// What page.js is made of: reading, elements, colors, and charts.
"use strict";
const BARS = 240, HEIGHT = 36; // of a chart, which has a column for one step or several
let served = null; // what the server sent, if the page has no data of its own
const read = async (id) => { // JSON, compressed by gzip, in base64
  if (!document.getElementById(id)) {
    served ??= await (await fetch(`rollouts.json${location.search}`)).json();
    if (served.error) throw new Error(served.error);
    return id === "index" ? served.index : served.chunks[Number(id.slice("chunk-".length))];
  }
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
};
const make = (tag, className, text) => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
};

const BLUE = "33,102,172", ORANGE = "217,95,2", GREEN = "0,128,96", FULL = 0.7;
const TRANSFORMS = { none: (x) => x, negative: (x) => -x, log: (x) => Math.log(Math.max(x, 1e-30)) };
const shade = (kind, t) => {
  const strength = Math.min(Math.abs(t), 1) * FULL;
  return `rgba(${kind !== "diverging" ? GREEN : t < 0 ? ORANGE : BLUE},${strength.toFixed(3)})`;
};
const colorOf = (mode, value) =>
  mode.kind === "flag" ? (value ? shade("diverging", -1) : "")
    : shade(mode.kind, TRANSFORMS[mode.transform](value) / mode.scale);
const round = (x) => (x === null ? "none" : String(Number(x.toPrecision(5))));

const visible = (text) => text.replace(/[\x00-\x09\x0b-\x1f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
  .replace(/\n/g, "⏎\n");

const shape = (name, attributes) => {
  const element = document.createElementNS(document.querySelector("svg").namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
};

// A column of numbers at each step, of the rollouts in `order`: the mean, and the range of all but a tenth at either end.
function drawChart(label, column, order, step, pick) {
  if (!step.length) return make("figure", "");
  const firstStep = step.reduce((a, b) => Math.min(a, b), Infinity);
  const lastStep = step.reduce((a, b) => Math.max(a, b), -Infinity);
  const perBar = Math.max(1, Math.ceil((lastStep - firstStep + 1) / BARS));
  const bars = new Map();
  for (const i of order) {
    const bar = Math.floor((step[i] - firstStep) / perBar);
    if (column[i] !== null) (bars.get(bar) ?? bars.set(bar, []).get(bar)).push(column[i]);
  }
  const figure = make("figure", "");
  const found = [...bars].map(([bar, values]) => {
    const sorted = Float64Array.from(values).sort(), at = (q) => sorted[Math.round(q * (sorted.length - 1))];
    return { bar, low: at(0.1), high: at(0.9), mean: sorted.reduce((a, b) => a + b, 0) / sorted.length };
  });
  const lowest = Math.min(...found.map((x) => x.low)), highest = Math.max(...found.map((x) => x.high));
  const y = (value) => (HEIGHT - 2) * (1 - (value - lowest) / (highest - lowest || 1));
  const width = Math.floor((lastStep - firstStep) / perBar) + 1;
  const chart = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, preserveAspectRatio: "none" });
  for (const { bar, low, high, mean } of found) {
    const from = firstStep + bar * perBar, to = from + perBar - 1;
    const mark = shape("g", { "data-from": from, "data-to": to });
    mark.append(shape("rect", { class: "whole", x: bar, y: 0, width: 1, height: HEIGHT }),
      shape("rect", { class: "range", x: bar + 0.1, y: y(high), width: 0.8, height: Math.max(y(low) - y(high), 1) }),
      shape("rect", { class: "mean", x: bar, y: y(mean), width: 1, height: 2 }));
    const title = shape("title", {});
    title.textContent = `step ${from}${to > from ? ` to ${to}` : ""}: ${label} ${round(mean)}, `
      + `most of them between ${round(low)} and ${round(high)}`;
    mark.append(title);
    chart.append(mark);
  }
  const range = found.length ? `${round(lowest)} to ${round(highest)}` : "none";
  figure.append(make("figcaption", "", `${label} by step (${range})`), chart);
  if (pick) chart.addEventListener("click", (event) => {
    const bar = event.target.closest("[data-from]");
    if (bar) pick(bar.dataset.from, bar.dataset.to);
  });
  return figure;
}

// A file to keep, made from the page.
function saveAs(name, text) {
  const link = make("a", "");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
