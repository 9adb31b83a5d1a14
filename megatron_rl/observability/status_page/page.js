/* SPDX-License-Identifier: Apache-2.0 */
/* Draws /status.json again and again. Texts enter the page as text only. */
"use strict";

const EVERY = 2000; // milliseconds between two questions
const LATE = 5; // seconds without a heartbeat before a rank is marked
const WIDTH = 400, HEIGHT = 170, LEFT = 48, RIGHT = 8, TOP = 10, BOTTOM = 22;
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

function number(value) {
  const size = Math.abs(value);
  if (size && (size < 0.001 || size >= 1e6)) return value.toExponential(1);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function chart({title, lines}) {
  const points = lines.flatMap((line) => line.points);
  const steps = points.map((p) => p[0]), values = points.map((p) => p[1]);
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (low === high) [low, high] = [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  const x = (step) => LEFT + (step - first) / (last - first || 1) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
  const picture = draw("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title});
  for (const value of [low, (low + high) / 2, high]) {
    picture.append(draw("line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value)}));
    picture.append(draw("text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, number(value)));
  }
  picture.append(draw("text", {x: LEFT, y: HEIGHT - 5}, `step ${first}`));
  picture.append(draw("text", {x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end"}, String(last)));
  const caption = make("figcaption", {}, make("h3", {}, title));
  lines.forEach((line, index) => {
    const color = index % 5, end = line.points[line.points.length - 1];
    const places = line.points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
    if (places.length === 1) places.push(`${(x(end[0]) + 3).toFixed(1)},${y(end[1]).toFixed(1)}`);
    picture.append(draw("polyline", {class: `line-${color}`, points: places.join(" ")}));
    caption.append(make("span", {}, make("i", {class: `key key-${color}`}), `${line.name} `,
      make("b", {}, number(end[1]))));
  });
  return make("figure", {}, caption, picture);
}

function rank(entry) {
  if (entry.phase === undefined) return make("tr", {}, make("td", {}, String(entry.rank)), make("td", {}, "-"),
    make("td", {colspan: 4}, "no heartbeat yet"));
  const isLate = !entry.has_left && entry.silent_seconds > LATE;
  const heard = entry.has_left ? "has left" : isLate ? `${duration(entry.silent_seconds)} ago` : "now";
  return make("tr", {}, make("td", {}, String(entry.rank)), make("td", {}, String(entry.step)),
    make("td", {}, entry.phase), make("td", {}, entry.operation || ""), make("td", {}, duration(entry.seconds)),
    make("td", isLate ? {class: "late"} : {}, heard));
}

function sample(row) {
  const card = make("article", {}, make("p", {}, "reward ", make("b", {}, row.reward), `, finish ${row.finish_reason}`));
  for (const name of ["prompt", "response", "ground_truth"]) {
    card.append(make("h3", {}, name.replace("_", " ")), make("pre", {}, row[name]));
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
  byId("charts").replaceChildren(...status.charts.map(chart));
  byId("ranks-section").hidden = !status.ranks.length;
  byId("ranks").replaceChildren(...status.ranks.map(rank));
  showSamples(status.samples);
  document.title = `${status.step}/${status.total_steps} ${status.run}`;
}

let samplesShown = null;
function showSamples(samples) { // only when they change: a reader may be scrolling in them
  if (samples.step === samplesShown) return;
  samplesShown = samples.step;
  byId("samples-section").hidden = !samples.rows.length;
  byId("samples-step").textContent = String(samples.step);
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
