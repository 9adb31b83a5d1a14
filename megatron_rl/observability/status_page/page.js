/* SPDX-License-Identifier: Apache-2.0 */
/* Draws /status.json again and again. Texts enter the page as text only. */
"use strict";

const EVERY = 2000; // milliseconds between two questions
const LATE = 5; // seconds without a heartbeat before a rank is marked
const RECENT = 10; // records whose means are compared at a glance
const MOST_CELLS = 256; // of the map of ranks with words in them
const COUNTS = [1, 3, 5, 10, 20, 50, 100]; // values whose mean is drawn, by place of the slider
const DOES = {rollout: "generating", reward: "scoring", update: "updating the policy", update_critic: "updating the critic",
  old_logprobs: "computing log-probs of the policy", ref_logprobs: "computing log-probs of the reference",
  teachers: "computing log-probs of the teachers", values: "computing values of the critic", validation: "validating",
  reshard: "moving weights to the engines", verify: "comparing weights", save: "saving a checkpoint", capture: "capturing the step"};
const ME = crypto.getRandomValues(new Uint32Array(1))[0].toString(36); // the name of this page at the server

/* Charts. */

function toLines(lines, isLog) { // values of all lines at the steps of any line
  const steps = [...new Set(lines.flatMap((l) => l.points.map((p) => p[0])))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const count = COUNTS[byId("smooth").value];
  return [steps, lines.map(({name, points}) => {
    const column = (k) => {
      const found = new Array(steps.length).fill(null);
      for (const p of points) if (!isLog || p[k] > 0) found[place.get(p[0])] = p[k];
      return found;
    };
    const values = column(1), hasBand = points.some((p) => p.length > 2);
    const line = {name, values, shown: values};
    if (count > 1) Object.assign(line, {values: smooth(values, count), raw: values});
    line.shown = line.values;
    if (hasBand) Object.assign(line, {low: smooth(column(2), count), high: smooth(column(3), count)});
    return line;
  })];
}

function toAreas({steps, seconds}) { // the largest phase at the bottom; the top one is drawn first, under the others
  let sum = steps.map(() => 0);
  const lines = Object.entries(seconds).map(([name, values]) => {
    sum = sum.map((x, i) => x + values[i]);
    return {name, values, shown: sum};
  });
  return [steps, lines];
}

let chartsShown = null;
function showCharts(status) {
  chartsShown = status;
  const found = new Map();
  const wantsLog = byId("log").checked;
  const order = status.charts.map((c) => c.title);
  const put = (title, steps, lines, kind, isLog, unit) => {
    const chart = shown.get(title) ?? new Chart(title);
    found.set(title, () => chart.show(steps, lines, kind, isLog, unit));
    shown.set(title, chart);
  };
  if (status.times.steps.length) {
    order.splice(Math.min(2, order.length), 0, "where the time goes");
    put("where the time goes", ...toAreas(status.times), "areas", false, " s");
  }
  for (const {title, lines} of status.charts) {
    const isLog = wantsLog && lines.some((l) => l.points.some((p) => p[1] > 0));
    put(title, ...toLines(lines, isLog), "lines", isLog, "");
  }
  for (const title of shown.keys()) if (!found.has(title)) shown.delete(title);
  const figures = order.map((title) => shown.get(title).figure);
  const present = [...byId("charts").children];
  if (figures.length !== present.length || figures.some((f, i) => f !== present[i])) byId("charts").replaceChildren(...figures);
  byId("view").hidden = !order.length;
  const count = COUNTS[byId("smooth").value];
  byId("smooth-text").textContent = count > 1 ? `mean of ${count} values` : "off";
  for (const draw of found.values()) draw();
}
const drawAgain = () => { if (chartsShown) showCharts(chartsShown); };
byId("view").addEventListener("input", drawAgain);
byId("all-steps").addEventListener("click", () => zoomTo(null));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
  document.documentElement.dataset.colors = event.matches;
  drawAgain();
});

/* What a reader wants to know first. */

const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;

function glance(status) {
  const found = [], lines = status.charts.flatMap((c) => c.lines);
  for (const {name, points} of lines) {
    const isReward = ["reward/mean", "sft/loss", "preference/loss"].includes(name);
    if (!isReward && !/^validation\/.*\/accuracy$/.test(name)) continue;
    const values = points.map((p) => p[1]), some = isReward ? Math.min(RECENT, Math.ceil(values.length / 3)) : 1;
    const first = mean(values.slice(0, some)), last = mean(values.slice(-some));
    const best = isReward ? "" : `, best ${number(Math.max(...values))}`;
    const when = some > 1 ? `means of ${some} steps` : `step ${points[0][0]} to ${points[points.length - 1][0]}`;
    found.push([name, values.length > 1 ? `${number(first)} → ${number(last)}` : number(last), `${when}${best}`]);
  }
  const {steps, seconds} = status.times;
  if (steps.length) {
    const recent = Object.entries(seconds).map(([name, values]) => [name, mean(values.slice(-RECENT))]);
    const all = recent.reduce((sum, entry) => sum + entry[1], 0);
    const most = recent.sort((a, b) => b[1] - a[1]).slice(0, 3).filter((x) => x[1] > 0.02 * all);
    found.push(["seconds per step", number(all, 3), most.map(([name, x]) => `${name} ${Math.round(100 * x / all)} %`).join(", ")]);
  }
  const wrong = status.alarms.length;
  found.push(["alarms", wrong ? String(wrong) : "none", wrong ? "see above" : status.warnings.length ?
    `${status.warnings.length} warning${status.warnings.length > 1 ? "s" : ""} below` : "no warnings"]);
  byId("glance-section").hidden = !steps.length && found.length < 2;
  byId("glance").replaceChildren(...found.map(([name, value, more]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, more)))));
}

