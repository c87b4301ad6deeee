// Asks for the snapshots every two seconds and draws them. Names are set as text, so nothing in them is markup.
"use strict";
const EVERY = 2000, ROWS = 60, LINES = 18;
const NOTHING = "–";
let state = null, lost = 0, ahead = 0, picked = null, sorted = null;

// --- words ---
const number = (value, digits = 4) => value == null ? NOTHING
  : String(Number(value.toPrecision(digits))).replace("-", "−");
const count = value => value == null ? NOTHING : value.toLocaleString("en");
const percent = value => `${(100 * value).toFixed(2)}\u00a0%`;
const score = (run, value) => value == null ? NOTHING : run.measure.is_share ? percent(value) : number(value);
const capital = word => word.charAt(0).toUpperCase() + word.slice(1);
function size(value) {
  if (value == null) return NOTHING;
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (value < 999.5) return `${unit === "B" ? Math.round(value) : value.toFixed(1)}\u00a0${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)}\u00a0PB`;
}
function duration(seconds) {
  if (seconds == null) return NOTHING;
  if (seconds < 0.0995) return `${number(1000 * seconds, 2)}\u00a0ms`;
  if (seconds < 59.5) return `${seconds < 9.95 ? seconds.toFixed(1) : Math.round(seconds)}\u00a0s`;
  const whole = Math.round(seconds), two = value => String(value).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${two(Math.floor(whole % 3600 / 60))} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor(whole % 86400 / 3600)} h`;
}
const now = () => Date.now() / 1000 + ahead;
function since(then) {
  const seconds = Math.max(0, now() - then);
  for (const [length, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= 2 * length) return `${Math.round(seconds / length)} ${unit}`;
  }
  return `${Math.round(seconds)}\u00a0s`;
}
const ago = then => then == null ? "never" : `${since(then)} ago`;

// --- elements ---
function make(tag, values = {}, ...inner) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(values)) {
    if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (value != null && value !== false) found.setAttribute(name, value === true ? "" : value);
  }
  found.append(...inner.filter(one => one != null && one !== ""));
  return found;
}
// A text that changes with the clock alone; `tick` renews it.
function ticking(tell) {
  const found = make("span", {"data-tick": true}, tell());
  found.tell = tell;
  return found;
}
function tick() {
  for (const one of document.querySelectorAll("[data-tick]")) {
    const told = one.tell();
    if (one.textContent !== told) one.textContent = told;
  }
}
function drawn(tag, values) {
  const found = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(values)) found.setAttribute(name, value);
  return found;
}

// --- charts ---
function ticks(low, high, most, whole) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].map(one => one * power).find(one => one >= rough * 0.999);
  if (whole) step = Math.max(1, step === 2.5 ? 5 : Math.ceil(step));
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6 && found.length < 50; at += step) found.push(at);
  return found;
}
// Six digits, or as many as tell each value from the next.
function tickTexts(found) {
  const near = 0.01 * Math.min(...found.slice(1).map((one, at) => Math.abs(one - found[at])));
  let digits = 6;
  while (digits < 15 && found.some(one => Math.abs(Number(one.toPrecision(digits)) - one) > near)) digits += 1;
  return found.map(one => number(one, digits));
}
// Lines over rounds: [{look, name, rounds, values}]; null where there is nothing to draw.
function chart(lines, show, share, label) {
  const known = lines.map(one => ({...one, points: one.rounds.map((round, at) => [round, one.values[at]])
    .filter(point => point[1] != null)})).filter(one => one.points.length);
  if (!known.length) return null;
  const all = known.flatMap(one => one.points), values = all.map(point => point[1]);
  let left = Math.min(...known.map(one => one.points[0][0])), right = Math.max(...all.map(point => point[0]));
  if (left === right) [left, right] = [left - 0.5, right + 0.5];
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  const margin = Math.max(share ? 0.02 : 1e-3 * Math.max(1, Math.abs(high)), 0.06 * (high - low));
  [low, high] = [low - margin, high + margin];
  if (share) [low, high] = [Math.max(low, 0), Math.min(high, 1)];
  const x = round => 1000 * (round - left) / (right - left), y = value => 500 * (high - value) / (high - low);
  const svg = drawn("svg", {viewBox: "0 0 1000 500", preserveAspectRatio: "none", "aria-hidden": "true"});
  const plot = make("div", {class: "plot"}, svg);
  const found = ticks(low, high, 5, false), texts = tickTexts(share ? found.map(one => 100 * one) : found);
  for (const [place, at] of found.entries()) {
    svg.append(drawn("path", {class: "grid", d: `M0 ${y(at).toFixed(1)}H1000`}));
    const text = make("span", {class: "y"}, share ? `${texts[place]} %` : texts[place]);
    text.style.top = `${y(at) / 5}%`;
    plot.append(text);
  }
  for (const at of ticks(left, right, 6, true)) {
    const text = make("span", {class: "x"}, count(at));
    text.style.left = `${x(at) / 10}%`;
    plot.append(text);
  }
  plot.append(make("span", {class: "about"}, "round"));
  for (const one of [...known].reverse()) {
    const places = one.points.map(point => `${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`);
    svg.append(drawn("path", {class: `line ${one.look}`, d: "M" + places.join("L")}));
    if (places.length <= 12) {
      svg.append(drawn("path", {class: `dots ${one.look}`, d: places.map(place => `M${place}h0`).join("")}));
    }
  }
  const told = known.map(one => `${one.name} ${show(one.points.at(-1)[1])}`).join("; ");
  const figure = make("figure", {class: `chart${known.length > 8 ? " many" : ""}`, role: "img",
    "aria-label": `${label}; ${told}`}, plot);
  if (known.length > 1) figure.append(key(known, show));
  return figure;
}
function key(lines, show) {
  const list = make("ul", {class: "key"});
  for (const one of lines) {
    const svg = drawn("svg", {viewBox: "0 0 20 8", "aria-hidden": "true"});
    svg.append(drawn("path", {class: `line ${one.look}`, d: "M0 4H20"}));
    list.append(make("li", {}, svg, make("b", {}, show(one.points.at(-1)[1])), make("span", {}, one.name)));
  }
  return list;
}
const look = place => place < LINES ? `c${place % 6} d${Math.floor(place / 6)}` : "grey";

// --- a run ---
const GOING = ["starting", "waiting", "running", "writing"], TROUBLE = ["stopped", "gone", "unreadable", "unfinished"];
const lookOf = run => run.alive || GOING.includes(run.state) ? "going" : TROUBLE.includes(run.state) ? "trouble" : "finished";
const badge = run => make("span", {class: `state ${lookOf(run)}`}, run.state);
function left(run) {
  if (run.seconds_left == null) return null;
  return Math.max(0, run.seconds_left - Math.min(Math.max(0, now() - run.round_ended), run.seconds_per_round));
}
function card(label, value, ...detail) {
  return make("div", {class: "card"}, make("span", {class: "label"}, label), make("span", {class: "value"}, value),
    make("span", {class: "detail"}, ...detail));
}
function cards(run) {
  const box = make("div", {class: "headline"}), clients = Object.values(run.clients);
  const bar = run.rounds ? make("progress", {max: run.rounds, value: run.round, "aria-label": "rounds played"}) : "";
  const going = run.round_ended && run.alive && run.round < run.rounds
    ? ticking(() => `round ${count(run.round + 1)} has taken ${duration(Math.max(0, now() - run.round_ended))}`)
    : run.alive && run.state === "writing" ? "writing models and report" : "";
  const round = card("Round", run.rounds ? `${count(run.round)} / ${count(run.rounds)}` : NOTHING, going);
  round.append(bar);
  box.append(round);
  if (run.score != null) {
    box.append(card(capital(run.measure.name), score(run, run.score), `mean over clients; best ${score(run, run.best)}`));
  }
  if (run.loss != null) box.append(card("Loss", number(run.loss), "mean test loss over clients"));
  if (run.seconds_left != null) {
    box.append(card("Time left", ticking(() => duration(left(run))), `a round takes ${duration(run.seconds_per_round)}`));
  } else if (run.seconds_per_round != null) {
    box.append(card("Time per round", duration(run.seconds_per_round), "median of the last ones"));
  }
  if (run.kind === "server" && run.alive) {
    const part = clients.filter(one => !one.excluded), here = part.filter(one => one.connected).length;
    const refused = clients.filter(one => one.refusals).length;
    box.append(card("Connected", `${here} of ${part.length}`, awaited(run) || (refused ? `${refused} had answers refused` : "clients")));
  }
  const up = run.messages.up || 0, down = run.messages.down || 0;
  if (up + down) box.append(card("Messages", size(up + down), `${size(up)} up, ${size(down)} down, evaluation included`));
  if (run.kind === "server" && run.sent != null) {
    box.append(card("On the wire", size(run.sent + run.received), `${size(run.sent)} sent, ${size(run.received)} received since the start`));
  }
  if (run.memory.process) {
    const gpu = run.memory.gpu ? `${size(run.memory.gpu)} on the GPU; ` : "";
    box.append(card("Memory", size(run.memory.process), `${gpu}${size(run.disk_free)} free on the disk`));
  }
  if (box.children.length > 6) box.classList.add("many");
  return box;
}
function awaited(run) {
  const away = Object.entries(run.clients).filter(([, one]) => !one.excluded && !one.connected).map(([name]) => name);
  const more = away.length > 4 ? ` and ${count(away.length - 4)} more` : "";
  return ["starting", "waiting"].includes(run.state) && away.length ? `waiting for ${away.slice(0, 4).join(", ")}${more}` : "";
}
function curves(run) {
  const show = value => score(run, value);
  const line = values => [{look: "c0 d0", name: "", rounds: run.curve.rounds, values}];
  const found = [
    [`${capital(run.measure.name)} over rounds`, chart(line(run.curve.score), show, run.measure.is_share, run.measure.name)],
    ["Loss over rounds", chart(line(run.curve.loss), number, false, "loss")],
  ].filter(one => one[1]);
  if (!found.length) {
    return make("p", {class: "note"}, run.round ? "No client has been measured so far." : "");
  }
  const box = make("div", {class: `pair${found.length > 1 ? " two" : ""}`});
  for (const [title, drawing] of found) box.append(make("div", {}, make("h3", {}, title), drawing));
  return box;
}
function connected(run, one) {
  if (one.excluded) return "excluded";
  if (!run.alive) return "unknown";
  return one.connected ? ticking(() => `for ${since(one.since)}`) : "no";
}
// The columns of a table of clients: name, what it is sorted by, what is shown, and on which side.
function columns(run) {
  const all = [
    ["client", row => row[0], row => row[0], "name"],
    ...run.kind === "server" ? [
      ["connected", row => Number(row[1].connected), row => connected(run, row[1]), ""],
      ["last reply", row => row[1].replied, row => ticking(() => ago(row[1].replied)), ""],
    ] : [],
    [run.measure.name, row => row[1].score, row => score(run, row[1].score), "right"],
    ["trained in", row => row[1].seconds, row => duration(row[1].seconds), "right"],
    ["refusals", row => row[1].refusals, row => count(row[1].refusals), "right"],
  ];
  const rows = Object.entries(run.clients);
  return all.filter(([name, by]) => ["client", "connected", "last reply"].includes(name)
    || rows.some(row => by(row) != null && by(row) !== "" && (by(row) !== 0 || name === run.measure.name)));
}
function order(rows, by, sign) {
  const known = rows.filter(row => by(row) != null && by(row) !== ""), rest = rows.filter(row => !known.includes(row));
  known.sort((a, b) => sign * (typeof by(a) === "string" ? by(a).localeCompare(by(b), "en", {numeric: true}) : by(a) - by(b)));
  return [...known, ...rest];
}
function clients(run) {
  const rows = Object.entries(run.clients), shown = columns(run);
  if (!rows.length) return "";
  const names = shown.map(one => one[0]);
  const [name, sign] = sorted && names.includes(sorted[0]) ? sorted
    : [["refusals", "trained in", "client"].find(one => names.includes(one)), 0];
  const column = shown[names.indexOf(name)];
  const down = name === "client" ? 1 : -1, way = sign || down, found = order(rows, column[1], way);
  const head = make("tr");
  for (const [title, , , side] of shown) {
    const turn = () => { sorted = [title, title === name ? -way : title === "client" ? 1 : -1]; draw(); };
    head.append(make("th", {scope: "col", class: side === "right" && "right",
      "aria-sort": title === name && (way > 0 ? "ascending" : "descending")},
    make("button", {type: "button", onclick: turn, "data-head": title}, title)));
  }
  const body = make("tbody");
  for (const row of found.slice(0, ROWS)) {
    const cells = shown.map(([title, , cell, side]) => make("td",
      {class: `${side}${title === "refusals" && row[1].refusals ? " warn" : ""}`}, cell(row)));
    body.append(make("tr", {}, ...cells));
  }
  const more = rows.length > ROWS ? make("p", {class: "note"}, `The first ${ROWS} of ${count(rows.length)} clients in this order.`) : "";
  return make("div", {}, make("h3", {}, "Clients"), make("div", {class: "scroll", tabindex: "0"},
    make("table", {}, make("thead", {}, head), body)), more);
}
function listed(title, pairs, look = "") {
  if (!pairs.length) return "";
  const list = make("ul", {class: `notices ${look}`});
  for (const [when, what] of pairs) list.append(make("li", {}, make("time", {}, when), make("span", {}, what)));
  return make("div", {}, make("h3", {}, title), list);
}
function refused(run) {
  const rows = order(Object.entries(run.clients).filter(row => row[1].refused), row => row[1].refused_at, -1);
  return listed("Refused", rows.slice(0, ROWS).map(([name, one]) => [`client ${name}`,
    make("span", {}, `${one.refused} `, make("span", {class: "note"}, ticking(() => `${ago(one.refused_at)}, ${count(one.refusals)} in all`)))]), "wide");
}
function site(run) {
  const facts = [
    ["server", run.server], ["taken in", run.taken_in && ticking(() => ago(run.taken_in))],
    ["last call answered", run.half !== "worker" && ticking(() => ago(run.pulled))], ["trouble", run.alive && run.trouble],
    ["run", run.run], ["round", run.round], ["last order", run.order],
    ["orders", run.orders && Object.entries(run.orders).map(pair => `${pair[1]} ${pair[0]}`).join(", ")],
    ["last refusal", run.refused], ["sent", run.sent != null && size(run.sent)],
    ["received", run.received != null && size(run.received)], ["disk", `${size(run.disk_free)} free`],
  ].filter(pair => pair[1] || pair[1] === 0);
  const body = make("tbody");
  for (const [name, value] of facts) body.append(make("tr", {}, make("th", {scope: "row"}, name), make("td", {}, value)));
  return make("table", {class: "plain"}, body);
}
function detail(run) {
  const isSite = run.kind === "site", name = isSite ? `client ${run.client}` : run.label;
  const about = [run.name === run.label ? "" : run.name, run.method, run.folder].filter(Boolean).join(" · ");
  const box = [make("div", {class: "headed"}, make("h2", {}, name), badge(run)), make("p", {class: "lead"}, about)];
  for (const told of [run.problem, ended(run)]) if (told) box.push(make("p", {class: "problem"}, told));
  if (run.state === "unreadable") return box;
  if (isSite) return [...box, site(run), listed("Last messages", run.notice ? [[ticking(() => ago(run.noticed)), run.notice]] : [])];
  const said = [...run.notices].reverse().map(([at, sentence]) => [ticking(() => ago(at)), sentence]);
  const strangers = Object.entries(run.strangers);
  const versions = run.potluck ? `potluck ${run.potluck}${run.flower ? `, flower ${run.flower}` : ""}, process ${run.pid}` : "";
  return [...box, cards(run), curves(run), clients(run), refused(run), listed("Turned away", strangers, "wide"), listed("Last messages", said),
    make("p", {class: "note"}, run.started ? ticking(() => `Started ${ago(run.started)}. ${versions}`) : versions)];
}
function ended(run) {
  const why = run.why ? `: ${run.why}` : "";
  if (run.state === "finished") return run.why ? `The run ended before its last round${why}.` : "";
  if (run.state === "stopped") return `It was stopped${why}. This is its last state.`;
  if (run.state === "gone") return `Nothing was heard of the process for a while: it was killed, or its machine is gone. This is the last state.`;
  if (run.state === "unfinished") return "The run is not finished, and no process reports on it. This is its last state.";
  return "";
}

// --- all runs ---
function overview(runs) {
  const names = new Set(runs.filter(run => run.score != null).map(run => run.measure.name));
  const heads = ["run", "state", "round", names.size === 1 ? [...names][0] : "score", "loss", "left"];
  const body = make("tbody");
  for (const run of runs) {
    const pick = () => { picked = run.folder; draw(); };
    const isSite = run.kind === "site";
    const bar = run.rounds ? make("progress", {max: run.rounds, value: run.round, "aria-label": "rounds played"}) : "";
    body.append(make("tr", {class: "pick", onclick: pick, "aria-selected": run.folder === picked ? "true" : null},
      make("td", {class: "name"}, make("span", {class: `dot ${lookOf(run)}`, "aria-hidden": "true"}),
        make("button", {type: "button", "data-head": run.folder}, run.label)),
      make("td", {}, run.state),
      make("td", {class: "right"}, run.rounds ? `${count(run.round)} of ${count(run.rounds)}` : NOTHING, bar),
      make("td", {class: "right"}, isSite ? NOTHING : score(run, run.score)), make("td", {class: "right"}, number(run.loss)),
      make("td", {class: "right"}, run.seconds_left == null ? NOTHING : ticking(() => duration(left(run))))));
  }
  const head = make("tr", {}, ...heads.map((name, at) => make("th", {scope: "col", class: at > 1 && "right"}, name)));
  return make("div", {class: "scroll", tabindex: "0"}, make("table", {}, make("thead", {}, head), body));
}
function together(runs) {
  const measured = runs.filter(run => run.curve && run.score != null);
  if (measured.length < 2 || new Set(measured.map(run => run.measure.name)).size > 1) return "";
  const lines = measured.map((run, place) => ({look: look(place), name: run.label, rounds: run.curve.rounds, values: run.curve.score}));
  const show = value => score(measured[0], value);
  return make("div", {}, make("h3", {}, `${capital(measured[0].measure.name)} over rounds`),
    chart(lines, show, measured[0].measure.is_share, measured[0].measure.name));
}
function lead(runs) {
  const going = runs.filter(run => run.alive).length;
  const words = runs.length === 0 ? "No run has begun so far."
    : runs.length === 1 ? (going ? (runs[0].state === "waiting" ? "Waiting for clients." : "Running.") : runs[0].state === "finished" ? "The run is over; this is its last state." : "Not running; this is its last state.")
    : going ? `${going} of ${runs.length} running.`
    : `${runs.every(run => run.state === "finished") ? `All ${runs.length} are over` : `None of ${runs.length} is running`}; these are their last states.`;
  if (lost && runs.length && !going) return `${words} The watcher has ended, too.`;
  return lost ? `The watcher does not answer: it has ended, or its machine is gone. This is the last state, from ${ago(state.seen)}.` : words;
}
function draw() {
  const runs = state.runs, focused = document.activeElement && document.activeElement.dataset.head;
  const scrolled = [...document.querySelectorAll(".scroll")].map(one => one.scrollLeft);
  if (!runs.some(run => run.folder === picked)) picked = ((runs.find(run => run.alive) || runs.at(-1)) || {}).folder;
  const chosen = runs.find(run => run.folder === picked);
  const name = runs.length === 1 ? chosen.label : `${runs.length} runs`;
  document.getElementById("title").textContent = runs.length === 1 ? "Potluck, live" : `Potluck, live: ${name}`;
  document.title = `${name} · Potluck`;
  const all = document.getElementById("overview");
  all.hidden = runs.length < 2;
  all.replaceChildren(...runs.length < 2 ? [] : [overview(runs), together(runs)]);
  document.getElementById("detail").replaceChildren(...chosen ? detail(chosen).filter(one => one !== "") : []);
  document.querySelectorAll(".scroll").forEach((one, place) => { one.scrollLeft = scrolled[place] || 0; });
  const again = focused && [...document.querySelectorAll("[data-head]")].find(one => one.dataset.head === focused);
  if (again) again.focus({preventScroll: true});
  tell();
}
function tell() {
  const line = document.getElementById("lead");
  line.classList.toggle("warn", lost > 0 && state.runs.some(run => run.alive));
  document.body.classList.toggle("lost", lost > 0);
  const told = lead(state.runs);
  if (line.textContent !== told) line.textContent = told;
}

async function ask() {
  try {
    const answer = await fetch(`state.json${state ? `?have=${state.mark}` : ""}`, {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    lost = 0;
    if (answer.status === 200) {
      state = await answer.json();
      ahead = state.now - Date.now() / 1000;
      state.seen = now();
      draw();
    } else {
      state.seen = now();
    }
  } catch (error) {
    lost += 1;
    if (!state) document.getElementById("lead").textContent = "The watcher does not answer.";
  }
  if (state) { tell(); tick(); }
}
async function follow() {
  if (!document.hidden) await ask();
  setTimeout(follow, EVERY);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
setInterval(tick, 1000);
follow();
