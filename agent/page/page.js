"use strict";
// What comes from a model or a client is only ever set as text; the page's policy has no way to run it either.

const EVERY_MS = 2000, PATIENCE_MS = 8000, SHOWN_EVENTS = 60, REMEMBERED_RESULTS = 64, PICTURE_EVERY_MS = 500;
const SHOWN_ENTRIES = 8, SHOWN_VALUES = 8;
const MARKS = {serving: "●", degraded: "▲", not_ready: "■", empty: "○", stopping: "◆", READY: "●", LOADING: "▲",
  UNLOADING: "▲", UNAVAILABLE: "■", lost: "✕"};
const STATES = {serving: "Serving", degraded: "Degraded", not_ready: "Not ready", empty: "Empty", stopping: "Stopping",
  lost: "Not connected", READY: "ready", LOADING: "loading", UNLOADING: "unloading", UNAVAILABLE: "not available"};
const KINDS = {anonymous: "Anonymous", file: "File-backed", shared: "Shared"};
const PARTS = {weights: "weights", activations: "activations", slots: "slots", runtime: "runtime", gateway: "gateway",
  answers: "kept answers"};
const CAUSES = {governor: "heat or power", queue: "a full queue", misses: "missed deadlines"};
// Of Okabe and Ito, told apart by the colour-blind too.
const COLOURS = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"];

const $ = id => document.getElementById(id);

// --- words and elements

function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const drawn = new Map();
// Elements are made anew only where what they show has changed, so that nothing flickers and a selection stays.
function draw(id, data, build) {
  const key = JSON.stringify(data);
  if (drawn.get(id) === key) return;
  drawn.set(id, key);
  $(id).replaceChildren(...build());
}

function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function human(nbytes) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (nbytes < 1024) return `${unit === "B" ? nbytes : nbytes.toFixed(1)} ${unit}`;
    nbytes /= 1024;
  }
  return `${nbytes.toFixed(1)} GiB`;
}

function duration(seconds) {
  if (seconds === null) return "–";
  if (seconds < 1) return `${(seconds * 1e3).toPrecision(seconds < 0.1 ? 2 : 3)} ms`.replace(/^(\d)\.0 /, "$1 ");
  return `${seconds.toPrecision(3)} s`;
}

