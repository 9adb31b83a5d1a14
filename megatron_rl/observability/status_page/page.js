/* SPDX-License-Identifier: Apache-2.0 */
/* Draws /status.json again and again. Texts enter the page as text only. */
"use strict";

const EVERY = 2000; // milliseconds between two questions
const LATE = 5; // seconds without a heartbeat before a rank is marked
const WIDTH = 400, HEIGHT = 170, LEFT = 54, RIGHT = 8, TOP = 10, BOTTOM = 22;
const COUNTS = [1, 3, 5, 10, 20, 50, 100]; // values whose mean is drawn, by place of the slider
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function draw(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
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

function smooth(points, count) { // the mean of the last values, as in curves.png
  let sum = 0;
  return points.map(([step, value], index) => {
    sum += value - (index >= count ? points[index - count][1] : 0);
    return [step, sum / Math.min(index + 1, count)];
  });
}

function scale(points, isLog) { // places of steps and values, and the values at which lines are drawn
  const steps = points.map((p) => p[0]), values = points.map((p) => p[1]);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low === high) [low, high] = isLog ? [low / 2, high * 2] :
    [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  const size = isLog ? Math.log : (value) => value;
  return {first, last, ticks: [low, isLog ? Math.sqrt(low * high) : (low + high) / 2, high],
    x: (step) => LEFT + (step - first) / (last - first || 1) * (WIDTH - LEFT - RIGHT),
    y: (value) => HEIGHT - BOTTOM - (size(value) - size(low)) / (size(high) - size(low)) * (HEIGHT - TOP - BOTTOM)};
}

function frame(picture, {first, last, ticks, x, y}) {
  for (const value of ticks) {
    picture.append(draw("line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value)}));
    picture.append(draw("text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, number(value, 3)));
  }
  picture.append(draw("text", {x: LEFT, y: HEIGHT - 5}, `step ${first}`));
  if (last !== first) {
    picture.append(draw("text", {x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end"}, String(last)));
  }
}

function line(points, color, {x, y}) {
  const places = points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
  if (places.length === 1) places.push(`${(x(points[0][0]) + 3).toFixed(1)},${y(points[0][1]).toFixed(1)}`);
  return draw("polyline", {class: color, points: places.join(" ")});
}

let pointer = null; // the chart and step under the mouse or a finger
for (const name of ["pointermove", "pointerdown", "pointerleave"]) { // on the page: charts come and go
  document.documentElement.addEventListener(name, (event) => {
    const picture = name === "pointerleave" ? null : event.target.closest("#charts svg");
    if (pointer) pointer.tell(null);
    pointer = null;
    if (picture) picture.follow(event);
  });
}

function chart({title, lines}) {
  const count = COUNTS[byId("smooth").value];
  const isLog = byId("log").checked && lines.some((l) => l.points.some((p) => p[1] > 0));
  const given = lines.map((l) => isLog ? l.points.filter((p) => p[1] > 0) : l.points);
  const places = scale(given.flat(), isLog);
  const picture = draw("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title});
  frame(picture, places);
  const smoothed = given.map((points) => smooth(points, count));
  given.forEach((points, index) => {
    if (count > 1 && points.length) picture.append(line(points, `line-${index % 5} raw`, places));
    if (points.length) picture.append(line(smoothed[index], `line-${index % 5}`, places));
  });
  const mark = draw("line", {class: "mark", y1: TOP, y2: HEIGHT - BOTTOM});
  const at = make("span", {class: "at"});
  const values = lines.map(() => make("b"));
  const caption = make("figcaption", {}, make("h3", {}, title), ...lines.map((l, index) =>
    make("span", {}, make("i", {class: `key key-${index % 5}`}), `${l.name} `, values[index])), at);
  const tell = (step) => { // the values at this step, or the last ones
    mark.toggleAttribute("hidden", step === null);
    if (step !== null) for (const name of ["x1", "x2"]) mark.setAttribute(name, places.x(step));
    at.textContent = step === null ? "" : `at step ${step}`;
    lines.forEach((l, index) => {
      const points = count > 1 && smoothed[index].length ? smoothed[index] : l.points;
      const found = step === null ? points[points.length - 1] : points.find((p) => p[0] === step);
      values[index].textContent = found ? number(found[1]) : "-";
    });
  };
  const steps = given.flat().map((p) => p[0]);
  picture.append(mark);
  picture.follow = (event) => {
    const box = picture.getBoundingClientRect();
    const distance = (step) => Math.abs(places.x(step) - (event.clientX - box.left) / box.width * WIDTH);
    pointer = {title, tell, step: steps.reduce((best, other) => distance(other) < distance(best) ? other : best)};
    tell(pointer.step);
  };
  if (pointer && pointer.title === title) pointer.tell = tell; // the chart has been drawn again
  tell(pointer && pointer.title === title ? pointer.step : null);
  return make("figure", {}, caption, picture);
}

function rank(entry) {
  if (entry.phase === undefined) return make("tr", {}, make("td", {}, String(entry.rank)), make("td", {}, "-"),
    make("td", {colspan: 5}, "no heartbeat yet"));
  const isLate = !entry.has_left && entry.silent_seconds > LATE;
  const heard = entry.has_left ? "has left" : isLate ? `${duration(entry.silent_seconds)} ago` : "now";
  return make("tr", {}, make("td", {}, String(entry.rank)), make("td", {}, String(entry.step)),
    make("td", {}, entry.phase), make("td", {}, entry.operation || ""), make("td", {}, duration(entry.seconds)),
    make("td", {}, entry.memory ? `${(entry.memory / 2 ** 30).toFixed(2)} GiB` : "-"),
    make("td", isLate ? {class: "late"} : {}, heard));
}

function sample(row) {
  const title = row.label ? `${row.label}, reward ` : "reward ";
  const parts = Object.entries(JSON.parse(row.reward_components || "{}")).map(([name, value]) => `${name} ${number(value)}`);
  const card = make("article", {}, make("p", {}, title, make("b", {}, row.reward),
    `${parts.length ? ` (${parts.join(", ")})` : ""}, finish ${row.finish_reason}`));
  for (const name of ["prompt", "response", "ground_truth"]) {
    if (name in row) card.append(make("h3", {}, name.replace("_", " ")), make("pre", {}, row[name]));
  }
  return card;
}

function show(status) {
  byId("steps").max = status.total_steps || 1;
  byId("steps").value = status.step;
  byId("steps-text").textContent = `step ${status.step} of ${status.total_steps}`;
  const rollout = status.rollout;
  byId("rollout").hidden = !rollout;
  if (rollout) {
    byId("responses").max = rollout.total;
    byId("responses").value = rollout.finished;
    byId("responses-text").textContent = `${rollout.finished} of ${rollout.total} responses, ` +
      `${Math.round(rollout.tokens_per_second).toLocaleString("en")} tokens/s`;
  }
  const facts = {phase: `${status.phase}, ${duration(status.phase_seconds)}`, elapsed: duration(status.elapsed_seconds),
    remaining: duration(status.remaining_seconds)};
  byId("facts").replaceChildren(...Object.entries(facts).map(
    ([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  byId("alarms-section").hidden = !status.alarms.length;
  byId("alarms").replaceChildren(...status.alarms.map(
    (alarm) => make("li", {}, `step ${alarm.step}: ${alarm.text}`)));
  showCharts(status.charts);
  byId("warnings-section").hidden = !status.warnings.length;
  byId("warnings").replaceChildren(...status.warnings.map(
    (entry) => make("li", {class: entry.level}, `${entry.time ? `${entry.time} ` : ""}${entry.level}: ${entry.text}`)));
  byId("config-section").hidden = !status.config;
  if (byId("config").textContent !== status.config) byId("config").textContent = status.config;
  byId("ranks-section").hidden = !status.ranks.length;
  byId("ranks").replaceChildren(...status.ranks.map(rank));
  showSamples(status.samples);
  document.title = `${status.step}/${status.total_steps} ${status.run}`;
}

let chartsShown = [];
function showCharts(charts) {
  chartsShown = charts;
  byId("view").hidden = !charts.length;
  const count = COUNTS[byId("smooth").value];
  byId("smooth-text").textContent = count > 1 ? `mean of ${count} values` : "off";
  byId("charts").replaceChildren(...charts.map(chart));
}
byId("view").addEventListener("input", () => showCharts(chartsShown));

let samplesShown = null;
function showSamples(samples) { // only when they change: a reader may be scrolling in them
  if (samples.step === samplesShown) return;
  samplesShown = samples.step;
  byId("samples-section").hidden = !samples.rows.length;
  byId("samples-step").textContent = String(samples.step);
  byId("samples").className = samples.rows.some((row) => row.label) ? "pairs" : "";
  byId("samples").replaceChildren(...samples.rows.map(sample));
}

let heardAt = new Date();
async function ask() {
  if (!document.hidden) {
    try {
      const answer = await fetch("status.json", {cache: "no-store"});
      if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
      show(await answer.json());
      heardAt = new Date();
      byId("lost").hidden = true;
    } catch (error) {
      byId("lost").hidden = false;
      byId("lost").textContent = `No answer since ${heardAt.toLocaleTimeString()}: the run has ended, or the ` +
        `connection is lost (${error.message}).`;
    }
    document.documentElement.dataset.ready = "yes";
  }
  setTimeout(ask, EVERY);
}

const frozen = byId("frozen"); // in a file that a run has left
if (frozen) {
  const status = JSON.parse(frozen.textContent);
  show(status);
  byId("lost").hidden = false;
  byId("lost").textContent = `This is a file, written at ${status.written}. It does not follow the run.`;
  document.documentElement.dataset.ready = "yes";
} else {
  ask();
}
