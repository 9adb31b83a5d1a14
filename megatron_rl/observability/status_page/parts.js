/* SPDX-License-Identifier: Apache-2.0 */
/* Elements, numbers and charts of the page. */
"use strict";

const HEIGHT = 180, COLORS = 8;
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  if (whole < 60) return `${whole} s`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${whole % 60} s`;
}

function number(value, digits = 4) {
  const size = Math.abs(value);
  if (size && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(digits)));
}

function smooth(values, count) { // the mean of the last values, as in curves.png; steps without a value keep none
  const last = [];
  return values.map((value) => {
    if (value === null) return null;
    last.push(value);
    if (last.length > count) last.shift();
    return last.reduce((a, b) => a + b, 0) / last.length;
  });
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const faded = (hex) => `${hex}2e`;

const shown = new Map(); // title -> chart
let zoom = null; // the steps that all charts show, null for all

function zoomTo(steps) {
  zoom = steps;
  byId("all-steps").hidden = !steps;
  for (const {plot} of shown.values()) applyZoom(plot);
}

function applyZoom(plot) {
  const steps = plot.data[0], all = [steps[0], steps[steps.length - 1]];
  const [min, max] = zoom ?? (all[0] === all[1] ? [all[0] - 1, all[1] + 1] : all);
  if (plot.scales.x.min !== min || plot.scales.x.max !== max) plot.setScale("x", {min, max});
}

function axes(isLog, unit) {
  const font = "11px system-ui, sans-serif", stroke = color("dim"), grid = {stroke: color("line"), width: 1};
  const incrs = [1, 2, 5].flatMap((x) => [0, 1, 2, 3, 4, 5, 6].map((n) => x * 10 ** n)).sort((a, b) => a - b);
  const common = {font, stroke, grid, ticks: {...grid, size: 4}};
  const words = (values) => values.map((value) => value === null ? "" : number(value) + unit);
  return [{...common, incrs, space: 46, size: 26, values: (_, all) => all.map((step) => String(step))},
    {...common, size: 58, space: isLog ? 22 : 28, values: (_, all) => words(all)}];
}

/* One chart: lines of values at steps, with bands and raw values behind them, or areas on top of each other. */
class Chart {
  constructor(title) {
    this.values = [];
    this.at = make("span", {class: "at"});
    this.caption = make("figcaption");
    this.box = make("div", {class: "plot", role: "img"});
    this.figure = make("figure", {}, this.caption, this.box);
    this.title = title;
  }

  /* lines: [{name, values, shown, raw, low, high}], all of one length; kind: "lines" or "areas". */
  show(steps, lines, kind, isLog, unit) {
    const key = JSON.stringify([lines.map((l) => [l.name, !!l.raw, !!l.low]), kind, isLog, document.documentElement.dataset.colors]);
    this.steps = steps;
    this.lines = lines;
    this.unit = unit;
    this.drawn = lines.map((line, index) => ({...line, index}));
    if (kind === "areas") this.drawn.reverse(); // the highest first, under the others
    const data = [steps, ...this.drawn.flatMap((l) => [l.shown, ...(l.raw ? [l.raw] : []), ...(l.low ? [l.low, l.high] : [])])];
    if (key !== this.key) this.build(key, data, kind, isLog, unit);
    else this.plot.setData(data, false);
    this.plot.setScale("y", {min: null, max: null});
    applyZoom(this.plot);
    this.tell(this.plot.cursor.idx);
    const last = lines.map((l) => `${l.name} ${number(l.values.findLast((x) => x !== null) ?? NaN)}`);
    this.box.setAttribute("aria-label", `${this.title} until step ${steps[steps.length - 1]}: ${last.join(", ")}`);
  }

  build(key, data, kind, isLog, unit) {
    this.key = key;
    this.plot?.destroy();
    const series = [{}], bands = [];
    this.drawn.forEach((line) => {
      const {index} = line;
      const stroke = color(`line-${index % COLORS}`), dash = index >= COLORS ? [6, 3] : undefined;
      const points = {show: (plot, _, first, last) => last - first < 25, size: 4, stroke, fill: stroke};
      series.push(kind === "areas" ? {stroke, fill: stroke, width: 0, points: {show: false}}
        : {stroke, dash, width: 1.6, spanGaps: true, points});
      if (line.raw) series.push({stroke: faded(stroke), width: 1, spanGaps: true, points: {show: false}});
      if (line.low) {
        bands.push({series: [series.length + 1, series.length], fill: faded(stroke)});
        for (let i = 0; i < 2; i++) series.push({width: 0, spanGaps: true, points: {show: false}});
      }
    });
    const y = {auto: true, distr: isLog ? 3 : 1, range: (_, low, high) => this.range(low, high, kind, isLog)};
    this.plot = new uPlot({
      width: Math.max(this.box.clientWidth, 200), height: HEIGHT, series, bands, axes: axes(isLog, unit),
      scales: {x: {time: false, auto: false}, y}, legend: {show: false}, padding: [8, 8, 0, 0],
      cursor: {y: false, points: {show: kind !== "areas", size: 6}, drag: {x: true, y: false, setScale: false},
        sync: {key: "steps", scales: ["x", null]}},
      hooks: {setCursor: [(plot) => this.tell(plot.cursor.idx)], setSelect: [(plot) => this.select(plot)]},
    }, data, this.box);
    this.plot.over.addEventListener("dblclick", () => zoomTo(null));
    this.values = this.lines.map(() => make("b"));
    this.caption.replaceChildren(make("h3", {}, this.title), ...this.lines.map((line, index) =>
      make("span", {}, make("i", {class: `key key-${index % COLORS}`}), `${line.name} `, this.values[index])), this.at);
  }

  range(low, high, kind, isLog) {
    if (low === null || high === null) return isLog ? [0.1, 1] : [0, 1];
    if (isLog) return [low / 1.15, high * 1.15];
    if (kind === "areas") return [0, uPlot.rangeNum(0, high, 0.05, true)[1]];
    if (low === high) return [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
    return uPlot.rangeNum(low, high, 0.08, true);
  }

  select(plot) {
    const {left, width} = plot.select;
    if (width < 8) return;
    const [from, to] = [left, left + width].map((x) => Math.round(plot.posToVal(x, "x")));
    plot.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
    if (to > from) zoomTo([from, to]);
  }

  tell(index) { // the values at this place, or the last ones
    const isPointed = index !== null && index !== undefined && index < this.steps.length;
    this.at.textContent = isPointed ? `at step ${this.steps[index]}` : "";
    const all = this.lines.map((line) => isPointed ? line.values[index] : line.values.findLast((x) => x !== null) ?? null);
    const sum = all.reduce((a, b) => a + b, 0);
    this.lines.forEach((line, k) => {
      const share = this.unit && sum ? ` s, ${Math.round(100 * all[k] / sum)} %` : "";
      this.values[k].textContent = all[k] === null ? "-" : `${number(all[k], this.unit ? 3 : 4)}${share}`;
    });
  }
}

new ResizeObserver(() => {
  for (const {plot, box} of shown.values()) if (box.clientWidth) plot.setSize({width: box.clientWidth, height: HEIGHT});
}).observe(document.documentElement);