function span(seconds) {
  const [days, hours, minutes] = [seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60].map(Math.floor);
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

function clock(at) {
  const two = number => String(number).padStart(2, "0");
  return [at.getHours(), at.getMinutes(), at.getSeconds()].map(two).join(":");
}

function when(at) {
  const today = at.toDateString() === new Date().toDateString();
  return make("time", {dateTime: at.toISOString(), title: at.toLocaleString()},
    today ? clock(at) : at.toLocaleDateString(undefined, {day: "2-digit", month: "2-digit"}));
}

const count = number => number.toLocaleString("en").replaceAll(",", "\u202f");
const several = (number, thing) => `${count(number)} ${thing}${number === 1 ? "" : "s"}`;

function bar(className, parts, whole) {
  const pieces = parts.map(([kind, size]) => {
    const piece = make("i", {className: kind});
    piece.style.width = `${Math.min(100 * size / whole, 100)}%`;
    return piece;
  });
  return make("div", {className: `bar ${className}`}, ...pieces);
}

// --- the figures

let status = null;

function show(next) {
  if (status !== null && status.epoch !== next.epoch) {
    note("restart", new Date(next.started_s * 1e3), "The agent was restarted.");
    forgetResults();
  }
  status = next;
  document.body.classList.remove("stale");
  showState(next.state, next.why, next.degradation);
  say($("host"), `Tightfit at ${location.host}`);
  document.title = `${STATES[next.state]} – ${location.host}`;
  say($("version"), `${next.name} ${next.version}`);
  showFacts(next);
  draw("model-list", next.models, () => next.models.length ? next.models.map(model)
    : [make("li", {className: "empty"}, "No model is loaded. Configure one, or load one over the repository API.")]);
  showMemory(next.memory);
  showQueue(next.models);
  draw("histogram", next.latency, () => histogram(next.latency));
  say($("latency-sum"), latencyText(next.latency));
  $("histogram").setAttribute("aria-label", histogramText(next.latency));
  showRefusals(next);
  chooseResults(next.models);
}

function showState(state, why, degradation) {
  const element = $("state");
  const [mark, word, reason] = element.children;
  const cause = degradation && degradation.level ? ` (level ${degradation.level} of 3, because of ${
    CAUSES[degradation.cause] || degradation.cause})` : "";
  element.className = state;
  say(mark, MARKS[state]);
  say(word, STATES[state]);
  say(reason, why ? `${why}${cause}` : "");
}

function showFacts(next) {
  const lately = next.latency.counts.reduce((sum, each) => sum + each, 0);
  const refused = next.refusals.reduce((sum, each) => sum + each.recent, 0);
  const rate = lately / Math.max(next.window_s, 1);
  say($("uptime"), span(next.uptime_s));
  say($("rate"), lately ? rate.toFixed(rate < 10 ? 1 : 0) : "0");
  say($("p50"), duration(next.latency.p50_s));
  say($("p99"), duration(next.latency.p99_s));
  say($("misses"), count(next.misses));
  say($("refused"), count(refused));
  say($("window"), `Of the last ${span(next.window_s)}; ${count(next.answered)} answered since the start.`);
  say($("reasons-window"), span(next.window_s));
}

function model(each) {
  const state = make("span", {className: each.state},
    make("span", {className: "mark", ariaHidden: "true"}, MARKS[each.state] || "○"), ` ${STATES[each.state] || each.state}`);
  const about = [each.version && `version ${each.version}`, each.scheme, each.board, each.runtime].filter(Boolean);
  const name = make("div", {className: "name"}, make("b", {}, each.name), state, make("small", {}, about.join(" · ")));
  if (each.reason) name.append(make("small", {className: "why"}, each.reason));
  const {requests, engine, latency} = each;
  const cells = [
    ["p50", duration(latency.p50_s)],
    ["p99", duration(latency.p99_s)],
    ["at the door", `${requests.door} / ${requests.room}`],
    ["in slots", `${requests.slots_used} / ${requests.slots}`],
    ["ready", requests.ready],
    ["running", requests.running],
    ["restarts", engine ? engine.restarts : "–"],
  ];
  const pairs = cells.map(([term, value]) => make("div", {}, make("dt", {}, term), make("dd", {}, String(value))));
  return make("li", {}, name, make("dl", {className: "cells"}, ...pairs));
}

function showMemory(memory) {
  const sum = (rows, kind) => rows.reduce((all, row) => all + (!kind || row.kind === kind ? row.nbytes : 0), 0);
  const planned = sum(memory.planned), used = sum(memory.used);
  const reserve = memory.total_bytes - memory.budget_bytes;
  // On a machine that is much larger than what it serves the bars would be too short to be read.
  const whole = Math.max(planned, used) * 8 > memory.total_bytes ? memory.total_bytes : Math.max(planned, used, 1) * 1.1;
  const scaled = whole === memory.total_bytes;
  say($("memory-sum"), `${human(used)} used, ${human(planned)} planned, ${human(memory.budget_bytes)} budget; ${
    human(reserve)} stay for the system${scaled ? " (hatched)" : "; the bars end short of the budget"}.`);
  draw("memory-bars", [memory.planned, memory.used, whole], () => ["", ...Object.keys(KINDS)].flatMap(kind => {
    const parts = new Map();
    for (const row of memory.planned) {
      if (!kind || row.kind === kind) parts.set(row.part, (parts.get(row.part) || 0) + row.nbytes);
    }
    const [plan, use] = [sum(memory.planned, kind), sum(memory.used, kind)];
    const upper = bar("plan", [...parts], whole), lower = bar("used", [["", use]], whole);
    if (scaled && !kind) {
      const hatched = make("i", {className: "reserve"});
      hatched.style.width = `${100 * reserve / whole}%`;
      upper.append(hatched);
    }
    const name = kind ? KINDS[kind] : "All";
    const both = make("div", {role: "img", ariaLabel: `${name}: ${human(use)} used, ${human(plan)} planned`}, upper, lower);
    return [make("div", {}, name, make("small", {}, human(use))), both];
  }));
  draw("memory-key", memory.planned, () => Object.keys(PARTS).flatMap(part => {
    const nbytes = memory.planned.reduce((all, row) => all + (row.part === part ? row.nbytes : 0), 0);
    return nbytes ? [make("li", {}, make("i", {className: part, ariaHidden: "true"}), `${PARTS[part]} ${human(nbytes)}`)] : [];
  }));
}

function showQueue(models) {
  const sum = field => models.reduce((all, each) => all + each.requests[field], 0);
  const [room, slots] = [sum("room"), sum("slots")];
  for (const [id, value, whole] of [
    ["door", sum("door"), room], ["slots", sum("slots_used"), slots], ["ready", sum("ready"), slots],
    ["running", sum("running"), slots],
  ]) {
    const text = `${value} of ${whole}`;
    draw(id, text, () => [bar("", [["", value]], Math.max(whole, 1)), make("span", {}, text)]);
    $(id).firstChild.ariaHidden = "true";
  }
}

const bound = seconds => seconds < 1 ? String(seconds * 1e3) : `${seconds}s`;

function histogram({bounds_s: bounds, counts, p50_s: p50, p99_s: p99}) {
  const most = Math.max(...counts, 1);
  const columns = counts.map((number, index) => {
    const filled = make("i", {});
    // What there is at all can be seen.
    filled.style.height = number ? `max(2px, ${100 * number / most}%)` : "0";
    const text = index < bounds.length ? bound(bounds[index]) : "";
    return make("div", {className: "column", title: `${columnText(bounds, index)}: ${count(number)}`}, filled,
      make("span", {}, text));
  });
  const ranks = [["p50", p50], ["p99", p99]].filter(([, value]) => value !== null).map(([name, value], which, all) => {
    const index = Math.min(bounds.findIndex(each => value <= each), bounds.length);
    const [lower, upper] = [index ? bounds[index - 1] : 0, bounds[index]];
    const at = 100 * (index + (value - lower) / (upper - lower)) / counts.length;
    const line = make("div", {className: which === 0 && all.length > 1 || at > 80 ? "rank left" : "rank"}, name);
    // Its words go to the side where there is room for them.
    if (which === 0 && at < 12) line.className = "rank";
    line.style.left = `${at}%`;
    return line;
  });
  if (ranks.length === 2 && ranks[0].className === "rank" && parseFloat(ranks[1].style.left) < 22) {
    ranks[0].replaceChildren("p50, p99");
    ranks[1].replaceChildren();
  }
  return [...columns, ...ranks];
}

function columnText(bounds, index) {
  if (index === 0) return `up to ${duration(bounds[0])}`;
  if (index === bounds.length) return `more than ${duration(bounds[index - 1])}`;
  return `${duration(bounds[index - 1])} to ${duration(bounds[index])}`;
}

function latencyText({counts, p50_s, p99_s}) {
  const all = counts.reduce((sum, each) => sum + each, 0);
  return all ? `${several(all, "answer")}: p50 ${duration(p50_s)}, p99 ${duration(p99_s)}; up to so many milliseconds:`
    : "No requests yet, or none lately.";
}

function histogramText({bounds_s: bounds, counts}) {
  const told = counts.flatMap((number, index) => number ? [`${columnText(bounds, index)}: ${number}`] : []);
  return told.length ? `Answers by latency. ${told.join("; ")}` : "No requests yet";
}

function showRefusals(next) {
  $("reasons").hidden = !next.refusals.length;
  if (next.refusals.length) {
    const key = JSON.stringify(next.refusals);
    if (drawn.get("reasons") !== key) {
      drawn.set("reasons", key);
      $("reasons").tBodies[0].replaceChildren(...next.refusals.map(each => make("tr", {},
        make("td", {}, make("b", {}, each.reason), make("small", {}, `${each.status}: ${each.meaning}`)),
        make("td", {className: "number"}, count(each.recent)), make("td", {className: "number"}, count(each.count)))));
    }
  }
  draw("refusal-list", next.last_refusals, () => next.last_refusals.length ? next.last_refusals.map(each => {
    const about = [each.model || "no such model", each.count > 1 && `${count(each.count)} times`].filter(Boolean);
    return make("li", {}, when(new Date(each.last_s * 1e3)), make("div", {}, make("b", {}, each.reason),
      ` ${about.join(", ")}`, make("small", {}, each.message)));
  }) : [make("li", {className: "empty"}, "Nothing was refused.")]);
}

// --- asking for them, again and again

let paused = false, timer = 0, asking = null, lostAt = null;
const active = () => !paused && !document.hidden;

async function ask() {
  clearTimeout(timer);
  if (!active() || asking) return;
  asking = new AbortController();
  const limit = setTimeout(() => asking && asking.abort(), PATIENCE_MS);
  try {
    const response = await fetch("/v2/status", {signal: asking.signal, cache: "no-store"});
    const body = await response.json();
    if (!response.ok) throw new Error(`the agent answers ${response.status}: ${body.error || "no reason"}`);
    if (lostAt !== null) connectEvents();
    lostAt = null;
    show(body);
    say($("link"), `Live, as of ${clock(new Date(body.at_s * 1e3))}.`);
  } catch (error) {
    lose(error);
  } finally {
    clearTimeout(limit);
    asking = null;
    if (active()) timer = setTimeout(ask, EVERY_MS);
  }
}

function lose(error) {
  if (!active()) return;
  lostAt = lostAt || new Date();
  document.body.classList.add("stale");
  const refused = error instanceof Error && error.message.startsWith("the agent answers");
  showState("lost", status ? "The figures below are the last known." : "");
  document.title = `Not connected – ${location.host}`;
  say($("link"), `${refused ? `${error.message}. ` : ""}No figures since ${clock(lostAt)}; trying again every ${
    EVERY_MS / 1e3} seconds.`);
}

function resume() {
  if (active()) {
    ask();
    connectEvents();
    if (followed) follow(followed);
  } else {
    // A page that nobody looks at costs the agent nothing.
    clearTimeout(timer);
    for (const source of [events, results]) if (source) source.close();
    events = results = null;
    say($("link"), "Paused: nothing is asked for.");
  }
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").ariaPressed = String(paused);
  say($("pause"), paused ? "Go on" : "Pause");
  resume();
});
document.addEventListener("visibilitychange", resume);

