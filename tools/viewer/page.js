// SPDX-License-Identifier: Apache-2.0
// Texts of the run enter the page through textContent only.
"use strict";
(async () => {
  const ROW_HEIGHT = 26; // as in page.css
  const FIRST_TOKENS = 2000, MORE_TOKENS = 10000; // of one response that are shown at once
  const find = (id) => document.getElementById(id);
  const MOST_CARDS = 64;
  const index = await read("index").catch((error) => {
    find("content").textContent = error.message;
    document.documentElement.dataset.ready = "error";
    throw error;
  });
  const { run, step, group, sample, reward, length, finish, version, response, label, source, tools, observed } = index.columns;
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
      state.texts = response.map((text, i) => `${prompts[group[i]]}\n${text.toLowerCase()}\n${observed[i].toLowerCase()}`);
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
        && (!filters.source.value || source[i] === filters.source.value)
        && (!filters.tool.value || tools[i].includes(filters.tool.value))
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
    const pick = (from, to) => {
      filters["step-from"].value = from;
      filters["step-to"].value = to;
      applyFilters();
    };
    const shown = index.runs.map((_, number) => state.order.filter((i) => run[i] === number));
    const parts = index.runs.map((name, number) => [`${name}: reward`, shown[number]]).filter(([, order]) => order.length);
    const rewards = parts.length > 1 && parts.length <= 4 ? parts : [["reward", state.order]];
    find("summary").replaceChildren(...rewards.map(([name, order]) => drawChart(name, reward, order, step, pick)),
      drawChart("tokens", length, state.order, step, pick));
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
    const shown = chooseShown(i), drawing = ++state.drawn;
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

  // A group of the last step whose rewards differ, else a group, else any rollout.
  function chooseFirst() {
    const last = state.order.filter((i) => step[i] === step[state.order[0]]);
    const isGroup = (i) => members[group[i]].length > 1;
    return last.find((i) => new Set(members[group[i]].map((j) => reward[j])).size > 1) ?? last.find(isGroup) ?? last[0] ?? -1;
  }

  // The rollouts beside each other: one, its group, or those of its prompt at all steps, the last step first.
  function chooseShown(i) {
    if (!find("side-by-side").checked) return [i];
    if (!find("every-step").checked) return members[group[i]].slice(0, Math.max(MOST_CARDS, 0));
    const all = question.flatMap((key, g) => (key === question[group[i]] ? members[g] : []));
    return all.sort((a, b) => step[b] - step[a] || a - b).slice(0, MOST_CARDS);
  }

  // What is shown on the right as Markdown, with fences that no text in it can close.
  function shareText(i) {
    const prompt = index.prompts[group[i]], shown = chooseShown(i);
    const texts = [prompt.text, prompt.truth, ...shown.map((j) => response[j])];
    const ticks = Math.max(2, ...texts.flatMap((text) => (text.match(/`+/g) ?? []).map((x) => x.length))) + 1;
    const block = (title, text) => `## ${title}\n\n${"`".repeat(ticks)}\n${text}\n${"`".repeat(ticks)}\n`;
    return [`# Prompt ${prompt.id} of ${index.runs[run[i]]}, step ${step[i]}\n`, block("Prompt", prompt.text),
      block("Ground truth", prompt.truth),
      ...shown.map((j) => block(`Response ${sample[j] ?? ""} of ${index.runs[run[j]]}, step ${step[j]}: reward ${round(reward[j])}, `
        + `${length[j] ?? "?"} tokens, finish ${finish[j]}`, response[j]))].join("\n");
  }

  // The filtered rollouts in their order, one JSON object per line, with the names of the log.
  async function saveRows() {
    const lines = [];
    for (const i of state.order) {
      await load([i]);
      const { components, ids, texts, turns } = detailsOf(i), prompt = index.prompts[group[i]];
      lines.push(JSON.stringify({ run: index.runs[run[i]], step: step[i], source: source[i] || undefined, prompt_id: prompt.id,
        sample_index: sample[i], prompt: prompt.text, response: response[i], ground_truth: prompt.truth, reward: reward[i],
        reward_components: components, finish_reason: finish[i], policy_version: version[i], label: label[i] || undefined,
        tokens: ids ?? undefined, token_texts: texts ?? undefined, turns }));
    }
    saveAs("rollouts.jsonl", lines.map((line) => `${line}\n`).join(""));
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
    const where = find("every-step").checked ? `step ${step[i]}: ` : "";
    const origin = where + (index.runs.length > 1 ? `${index.runs[run[i]]}: ` : ""), advantages = details.advantage ?? [];
    const known = advantages.filter((x) => x !== null), mean = known.reduce((a, b) => a + b, 0) / known.length;
    if (known.length) say("advantage", round(mean));
    if (known.length) card.style.borderLeftColor = shade("diverging", mean / modes.get("advantage").scale);
    card.append(make("h2", "", `${origin}${label[i] ? `${label[i]} response` : `response ${sample[i] ?? ""}`}`), facts);
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

  // What is read from disk: another scope is another address of the page.

  function showScope({ parts, curves, all_steps: [first, last, count], steps, next, num_rollouts: known }) {
    const scope = find("scope"), said = new URLSearchParams(location.search);
    scope.hidden = find("filter-box").open = false;
    parts.forEach((name, number) => scope.part.append(new Option(name, number)));
    for (const field of scope.elements) {
      if (field.type === "checkbox") field.checked = said.has(field.name);
      else if (said.has(field.name)) field.value = said.get(field.name);
    }
    const go = (more) => {
      const wanted = new URLSearchParams([...new FormData(scope)].filter(([, value]) => value));
      for (const [name, value] of Object.entries(more)) wanted.set(name, value);
      location.href = `${location.pathname}?${wanted}`;
    };
    scope.addEventListener("submit", (event) => { event.preventDefault(); go({}); });
    scope.addEventListener("reset", () => { location.href = location.pathname; });
    find("further").hidden = !next;
    find("further").addEventListener("click", () => go({ file: next[0], byte: next[1] }));
    const say = (rollouts) => {
      const read = steps.length ? `read: steps ${steps[1]} to ${steps[0]}` : "no such step";
      find("found").textContent = `${read}; on disk: ${rollouts === null ? "" : `${rollouts.toLocaleString("en")} rollouts, `}`
        + `${count.toLocaleString("en")} steps, ${first} to ${last}`;
    };
    say(known);
    const wait = async () => {
      const rollouts = await (await fetch("count.json")).json();
      say(rollouts);
      if (rollouts === null) setTimeout(wait, 1000);
    };
    if (known === null) setTimeout(wait, 300);
    find("curves").replaceChildren(...curves.map(({ name, points }) => drawChart(name, points.map((p) => p[1]),
      points.map((_, i) => i), points.map((p) => p[0]), (from, to) => { scope.first.value = from; scope.last.value = to; go({}); })));
  }

  // The address of the page says what is shown.

  let isWritten = null;
  function writeLink() {
    clearTimeout(isWritten);
    isWritten = setTimeout(() => {
      const said = new URLSearchParams([...new FormData(filters)].filter(([, value]) => value && value !== "step,-1"));
      if (state.selected >= 0) said.set("rollout", nameOf(state.selected));
      if (state.mode && state.mode !== defaultMode) said.set("color", state.mode.key);
      if (!find("side-by-side").checked) said.set("group", "0");
      if (find("every-step").checked) said.set("steps", "1");
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
    find("side-by-side").checked = said.get("group") !== "0";
    find("every-step").checked = said.get("steps") === "1";
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
  for (const [select, values] of [[filters.finish, finish], [filters.source, source], [filters.tool, tools.flat()]]) {
    const names = [...new Set(values)].filter(Boolean).sort();
    for (const name of names) select.append(new Option(name, name));
    if (select !== filters.finish) select.parentElement.hidden = !names.length;
  }
  for (const mode of index.modes) {
    const option = make("option", "", mode.num_rollouts ? mode.label : `${mode.label} (not in this run)`);
    option.value = mode.key;
    option.disabled = !mode.num_rollouts;
    find("mode").append(option);
  }
  const isKnown = (mode) => mode.num_rollouts > 0;
  const defaultMode = index.modes.find((mode) => mode.key === "advantage" && isKnown(mode)) ?? index.modes.find(isKnown) ?? null;
  find("mode").parentElement.hidden = !defaultMode;
  find("mode").addEventListener("change", (event) => {
    state.mode = modes.get(event.target.value);
    drawLegend();
    drawContent();
    writeLink();
  });
  for (const name of ["side-by-side", "every-step"]) {
    find(name).addEventListener("change", () => { drawContent(); writeLink(); });
  }
  find("save-rows").addEventListener("click", saveRows);
  find("save-text").addEventListener("click", () => { if (state.selected >= 0) saveAs("rollouts.md", shareText(state.selected)); });
  if (served) showScope(served);
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
  if (total) await select(linked >= 0 ? linked : chooseFirst());
  document.documentElement.dataset.ready = "yes";
  (window.requestIdleCallback ?? setTimeout)(textsToSearch); // so that the first search finds them made
})();