/* What the run is doing. */

function describeNow(status) { // text, and a part of a whole if it is known
  const inner = status.phase.split(", ").pop(), does = status.phase.split(", ").map((name) => DOES[name] ?? name).join(": ");
  const {rollout} = status;
  if (rollout) return [`${does}: ${rollout.finished} of ${rollout.total} responses, ` +
    `${Math.round(rollout.tokens_per_second).toLocaleString("en")} tokens/s`, rollout.finished, rollout.total];
  if (status.part) return [`${does}: ${status.part[0]} of ${status.part[1]} on rank 0`, ...status.part];
  const time = status.phase_seconds ? `, ${duration(status.phase_seconds)}` : "";
  if (inner === "update" && status.all_updates) {
    return [`${does}: ${status.updates} of ${status.all_updates} optimizer steps${time}`, status.updates, status.all_updates];
  }
  return [`${does}${time}`];
}

const ENDS = {running: "running", finished: "finished", stopped: "stopped", failed: "failed"};

function showNow(status) {
  const {state} = status, isRunning = state.name === "running";
  byId("state").textContent = ENDS[state.name] + (isRunning && byId("frozen") ? ` at ${status.written}` : "");
  byId("state").className = state.name;
  byId("end").hidden = !state.text;
  byId("end").textContent = state.text;
  byId("steps").max = status.total_steps || 1;
  byId("steps").value = status.step;
  byId("steps-text").textContent = `step ${status.step} of ${status.total_steps}`;
  byId("now").hidden = !isRunning;
  const [text, part, whole] = describeNow(status);
  byId("now-text").textContent = text;
  if (whole) Object.assign(byId("part"), {max: whole, value: part});
  else byId("part").removeAttribute("value"); // a bar without a length
  const facts = {elapsed: duration(status.elapsed_seconds)};
  if (isRunning) Object.assign(facts, {remaining: duration(status.remaining_seconds), "last line": status.line});
  facts.directory = status.directory;
  byId("facts").replaceChildren(...Object.entries(facts).map(
    ([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}

/* Ranks and engines. */

function rank(entry) {
  if (entry.phase === undefined) return make("tr", {}, make("td", {}, String(entry.rank)), make("td", {}, "-"),
    make("td", {colspan: 5}, "no heartbeat yet"));
  const late = isLate(entry);
  const heard = entry.has_left ? "has left" : late ? `${duration(entry.silent_seconds)} ago` : "now";
  return make("tr", {}, make("td", {}, String(entry.rank)), make("td", {}, String(entry.step)),
    make("td", {}, entry.phase), make("td", {}, entry.operation || ""), make("td", {}, duration(entry.seconds)),
    make("td", {}, entry.memory ? `${(entry.memory / 2 ** 30).toFixed(2)} GiB` : "-"),
    make("td", late ? {class: "late"} : {}, heard));
}

const isLate = (entry) => entry.phase !== undefined && !entry.has_left && entry.silent_seconds > LATE;

function member({name, state, version, newest_version, requests, silent_seconds}) { // an engine outside the job
  const isLate = state === "lost" || silent_seconds > LATE, time = duration(silent_seconds);
  const words = state === "lost" ? [`lost ${time} ago`] : [`weights ${version ?? "none"} of ${newest_version}`,
    `${requests} requests`, isLate ? `silent for ${time}` : state];
  return make("div", {class: `place engine${isLate ? " late" : ""}`, title: [name, ...words].join("\n")},
    make("b", {}, name), ...words.map((word) => make("span", {}, word)));
}

function showRanks(status) {
  const beats = new Map(status.ranks.map((entry) => [entry.rank, entry]));
  const hasMap = status.places.length > 1 || status.members.length > 0;
  byId("ranks-section").hidden = !status.ranks.length && !hasMap;
  byId("ranks-table").hidden = !status.ranks.length;
  byId("ranks").replaceChildren(...status.ranks.map(rank));
  byId("places").className = status.places.length > MOST_CELLS ? "small" : "";
  byId("places").replaceChildren(...(hasMap ? status.places : []).map(({rank: number, roles}) => {
    const beat = beats.get(number), words = Object.entries(roles).map(([name, where]) => `${name} ${where}`.trim());
    const kind = Object.keys(roles).every((name) => name.startsWith("engine")) ? "engine" :
      Object.keys(roles).some((name) => name.startsWith("engine")) ? "both" : "trainer";
    const now = !beat ? "" : isLate(beat) ? `silent for ${duration(beat.silent_seconds)}` : beat.phase ?? "";
    return make("div", {class: `place ${kind}${beat && isLate(beat) ? " late" : ""}`, title: [`rank ${number}`, ...words, now].join("\n")},
      make("b", {}, `rank ${number}`), ...words.map((word) => make("span", {}, word)), make("em", {}, now));
  }), ...status.members.map(member));
}

/* Samples. */

const shade = (value, scale, isDiverging) => {
  const [r, g, b] = !isDiverging ? [0, 128, 96] : value < 0 ? [217, 95, 2] : [33, 102, 172];
  return `rgba(${r},${g},${b},${(Math.min(Math.abs(value) / (scale || 1), 1) * 0.6).toFixed(3)})`;
};

function tokens(row, column, scale) {
  const box = make("pre", {class: "tokens"});
  for (const token of row.tokens) {
    const value = token[column], span = make("span", {}, token[0]);
    if (value !== null) span.style.background = shade(value, scale, column === 1);
    span.title = `advantage ${token[1] === null ? "none" : number(token[1])}, log-prob ${token[2] === null ? "none" : number(token[2])}`;
    box.append(span);
  }
  if (row.num_tokens > row.tokens.length) box.append(` [${row.num_tokens - row.tokens.length} more tokens]`);
  return box;
}

function sample(row, column, scale) {
  const title = row.label ? `${row.label}, reward ` : "reward ";
  const parts = Object.entries(JSON.parse(row.reward_components || "{}")).map(([name, value]) => `${name} ${number(value)}`);
  const card = make("article", {}, make("p", {}, title, make("b", {}, row.reward),
    `${parts.length ? ` (${parts.join(", ")})` : ""}, finish ${row.finish_reason}`));
  for (const name of ["prompt", "response", "ground_truth"]) {
    if (!(name in row)) continue;
    const shown = name === "response" && row.tokens ? tokens(row, column, scale) : make("pre", {}, row[name]);
    card.append(make("h3", {}, name.replace("_", " ")), shown);
  }
  return card;
}

let samplesShown = null;
function showSamples(samples) { // only when they change: a reader may be scrolling in them
  const key = `${samples.step} ${byId("color").value}`;
  if (key === samplesShown) return;
  samplesShown = key;
  const column = Number(byId("color").value);
  const values = samples.rows.flatMap((row) => (row.tokens ?? []).map((token) => Math.abs(token[column] ?? 0)));
  byId("samples-section").hidden = !samples.rows.length;
  byId("samples-view").hidden = !values.length;
  byId("samples-step").textContent = String(samples.step);
  byId("samples").className = samples.rows.some((row) => row.label) ? "pairs" : "";
  byId("samples").replaceChildren(...samples.rows.map((row) => sample(row, column, Math.max(...values, 0))));
}
byId("color").addEventListener("input", () => showSamples(chartsShown.samples));

/* Everything. */

function show(status) {
  showNow(status);
  byId("alarms-section").hidden = !status.alarms.length;
  byId("alarms").replaceChildren(...status.alarms.map((alarm) => make("li", {}, `step ${alarm.step}: ${alarm.text}`,
    ...(alarm.remedy ? [make("div", {}, make("b", {}, "What to do: "), alarm.remedy)] : []))));
  glance(status);
  showCharts(status);
  byId("warnings-section").hidden = !status.warnings.length;
  byId("warnings").replaceChildren(...status.warnings.map(
    (entry) => make("li", {class: entry.level}, `${entry.time ? `${entry.time} ` : ""}${entry.level}: ${entry.text}`)));
  byId("config-section").hidden = !status.config;
  if (byId("config").textContent !== status.config) byId("config").textContent = status.config;
  showRanks(status);
  showSamples(status.samples);
  const {name} = status.state;
  document.title = `${name === "running" ? "" : `${name} `}${status.step}/${status.total_steps} ${status.run}`;
}

let heardAt = new Date(), hasEnded = false, last = null;
async function ask() {
  if (!document.hidden && !hasEnded) {
    try {
      const answer = await fetch(`status.json?${ME}`, {cache: "no-store"});
      if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
      last = await answer.json();
      show(last);
      hasEnded = last.state.name !== "running";
      heardAt = new Date();
      byId("lost").hidden = true;
    } catch (error) {
      byId("lost").hidden = false;
      byId("lost").textContent = `No answer since ${heardAt.toLocaleTimeString()}: the connection is lost, or the ` +
        `process has been killed (${error.message}).` + (last ? ` See status.html and logs/rank0.log in ${last.directory}.` : "");
    }
    document.documentElement.dataset.ready = "yes";
  }
  setTimeout(ask, EVERY);
}

const frozen = byId("frozen"); // in a file that a run has left
if (frozen) {
  const status = JSON.parse(frozen.textContent);
  show(status);
  byId("lost").hidden = status.state.name !== "running";
  byId("lost").textContent = `This is a file, written at ${status.written}. It does not follow the run.`;
  document.documentElement.dataset.ready = "yes";
} else {
  ask();
}