// --- events

let events = null, lastEvent = "0";
const HAPPENINGS = {
  load: each => `${each.model}: an engine loaded version ${each.version} in ${each.seconds} s.`,
  activate: each => `${each.model}: requests go to version ${each.version}${each.before ? `, no more to ${each.before}` : ""}.`,
  unload: each => `${each.model}: version ${each.version} was unloaded.`,
  failed: each => `${each.model} could not be activated: ${each.error}`,
  engine_down: each => `${each.model}: the engine ${each.how}${each.starts_again ? "; it is started again." : ", once too often."}`,
  engine_up: each => `${each.model}: the engine runs again (restart ${each.restarts}).`,
  degrade: each => each.level > each.before
    ? `Service reduced to level ${each.level}, ${each.step}, because of ${CAUSES[each.cause] || each.cause}.`
    : `Service back to level ${each.level || 0}, ${each.step}.`,
  lost: each => each.restarted ? "The agent was restarted." : `${several(each.count, "event")} went by unseen.`,
};

function note(kind, at, text) {
  const list = $("event-list");
  const first = list.firstElementChild;
  if (first && first.className === "empty") first.remove();
  if (text === "The agent was restarted." && first && first.textContent.endsWith(text)) return;
  list.prepend(make("li", {className: kind}, when(at), make("div", {}, text)));
  while (list.children.length > SHOWN_EVENTS) list.lastElementChild.remove();
}

