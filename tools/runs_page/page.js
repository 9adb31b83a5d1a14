/* SPDX-License-Identifier: Apache-2.0 */
/* Draws runs.json again and again, and chosen.json for the runs that are chosen. Texts enter the page as text only. */
"use strict";

const EVERY = 5000; // milliseconds between two questions
const MOST = 8, CURVE_HEIGHT = 220;
const NUMBERS = ["step", "validation", "best", "reward", "loss", "age"];
const byId = (id) => document.getElementById(id);
const form = byId("filters");
const chosen = new Map(); // name of a run -> its color, a number
const state = {step: new Map(), keys: [], set: "", at: 0, curves: [], names: []};

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const number = (value) => value === null || value === undefined ? "" : String(Number(value.toPrecision(4)));
function age(seconds) {
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${Math.round(seconds / size)} ${unit}`;
  }
  return `${seconds} s`;
}

const cells = {
  name: (row) => row.name,
  state: (row) => make("span", {class: row.state}, row.state),
  step: (row) => row.steps ? `${row.step}/${row.steps}` : String(row.step),
  validation: (row) => number(row.validation),
  best: (row) => (row.best === null || row.is_best_exact ? "" : "≥ ") + number(row.best),
  reward: (row) => number(row.reward),
  loss: (row) => number(row.loss),
  age: (row) => age(row.age),
  "differs in": (row) => Object.entries(row.differences).map(([key, value]) => `${key}=${value}`).join("  ") +
    (row.reason ? `${Object.keys(row.differences).length ? " — " : ""}${row.reason}` : ""),
};
const classOf = (name) => `column-${name.replace(" ", "-")}${NUMBERS.includes(name) ? " number" : ""}` +
  (name === "differs in" ? " wide" : "");

function drawRow(row) {
  const box = make("input", {type: "checkbox", "aria-label": `choose ${row.name}`});
  box.checked = chosen.has(row.name);
  const line = make("tr", {"data-name": row.name, class: box.checked ? "chosen" : ""}, make("td", {}, box));
  for (const [name, cell] of Object.entries(cells)) line.append(make("td", {class: classOf(name)}, cell(row)));
  if (box.checked) line.children[1].prepend(make("i", {class: `key key-${chosen.get(row.name)}`}));
  return line;
}

let listed = "";
function showRuns(found) {
  byId("mistake").hidden = !found.error;
  if (found.error) {
    byId("mistake").textContent = found.error;
    return;
  }
  for (const name of found.columns.filter((name) => !form.sort.querySelector(`[value="${name}"]`))) {
    form.sort.append(make("option", {value: name}, name));
  }
  if (!listed) form.sort.value = "age";
  byId("count").textContent = found.rows.length < found.count ? `${found.rows.length} of ${found.count} runs`
    : `${found.count} runs`;
  const now = JSON.stringify([found.rows, [...chosen]]);
  if (now !== listed) byId("rows").replaceChildren(...found.rows.map(drawRow));
  byId("list").classList.toggle("no-loss", found.rows.every((row) => row.loss === null));
  listed = now;
  state.rows = found;
  const moved = found.rows.some((row) => chosen.has(row.name) && state.step.get(row.name) !== row.step);
  for (const row of found.rows) state.step.set(row.name, row.step);
  if (moved && chosen.size) showChosen();
}

async function ask(file, query) {
  const answer = await fetch(`${file}?${new URLSearchParams(query)}`, {cache: "no-store"});
  if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
  byId("lost").hidden = true;
  return answer.json();
}

function lose(error) {
  byId("lost").hidden = false;
  byId("lost").textContent = `No answer: the server has ended, or the connection is lost (${error.message}).`;
}

const turn = {runs: 0, chosen: 0}; // of the newest questions: an older answer is not shown
async function refresh() {
  const mine = ++turn.runs, order = `${form.descending.checked ? "-" : ""}${form.sort.value || "age"}`;
  try {
    const found = await ask("runs.json", {filter: form.filter.value, sort: order});
    if (mine === turn.runs) showRuns(found);
  } catch (error) {
    lose(error);
  }
}

async function showChosen() {
  const mine = ++turn.chosen;
  byId("chosen").hidden = !chosen.size;
  byId("hint").hidden = chosen.size > 0;
  if (state.rows) showRuns(state.rows);
  if (!chosen.size) return;
  const query = [...[...chosen.keys()].map((name) => ["run", name]), ...state.keys.map((key) => ["key", key]),
    ["set", state.set], ["at", String(state.at)]];
  try {
    const found = await ask("chosen.json", query);
    if (mine !== turn.chosen) return;
    byId("legend").replaceChildren(...found.names.map((name) =>
      make("span", {}, make("i", {class: `key key-${chosen.get(name)}`}), name)));
    state.names = found.names;
    showCurves(found);
    showDifferences(found);
    showSamples(found);
    document.documentElement.dataset.chosen = found.names.join(" ");
  } catch (error) {
    lose(error);
  }
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function smooth(values, count) { // the mean of the last values
  const last = [];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    last.push(value);
    if (last.length > count) last.shift();
    return last.reduce((a, b) => a + b, 0) / last.length;
  });
}

let plots = [];
function showCurves(found) {
  state.curves = found.curves;
  const known = new Set(found.curves.map((curve) => curve.key));
  byId("more").replaceChildren(make("option", {value: ""}, "…"),
    ...found.keys.filter((key) => !known.has(key)).map((key) => make("option", {value: key}, key)));
  drawCurves();
}

function drawCurves() {
  for (const plot of plots) plot.destroy();
  plots = [];
  byId("curves").replaceChildren();
  const axis = {stroke: css("--dim"), grid: {stroke: css("--line"), width: 1}, ticks: {stroke: css("--line"), width: 1}};
  for (const {key, lines} of state.curves) {
    const present = lines.map((points, index) => ({points, name: state.names[index]})).filter((x) => x.points.length);
    if (!present.length) continue;
    const figure = make("figure", {"data-key": key}, make("figcaption", {}, key));
    byId("curves").append(figure);
    const joined = uPlot.join(present.map(({points}) => [points.map((p) => p[0]), points.map((p) => p[1])]));
    const data = [joined[0], ...joined.slice(1).map((values) => smooth(values, Number(byId("smooth").value)))];
    const series = present.map(({points, name}) => ({label: name, stroke: css(`--run-${chosen.get(name)}`), width: 1.8,
      spanGaps: true, points: {show: points.length < 15}, value: (_, value) => value === null ? "-" : number(value)}));
    const last = data[0].length - 1; // whose values the legend has while no cursor is in the plot
    const rest = (plot) => plot.cursor.idx === null || plot.cursor.idx === undefined ? plot.setLegend({idx: last}) : null;
    plots.push(new uPlot({hooks: {ready: [rest], setCursor: [rest]}, width: figure.clientWidth - 20, height: CURVE_HEIGHT, scales: {x: {time: false}},
      cursor: {sync: {key: "step"}}, axes: [axis, {...axis, size: 62, values: (_, ticks) => ticks.map(number)}],
      series: [{label: "step"}, ...series]}, data, figure));
  }
}

function showDifferences(found) {
  byId("differences-section").hidden = found.names.length < 2;
  byId("differences-titles").replaceChildren(make("th", {}, "setting"), ...found.names.map((name) =>
    make("th", {}, make("i", {class: `key key-${chosen.get(name)}`}), name)));
  const lines = found.differences.map(({key, values}) =>
    make("tr", {}, make("td", {}, key), ...values.map((value) => make("td", {}, value))));
  byId("differences").replaceChildren(...(lines.length ? lines : [make("tr", {}, make("td", {}, "none"))]));
}

function answers(run, name) {
  const card = make("article", {}, make("h3", {}, make("i", {class: `key key-${chosen.get(name)}`}), `${name}, step ${run.step}`));
  for (const row of run.rows) {
    card.append(make("p", {}, row.label ? `${row.label}, ` : "", "reward ", make("b", {}, number(row.reward)),
      `, finish ${row.finish_reason}`), make("pre", {}, row.response));
  }
  return card;
}

function showSamples(found) {
  const {count, first, prompts} = found.samples;
  byId("set").replaceChildren(...found.sets.map((name) => make("option", {value: name}, name === "rollouts" ? "training" : name)));
  byId("set").value = state.set = found.set;
  byId("before").disabled = first === 0;
  byId("after").disabled = first + prompts.length >= count;
  byId("place").textContent = count ? `prompts ${first + 1} to ${first + prompts.length} of ${count}`
    : "no prompt is logged in all of these runs; validation sets have the same prompts in all runs";
  byId("samples").replaceChildren(...prompts.map(({prompt, truth, runs}) => make("div", {class: "prompt"},
    make("pre", {}, prompt), truth ? make("p", {class: "dim"}, `ground truth: ${truth}`) : "",
    make("div", {class: "answers"}, ...runs.map((run, index) => answers(run, found.names[index]))))));
}

byId("titles").append(make("th"), ...Object.keys(cells).map((name) => make("th", {class: classOf(name).replace(" wide", "")}, name)));
byId("rows").addEventListener("click", (event) => {
  const line = event.target.closest("tr"), name = line.dataset.name;
  if (chosen.has(name)) chosen.delete(name);
  else if (chosen.size < MOST) chosen.set(name, [...Array(MOST).keys()].find((color) => ![...chosen.values()].includes(color)));
  state.at = 0;
  showChosen();
});
form.addEventListener("input", refresh);
form.addEventListener("submit", (event) => event.preventDefault());
byId("smooth").addEventListener("input", drawCurves);
byId("more").addEventListener("input", () => {
  state.keys = [...state.curves.map((curve) => curve.key), byId("more").value];
  showChosen();
});
byId("set").addEventListener("input", () => {
  [state.set, state.at] = [byId("set").value, 0];
  showChosen();
});
for (const [id, step] of [["before", -4], ["after", 4]]) {
  byId(id).addEventListener("click", () => {
    state.at = Math.max(0, state.at + step);
    showChosen();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCurves);
addEventListener("resize", () => plots.forEach((plot) => plot.setSize({width: plot.root.parentElement.clientWidth - 20, height: CURVE_HEIGHT})));

async function follow() {
  if (!document.hidden) await refresh();
  document.documentElement.dataset.ready = "yes";
  setTimeout(follow, EVERY);
}
follow();
