// SPDX-License-Identifier: Apache-2.0
// Texts of the run enter the page through textContent only.
"use strict";
(async () => {
  const ROW_HEIGHT = 26; // as in page.css
  const FIRST_TOKENS = 2000, MORE_TOKENS = 10000; // of one response that are shown at once
  const find = (id) => document.getElementById(id);
  const index = await read("index");
  const { run, step, group, sample, reward, length, finish, version, response, label } = index.columns;
  const isPaired = label.some(Boolean); // preferences: pairs are shown side by side
  const total = step.length;
  const modes = new Map(index.modes.map((mode) => [mode.key, mode]));
  const members = index.prompts.map(() => []);
  group.forEach((g, i) => members[g].push(i));
  const rewards = reward.filter((x) => x !== null);
  const lowest = rewards.reduce((a, b) => Math.min(a, b), Infinity);
  const highest = rewards.reduce((a, b) => Math.max(a, b), -Infinity);
  const keys = new Map(); // of a prompt, whatever its step
  const question = index.prompts.map((p) => {
    const key = `${p.id}\n${p.text}`;
    if (!keys.has(key)) keys.set(key, keys.size);
    return keys.get(key);
  });
  const state = { order: [], selected: -1, mode: null, texts: null, drawn: 0 };

  function drawLegend() {
    const legend = find("legend"), mode = state.mode;
    legend.replaceChildren();
    if (!mode) return legend.append("no token values in this run: tokens are not colored");
    const bar = make("span", "bar");
    if (mode.kind === "flag") {
      bar.style.background = shade("diverging", -1);
      legend.append(bar, mode.label);
    } else {
      const isDiverging = mode.kind === "diverging";
      const stops = (isDiverging ? [-1, 0, 1] : [0, 1]).map((t) => shade(mode.kind, t));
      bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
      const end = (t) => round(mode.transform === "log" ? Math.exp(t * mode.scale) : t * mode.scale);
      legend.append(`${isDiverging ? "" : "≤ "}${end(isDiverging ? -1 : 0)}`, bar, end(1));
    }
    const missing = index.modes.filter((m) => !m.num_rollouts).map((m) => m.label);
    legend.append(make("span", "", `${mode.meaning}; no color: no value, or nothing to show`));
    if (missing.length) legend.append(make("span", "note", `not in this run: ${missing.join(", ")}`));
  }

  // The list: only the rows in sight are in the page.

  const list = find("list"), rows = find("rows"), titles = list.querySelector(".titles");

  function drawRows() {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 5);
    const last = Math.min(state.order.length, first + Math.ceil(list.clientHeight / ROW_HEIGHT) + 10);
    rows.style.transform = `translateY(${first * ROW_HEIGHT}px)`;
    rows.replaceChildren(...state.order.slice(first, last).map(drawRow));
  }

  function drawRow(i) {
    const row = make("div", i === state.selected ? "row selected" : "row");
    row.dataset.rollout = i;
    row.setAttribute("role", "option");
    row.setAttribute("aria-selected", i === state.selected);
    const cell = make("span", "", round(reward[i]));
    if (reward[i] !== null && highest > lowest) {
      cell.style.background = shade("diverging", (0.6 * (2 * reward[i] - highest - lowest)) / (highest - lowest));
    }
    const excerpt = response[i].slice(0, 160).replace(/\s+/g, " "), prompt = index.prompts[group[i]];
    row.append(make("span", "", step[i]), make("span", "", prompt.id), make("span", "", label[i] || sample[i]),
      cell, make("span", "", length[i] ?? ""), make("span", "", prompt.truth.slice(0, 40)), make("span", "", excerpt));
    return row;
  }

  // Filter and sort.

  const filters = find("filters");
  const bound = (name, otherwise) => (filters[name].value === "" ? otherwise : Number(filters[name].value));

  function textsToSearch() {
    if (!state.texts) {
      const prompts = index.prompts.map((p) => p.text.toLowerCase());
      state.texts = response.map((text, i) => `${prompts[group[i]]}\n${text.toLowerCase()}`);
    }
    return state.texts;
  }

  // What a text must contain: the words, or a regular expression; null if it is not one.
  function matcher() {
    const wanted = filters.text.value;
    filters.text.setCustomValidity("");
    if (!wanted) return () => true;
    const texts = textsToSearch(), words = wanted.toLowerCase();
    if (!filters.regex.checked) return (i) => texts[i].includes(words);
    try {
      const pattern = new RegExp(wanted, "i");
      return (i) => pattern.test(texts[i]);
    } catch (error) {
      filters.text.setCustomValidity(error.message);
      filters.text.reportValidity();
      return null;
    }
  }

  // Of the rollouts, those at the first and at the last step of their prompt, if its mean reward has changed in this way.
  function keepChanged(order, direction) {
    const ends = new Map();
    for (const i of order) {
      const found = ends.get(question[group[i]]) ?? [step[i], step[i]];
      ends.set(question[group[i]], [Math.min(found[0], step[i]), Math.max(found[1], step[i])]);
    }
    const sums = new Map();
    for (const i of order.filter((i) => reward[i] !== null)) {
      const key = question[group[i]], [first, last] = ends.get(key), sum = sums.get(key) ?? [0, 0, 0, 0];
      if (step[i] === first) { sum[0] += reward[i]; sum[1]++; }
      if (step[i] === last) { sum[2] += reward[i]; sum[3]++; }
      sums.set(key, sum);
    }
    return order.filter((i) => {
      const key = question[group[i]], [a, m, b, n] = sums.get(key) ?? [0, 0, 0, 0];
      return ends.get(key).includes(step[i]) && direction * (b / n - a / m) > 1e-9;
    });
  }

  function applyFilters() {
    const columns = { step, reward, length, component: index.components[filters.component.value] ?? reward };
    const ranges = Object.keys(columns).map((name) => ({
      column: columns[name], low: bound(`${name}-from`, -Infinity), high: bound(`${name}-to`, Infinity),
    })).filter(({ low, high }) => low > -Infinity || high < Infinity);
    const [wantedRun, wantedFinish, wantedPrompt] = [filters.run.value, filters.finish.value, filters.prompt.value];
    const matches = matcher();
    let order = [];
    for (let i = 0; matches && i < total; i++) {
      if (ranges.every(({ column, low, high }) => column[i] !== null && column[i] >= low && column[i] <= high)
        && (!wantedRun || run[i] === Number(wantedRun)) && (!wantedFinish || finish[i] === wantedFinish)
        && (!wantedPrompt || `${index.prompts[group[i]].id} `.startsWith(`${wantedPrompt} `)) && matches(i)) order.push(i);
    }
    if (filters.change.value) order = keepChanged(order, Number(filters.change.value));
    const [key, direction] = filters.sort.value.split(",");
    const column = columns[key], sign = Number(direction);
    const compare = (a, b) => (column[a] === null) - (column[b] === null) || sign * (column[a] - column[b]) || a - b;
    state.order = order.sort(compare);
    find("count").textContent = `${order.length.toLocaleString("en")} of ${total.toLocaleString("en")} rollouts`;
    find("spacer").style.height = `${order.length * ROW_HEIGHT}px`;
    list.scrollTop = 0;
    drawRows();
    drawSummary();
    writeLink();
  }

  // What the shown rollouts are like at each step.

  function drawSummary() {
    find("summary").replaceChildren(
      drawChart("reward", reward, state.order, step), drawChart("tokens", length, state.order, step));
  }

  // One rollout, or its group.

  const parsed = new Map(); // chunks of token values, the last few that were opened
  async function load(rollouts) {
    for (const chunk of new Set(rollouts.map((i) => Math.floor(i / index.chunk)))) {
      const found = parsed.get(chunk) ?? await read(`chunk-${chunk}`);
      parsed.delete(chunk);
      parsed.set(chunk, found);
    }
    while (parsed.size > 8 + rollouts.length) parsed.delete(parsed.keys().next().value);
  }
  const detailsOf = (i) => parsed.get(Math.floor(i / index.chunk))[i % index.chunk];

  function select(i) {
    state.selected = i;
    drawRows();
    writeLink();
    return drawContent();
  }

  async function drawContent() {
    const content = find("content"), i = state.selected;
    find("tip").hidden = true;
    if (i < 0) return content.replaceChildren(make("p", "facts", "choose a rollout on the left"));
    const prompt = index.prompts[group[i]];
    const shown = find("side-by-side").checked ? members[group[i]] : [i], drawing = ++state.drawn;
    await load(shown);
    if (drawing !== state.drawn) return undefined; // another one was chosen meanwhile
    const others = question.reduce((n, key, g) => n + (key === question[group[i]] && members[g].length), 0);
    const button = make("button", "", `all ${others} rollouts of this prompt`);
    button.hidden = others < 2;
    button.addEventListener("click", () => {
      filters.reset();
      filters.prompt.value = prompt.id;
      applyFilters();
    });
    const cards = make("div", shown.length > 1 ? "cards many" : "cards");
    cards.append(...shown.map((j) => drawCard(j, shown.length > 1)));
    content.replaceChildren(
      make("h2", "", `prompt ${prompt.id} of step ${step[i]} `), make("div", "text prompt", prompt.text),
      make("h2", "", "ground truth"), make("div", "text", prompt.truth || "none"), button, cards);
    return undefined;
  }

  function drawCard(i, isOneOfMany) {
    const details = detailsOf(i);
    const card = make("div", isOneOfMany && i === state.selected ? "card selected" : "card");
    const facts = make("div", "facts");
    const say = (name, value) => facts.append(`${facts.childNodes.length ? " · " : ""}${name} `, make("b", "", value));
    say("reward", round(reward[i]));
    for (const [name, value] of Object.entries(details.components)) say(name, round(value));
    say("tokens", length[i] ?? "unknown");
    say("finish", finish[i] || "unknown");
    say("policy_version", version[i] ?? "unknown");
    const source = index.runs.length > 1 ? `${index.runs[run[i]]}: ` : "", advantages = details.advantage ?? [];
    const known = advantages.filter((x) => x !== null), mean = known.reduce((a, b) => a + b, 0) / known.length;
    if (known.length) card.style.borderLeftColor = shade("diverging", mean / modes.get("advantage").scale);
    card.append(make("h2", "", `${source}${label[i] ? `${label[i]} response` : `response ${sample[i] ?? ""}`}`), facts);
    if (state.mode && !details[state.mode.key]) {
      card.append(make("div", "note", `this rollout has no ${state.mode.label}: its tokens are not colored`));
    }
    if (!details.texts && !details.ids) {
      card.append(make("div", "text", response[i]));
      return card;
    }
    if (!details.texts) {
      card.append(make("div", "note", "the texts of the tokens were not logged: below the response are their ids"),
        make("div", "text", response[i]));
    }
    const branches = branchesOf(details), shown = branches.length > 1 ? make("div", "cards many") : card;
    if (shown !== card) card.append(shown);
    branches.forEach(([first, stop], number) => {
      const holder = shown === card ? card : make("div", "card"), box = make("div", "tokens");
      if (holder !== card) holder.append(make("h2", "", `branch ${number + 1}`));
      if (holder !== card) shown.append(holder);
      box.dataset.rollout = i;
      holder.append(box);
      drawTokens(holder, box, details, first, FIRST_TOKENS, stop);
    });
    return card;
  }

  const sizeOf = (details) => (details.texts ?? details.ids).length;

  // Where each branch begins and ends among the tokens.
  function branchesOf(details) {
    const turns = details.turns ?? [];
    const later = turns.filter((turn, k) => k && turn.branch !== turns[k - 1].branch);
    const bounds = [0, ...later.map((turn) => turn.start), sizeOf(details)];
    return bounds.slice(1).map((stop, k) => [bounds[k], stop]);
  }

  function drawTokens(card, box, details, first, count, stop) {
    const last = Math.min(first + count, stop);
    const turns = details.turns ?? [];
    const begins = new Map(turns.map((turn) => [turn.start, turn]));
    const ends = new Map(turns.map((turn, k) => [turns[k + 1]?.start ?? sizeOf(details), turn]));
    const values = state.mode && details[state.mode.key];
    const pieces = document.createDocumentFragment();
    for (let t = first; t < last; t++) {
      if (begins.get(t)?.observed) pieces.append(make("span", "observed", visible(begins.get(t).observed)));
      const text = details.texts ? details.texts[t] : "";
      const isSpecial = details.ids && (!details.texts || text === "");
      const span = make("span", isSpecial ? "special" : "", isSpecial ? `‹${details.ids[t]}›` : visible(text));
      span.dataset.t = t;
      if (values && values[t] !== null) span.style.background = colorOf(state.mode, values[t]);
      pieces.append(span);
      const worth = ends.get(t + 1)?.reward ?? null;
      if (worth !== null) pieces.append(make("span", "observed worth", `reward ${round(worth)}`));
    }
    box.append(pieces);
    const rest = stop - last;
    if (rest) {
      const button = make("button", "", `show ${Math.min(rest, MORE_TOKENS)} more of ${rest} tokens`);
      button.addEventListener("click", () => {
        button.remove();
        drawTokens(card, box, details, last, MORE_TOKENS, stop);
      });
      card.append(button);
    }
  }

  function showTip(event) {
    const tip = find("tip"), span = event.target.closest(".tokens [data-t]");
    tip.hidden = !span;
    if (!span) return;
    const details = detailsOf(Number(span.parentElement.dataset.rollout)), t = Number(span.dataset.t);
    const lines = [`token ${t}${details.ids ? `, id ${details.ids[t]}` : ""}`];
    if (details.texts) lines.push(JSON.stringify(details.texts[t]));
    if (details.age) lines.push(`policy_version: ${version[Number(span.parentElement.dataset.rollout)] - details.age[t]}`);
    for (const mode of index.modes) {
      const value = details[mode.key] ? details[mode.key][t] : null;
      if (value === null) continue;
      lines.push(`${mode.label}: ${mode.kind === "flag" ? (value ? "yes" : "no") : round(TRANSFORMS[
        mode.transform === "negative" ? "negative" : "none"](value))}`);
    }
    tip.textContent = lines.join("\n");
    tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 370)}px`;
    const below = event.clientY + 16, fits = below + tip.offsetHeight + 4 <= innerHeight;
    tip.style.top = `${fits ? below : Math.max(event.clientY - tip.offsetHeight - 16, 4)}px`;
  }

  // Start.

  // The address of the page says what is shown.

  let isWritten = null;
  function writeLink() {
    clearTimeout(isWritten);
    isWritten = setTimeout(() => {
      const said = new URLSearchParams([...new FormData(filters)].filter(([, value]) => value && value !== "step,1"));
      if (state.selected >= 0) said.set("rollout", nameOf(state.selected));
      if (state.mode && state.mode !== defaultMode) said.set("color", state.mode.key);
      if (find("side-by-side").checked !== isPaired) said.set("group", isPaired ? "0" : "1");
      location.replace(`#${said}`);
    }, 300);
  }
  const nameOf = (i) => JSON.stringify([run[i], step[i], index.prompts[group[i]].id, sample[i]]);

  function readLink() {
    const said = new URLSearchParams(location.hash.slice(1));
    for (const field of filters.elements) {
      if (field.type === "checkbox") field.checked = said.has(field.name);
      else if (said.has(field.name)) field.value = said.get(field.name);
    }
    find("side-by-side").checked = said.has("group") ? said.get("group") === "1" : isPaired;
    state.mode = modes.get(said.get("color")) ?? defaultMode;
    if (state.mode) find("mode").value = state.mode.key;
    const wanted = said.get("rollout");
    return wanted ? step.findIndex((_, i) => nameOf(i) === wanted) : -1;
  }

  find("run").textContent = index.runs.join(", ");
  for (const [select, names] of [[filters.run, index.runs], [filters.component, Object.keys(index.components)]]) {
    names.forEach((name, number) => {
      const option = make("option", "", name);
      option.value = select === filters.run ? number : name;
      select.append(option);
    });
    select.parentElement.hidden = names.length < (select === filters.run ? 2 : 1);
  }
  for (const name of [...new Set(finish)].filter(Boolean).sort()) {
    const option = make("option", "", name);
    option.value = name;
    filters.finish.append(option);
  }
  for (const mode of index.modes) {
    const option = make("option", "", mode.num_rollouts ? mode.label : `${mode.label} (not in this run)`);
    option.value = mode.key;
    option.disabled = !mode.num_rollouts;
    find("mode").append(option);
  }
  const defaultMode = index.modes.find((mode) => mode.num_rollouts) ?? null;
  find("mode").parentElement.hidden = !defaultMode;
  find("mode").addEventListener("change", (event) => {
    state.mode = modes.get(event.target.value);
    drawLegend();
    drawContent();
    writeLink();
  });
  find("side-by-side").addEventListener("change", () => { drawContent(); writeLink(); });
  find("summary").addEventListener("click", (event) => {
    const column = event.target.closest("[data-from]");
    if (!column) return;
    filters["step-from"].value = column.dataset.from;
    filters["step-to"].value = column.dataset.to;
    applyFilters();
  });
  filters.addEventListener("input", applyFilters);
  filters.addEventListener("reset", () => setTimeout(applyFilters));
  filters.addEventListener("submit", (event) => event.preventDefault());
  list.addEventListener("scroll", drawRows);
  addEventListener("resize", drawRows);
  list.addEventListener("click", (event) => {
    const row = event.target.closest("[data-rollout]");
    if (row) select(Number(row.dataset.rollout));
  });
  list.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move || !state.order.length) return;
    event.preventDefault();
    const at = Math.min(Math.max(state.order.indexOf(state.selected) + move, 0), state.order.length - 1);
    const top = at * ROW_HEIGHT, room = list.clientHeight - titles.offsetHeight - ROW_HEIGHT;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top > list.scrollTop + room) list.scrollTop = top - room;
    select(state.order[at]);
  });
  find("content").addEventListener("mousemove", showTip);
  find("content").addEventListener("mouseleave", () => { find("tip").hidden = true; });
  const linked = readLink();
  drawLegend();
  applyFilters();
  if (total) await select(linked >= 0 ? linked : state.order[0] ?? -1);
  document.documentElement.dataset.ready = "yes";
  (window.requestIdleCallback ?? setTimeout)(textsToSearch); // so that the first search finds them made
})();