function connectEvents() {
  if (events && events.readyState !== EventSource.CLOSED) return;
  events = new EventSource(`/v2/events?since=${encodeURIComponent(lastEvent)}`);
  for (const [kind, text] of Object.entries(HAPPENINGS)) {
    events.addEventListener(kind, event => {
      lastEvent = event.lastEventId;
      const each = {level: 0, before: 0, ...JSON.parse(event.data)};
      note(kind, each.at ? new Date(each.at) : new Date(), text(each));
    });
  }
}
// A browser tries again by itself, but not where it was refused.
setInterval(() => {
  if (!active()) return;
  connectEvents();
  if (followed && results && results.readyState === EventSource.CLOSED) follow(followed);
}, EVERY_MS);

// --- results

let results = null, followed = "", newest = null, pictured = null, fetching = false, drawing = 0, nextPicture = 0;
const remembered = new Map();

function chooseResults(models) {
  const open = models.filter(each => each.results);
  const names = [...new Set(open.map(each => each.name))];
  const select = $("follow");
  draw("follow", names, () => (names.length ? names : ["none"]).map(name => make("option", {value: name}, name)));
  select.disabled = !names.length;
  if (!names.includes(followed)) {
    followed = names[0] || "";
    forgetResults();
    if (followed) follow(followed);
  }
  select.value = followed || "none";
  $("view").hidden = !shown().picture;
  if (!newest) {
    say($("result-empty"), followed ? `Waiting for the next answer of ${followed}.`
      : "No model shows its results: they are the answers to all clients. Where that is wanted, set results_mib.");
  }
}

const shown = () => (status && status.models.find(each => each.name === followed && each.results)) || {};

function forgetResults() {
  newest = pictured = null;
  remembered.clear();
  $("result").replaceChildren();
  $("result").style.minHeight = "";
  drawn.delete("result");
  $("result-empty").hidden = false;
  say($("result-of"), "");
  const canvas = $("picture");
  canvas.getContext("2d").clearRect(0, 0, canvas.width, canvas.height);
}

function follow(name) {
  if (results) results.close();
  results = new EventSource(`/v2/models/${encodeURIComponent(name)}/results`);
  results.addEventListener("result", event => {
    newest = {id: event.lastEventId, at: new Date(), ...JSON.parse(event.data)};
    newest.id = event.lastEventId;
    remembered.set(newest.id, newest);
    if (remembered.size > REMEMBERED_RESULTS) remembered.delete(remembered.keys().next().value);
    if (!drawing) drawing = setTimeout(showResults, 100);
  });
}

$("follow").addEventListener("change", event => {
  followed = event.target.value;
  forgetResults();
  $("view").hidden = !shown().picture;
  follow(followed);
});

async function showResults() {
  drawing = 0;
  if (!newest) return;
  const model = shown();
  if (model.picture && !fetching && performance.now() >= nextPicture) await fetchPicture(model);
  // Boxes and labels are those of the picture that is shown.
  const result = model.picture && pictured ? pictured.result : newest;
  if (result) showResult(result);
}

async function fetchPicture(model) {
  fetching = true;
  nextPicture = performance.now() + PICTURE_EVERY_MS;
  try {
    const response = await fetch(`/v2/models/${encodeURIComponent(model.name)}/results/picture`, {cache: "no-store"});
    if (response.ok) {
      const result = remembered.get(response.headers.get("Tightfit-Result"));
      const image = await createImageBitmap(await response.blob(),
        {imageOrientation: model.upright ? "from-image" : "none"});
      if (result && model.name === followed) {
        pictured = {result, image};
        showPicture(pictured);
      }
    }
  } catch {
    // The next result brings the next try.
  } finally {
    fetching = false;
    // The last of a burst is shown too.
    if (newest && pictured && newest !== pictured.result && !drawing) {
      drawing = setTimeout(showResults, PICTURE_EVERY_MS);
    }
  }
}

function outputs(result) {
  return Object.fromEntries(result.outputs.map(each => [each.name, each]));
}

function entries(result) {
  const {label, text, score, boxes} = outputs(result);
  const names = (label || text || {}).data;
  if (!names || !score) return null;
  return names.map((name, index) => ({name, score: score.data[index], box: boxes && boxes.data.slice(4 * index, 4 * index + 4)}));
}

function colour(result, name) {
  const names = [...new Set(entries(result).map(each => each.name))].sort();
  return COLOURS[names.indexOf(name) % COLOURS.length];
}

function showPicture({result, image}) {
  const canvas = $("picture"), scale = devicePixelRatio || 1;
  $("view").hidden = false;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = canvas.clientHeight * scale;
  const context = canvas.getContext("2d");
  const zoom = Math.min(canvas.width / image.width, canvas.height / image.height);
  const [left, top] = [(canvas.width - image.width * zoom) / 2, (canvas.height - image.height * zoom) / 2];
  context.imageSmoothingEnabled = zoom < 3;
  context.drawImage(image, left, top, image.width * zoom, image.height * zoom);
  const found = (entries(result) || []).filter(each => each.box);
  context.font = `600 ${13 * scale}px system-ui, sans-serif`;
  context.textBaseline = "middle";
  for (const {name, score, box} of found.reverse()) {
    const [x0, y0, x1, y1] = box.map((each, index) => (index % 2 ? top : left) + each * zoom);
    for (const [style, width] of [["#000", 4], [colour(result, name), 2]]) {
      context.strokeStyle = style;
      context.lineWidth = width * scale;
      context.strokeRect(x0, y0, x1 - x0, y1 - y0);
    }
    const text = `${name} ${score.toFixed(2)}`, height = 18 * scale, width = context.measureText(text).width + 8 * scale;
    const y = y0 - height >= 0 ? y0 - height : y0;
    const x = Math.max(0, Math.min(x0, canvas.width - width));
    context.fillStyle = colour(result, name);
    context.fillRect(x, y, width, height);
    context.fillStyle = colour(result, name) === "#0072b2" ? "#fff" : "#000";
    context.fillText(text, x + 4 * scale, y + height / 2);
  }
  canvas.setAttribute("aria-label", found.length ? `The newest image; found in it: ${
    found.map(each => each.name).join(", ")}` : "The newest image");
}

function showResult(result) {
  $("result-empty").hidden = true;
  const took = result.timing ? `, ${duration(result.timing.total_us / 1e6)}` : "";
  say($("result-of"), `number ${count(result.seq)}, ${clock(result.at)}${took}`);
  const found = entries(result);
  draw("result", result.id, () => found ? found.length ? shorten(found.map(each => entry(result, each)))
    : [make("li", {className: "tensor empty"}, "Nothing was found in it.")] : shorten(result.outputs.map(tensor)));
  // What is below stays where it is when the next result is shorter.
  const list = $("result");
  list.style.minHeight = `${Math.max(parseFloat(list.style.minHeight) || 0, list.offsetHeight)}px`;
}

function shorten(items) {
  if (items.length <= SHOWN_ENTRIES) return items;
  const left = items.length - SHOWN_ENTRIES;
  return [...items.slice(0, SHOWN_ENTRIES), make("li", {className: "tensor empty"}, `and ${left} more`)];
}

function entry(result, {name, score, box}) {
  const label = make("span", {className: "label"});
  if (box) {
    const swatch = make("span", {className: "swatch", ariaHidden: "true"});
    swatch.style.background = colour(result, name);
    label.append(swatch);
  }
  label.append(name || "(empty)");
  const likely = bar("", [["", Math.max(0, Math.min(score, 1))]], 1);
  likely.ariaHidden = "true";
  return make("li", {}, label, likely, make("span", {className: "number"}, score.toFixed(3)));
}

function tensor({name, datatype, shape, data}) {
  const values = data.slice(0, SHOWN_VALUES).map(each => typeof each === "number" ? +each.toPrecision(4) : each);
  const more = data.length > SHOWN_VALUES ? ", …" : "";
  return make("li", {className: "tensor"}, make("span", {className: "label"}, make("b", {}, name), ` ${datatype} [${shape}]`),
    make("code", {}, `${values.join(", ")}${more}`));
}

addEventListener("resize", () => pictured && showPicture(pictured));
say($("host"), `Tightfit at ${location.host}`);
resume();
