/* The page: it reads the service's JSON, follows its events, and hands both to the panels. All addresses are relative. */

import { byId, element, press, setText, store, stored } from "./dom.js";
import { makeGallery } from "./gallery.js";
import { makeMap } from "./map.js";
import { showAnswers, showHoles, showNoStatus, showStatus, showTables } from "./panels.js";

const EVERY = { answers: 5, shards: 15, holes: 30, tables: 5, history: 20 }; // seconds between two readings
const REDRAW_SECONDS = 2;
const RANKS = "rank_wait_seconds"; // the columns of a job that are by rank
const SIGNS = { auto: "◐", light: "☀", dark: "☾" };
const THEMES = { auto: "as the system", light: "light", dark: "dark" };
const SHORTCUTS = {
  "?": ["show these shortcuts", () => byId("help").showModal()],
  t: ["change the theme: system, light, dark", () => nextTheme()],
  c: ["choose a cache", () => byId("cache").focus()],
  a: ["go to the answers", () => goTo("answers")],
  m: ["go to the map of the cache", () => goTo("map-cells")],
  u: ["change the colour of the map", () => map.next()],
  n: ["show other samples", () => gallery.next()],
  z: ["show all of the time, unzoomed", () => chooseSpan("")],
};

const state = { cache: null, history: null, fetchedTo: 0, events: null, drawnAt: 0, span: null, zoom: null };
const ranges = [...byId("ranges").querySelectorAll("button")];
const map = makeMap((shard) => {
  gallery.showShard(shard);
  byId("gallery").scrollIntoView({ block: "nearest" });
});
const gallery = makeGallery((query) => read("samples.json", query));
let charts = null;

// Reading

async function read(name, query = {}) {
  const cache = state.cache;
  const search = new URLSearchParams({ ...(cache == null ? {} : { cache }), ...query });
  try {
    const response = await fetch(`${name}?${search}`);
    const answer = await response.json();
    if (state.cache !== cache) return null; // another cache was chosen meanwhile
    if (answer.error) problem(answer.error);
    return response.ok && !answer.error ? answer : null;
  } catch {
    setLink(false);
    return null;
  }
}

function problem(text) {
  byId("problem").hidden = !text;
  setText(byId("problem"), text);
}

function setLink(live) {
  const link = byId("link");
  link.dataset.live = String(live);
  setText(link, live ? "live" : "no answer; trying again");
}

async function readInto(name, show, mark) {
  const answer = await read(name);
  if (!answer) return;
  show(answer);
  performance.mark(`growcache:${mark}`);
}

/* What is not there yet cannot be read again and again. */
const readWhereThere = (reader) => () => document.hidden || (document.body.dataset.missing != null && reader !== readAnswers) || reader();
const readAnswers = () => readInto("answers.json", showAnswers, "answers");
const readShards = () => readInto("shards.json", (answer) => map.show(answer), "map");
const readHoles = () => readInto("holes.json", showHoles, "holes");
const readTables = () => readInto("tables.json", showTables, "tables");

// The history, and the events that extend it

async function readHistory() {
  const known = state.history;
  const since = known ? state.fetchedTo : 0;
  const answer = await read("history.json", { since });
  if (!answer || state.history !== known || (known && state.fetchedTo !== since)) return; // another reading was faster
  if (known) {
    dropRows(known, since);
    appendRows(known, answer);
  }
  state.history = known ?? answer;
  const { at } = answer;
  if (at.length) state.fetchedTo = at[at.length - 1];
  drawHistory();
  performance.mark("growcache:charts");
}

/* All columns, those of jobs and of their ranks too. */
function columnsOf(columns) {
  return Object.values(columns).flatMap((found) => (Array.isArray(found) ? [found] : columnsOf(found)));
}

/* Events are rows only until the record of their time comes. */
function dropRows(history, after) {
  const rows = history.at.findLastIndex((at) => at <= after) + 1;
  for (const column of columnsOf(history)) column.length = rows;
}

function appendRows(history, more) {
  const before = history.at.length;
  const added = more.at.length;
  if (!added) return;
  extend(history, more, before, added, false);
  for (const job of new Set([...Object.keys(history.jobs), ...Object.keys(more.jobs)])) {
    const columns = ownOf(history.jobs, job, {});
    const rows = more.jobs[job];
    extend(columns, rows ?? {}, before, added, true);
    // Events do not say what each rank waited, so nothing is known of it until the next record.
    extend(ownOf(columns, RANKS, {}), rows?.[RANKS] ?? {}, before, added, !rows || RANKS in rows);
  }
}

/* Returns what an object has below a name that may be anything, and gives it that first where it has nothing. */
function ownOf(owner, name, otherwise) {
  if (!Object.hasOwn(owner, name)) Object.defineProperty(owner, name, { value: otherwise, enumerable: true, configurable: true, writable: true });
  return owner[name];
}

/* Adds rows. A record does not name a job that did not change, so its last values go on until it is named again. */
function extend(columns, more, before, added, goesOn) {
  for (const name of new Set([...Object.keys(columns), ...Object.keys(more)])) {
    if (name === "jobs" || name === RANKS) continue;
    const column = ownOf(columns, name, Array(before).fill(null));
    let held = goesOn && before ? column[before - 1] : null;
    for (let row = 0; row < added; row += 1) {
      const known = more[name]?.[row] ?? null;
      column.push(known ?? held);
      if (known != null) held = null;
    }
  }
}

function rowOf(status) {
  const row = { at: [status.updated_at], jobs: {} };
  for (const name of Object.keys(state.history)) {
    if (name !== "at" && name !== "jobs") row[name] = [status[name] ?? null];
  }
  for (const job of status.jobs) {
    row.jobs[job.name] = { delivered: [job.delivered], wait_seconds: [job.waits.seconds], epoch: [job.epoch], reuse: [job.reuse] };
  }
  return row;
}

function extendByStatus(status) {
  const { history } = state;
  if (!history || status.updated_at == null || status.state === "stopped") return;
  if (history.at.length && status.updated_at <= history.at[history.at.length - 1]) return;
  appendRows(history, rowOf(status));
  const now = performance.now() / 1000;
  if (now - state.drawnAt < REDRAW_SECONDS || document.hidden) return;
  drawHistory();
}

function shownRange() {
  const { at } = state.history;
  if (state.zoom) return state.zoom;
  return state.span && at.length ? [at[at.length - 1] - state.span] : [];
}

function drawHistory() {
  state.drawnAt = performance.now() / 1000;
  const [from, to] = shownRange();
  if (charts) charts.range(from, to);
  else charts = globalThis.drawCharts(byId("charts"), state.history, { from, to, onRange: onZoom });
}

function onZoom(from, to) {
  state.zoom = from == null ? null : [from, to];
  if (!state.zoom) drawHistory();
  press(ranges, state.zoom ? null : ranges.find((one) => one.dataset.span === String(state.span ?? "")));
}

function chooseSpan(span) {
  const button = ranges.find((one) => one.dataset.span === span) ?? ranges[ranges.length - 1];
  state.span = Number(button.dataset.span) || null;
  state.zoom = null;
  store("span", button.dataset.span);
  press(ranges, button);
  if (state.history) drawHistory();
}

// The theme

function setTheme(name) {
  const chosen = name in THEMES ? name : "auto";
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  store("theme", chosen === "auto" ? null : chosen);
  byId("theme").setAttribute("aria-label", `Theme: ${THEMES[chosen]}`);
  setText(byId("theme-sign"), SIGNS[chosen]);
  recolour();
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const now = document.documentElement.dataset.theme ?? "auto";
  setTheme(names[(names.indexOf(now) + 1) % names.length]);
}

function recolour() {
  if (charts) charts.recolour();
  map.recolour();
  gallery.recolour();
}

// Caches

async function open({ name, status }) {
  if (state.events) state.events.close();
  Object.assign(state, { cache: name, history: null, fetchedTo: 0, zoom: null, events: null });
  problem("");
  if (charts) charts.destroy();
  charts = null;
  map.clear();
  gallery.reset();
  document.title = name ? `${name} · growcache` : "growcache";
  setMissing(!status);
  if (status) showStatus(status);
  follow();
  await readAll();
}

async function readAll() {
  const { missing } = document.body.dataset;
  await Promise.all([readAnswers(), ...(missing == null ? [readHistory(), readShards()] : [])]);
  if (missing == null) await Promise.all([readHoles(), readTables(), gallery.refresh()]); // they are further down
  performance.mark("growcache:whole");
}

async function openNamed(name) {
  const caches = (await read("caches.json")) ?? [];
  await open(caches.find((cache) => cache.name === name) ?? { name });
}

function follow() {
  const search = new URLSearchParams(state.cache == null ? {} : { cache: state.cache });
  const events = new EventSource(`events?${search}`);
  events.addEventListener("open", () => setLink(true));
  events.addEventListener("error", () => setLink(false));
  events.addEventListener("problem", (event) => onProblem(JSON.parse(event.data).error));
  events.addEventListener("status", (event) => onStatus(JSON.parse(event.data)));
  state.events = events;
}

function onStatus(status) {
  setLink(true);
  problem("");
  showStatus(status);
  if (setMissing(false)) readAll();
  extendByStatus(status);
}

/* Of a cache that is not there yet the answers say enough. */
function onProblem(text) {
  setLink(true);
  const said = document.body.dataset.missing != null && document.querySelector("[data-answer][data-level]");
  problem(said ? "" : text);
}

function showChooser(caches) {
  const select = byId("cache");
  select.replaceChildren(...caches.map((cache) => element("option", { value: cache.name }, cache.name)));
  byId("chooser").hidden = caches.length < 2;
  select.addEventListener("change", () => {
    history.replaceState(null, "", `?${new URLSearchParams({ cache: select.value })}`);
    openNamed(select.value);
  });
}

/* Returns whether that has changed. A cache that is not there yet has answers, and nothing below them. */
function setMissing(missing) {
  const before = document.body.dataset.missing != null;
  if (missing) document.body.dataset.missing = "";
  else delete document.body.dataset.missing;
  if (missing && !before) showNoStatus();
  return before !== missing;
}

// Keys

function goTo(id) {
  byId(id).scrollIntoView({ block: "center" });
  byId(id).focus({ preventScroll: true });
}

function chooseRange(key) {
  const button = ranges[Number(key) - 1];
  if (button) chooseSpan(button.dataset.span);
  return Boolean(button);
}

function onKey(event) {
  const isTyping = event.target.closest?.("input, select, textarea, dialog");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || chooseRange(event.key)) return;
  if (!(event.key in SHORTCUTS)) return;
  event.preventDefault();
  SHORTCUTS[event.key][1]();
}

function listShortcuts() {
  const rows = Object.entries(SHORTCUTS).flatMap(([key, [words]]) => [element("dt", {}, element("kbd", {}, key)), element("dd", {}, words)]);
  const last = ranges.length;
  rows.push(element("dt", {}, element("kbd", {}, "1"), " – ", element("kbd", {}, String(last))), element("dd", {}, "choose the range of time"));
  byId("shortcuts").replaceChildren(...rows);
}

async function start() {
  setTheme(stored("theme", "auto"));
  chooseSpan(stored("span", ""));
  listShortcuts();
  byId("theme").addEventListener("click", nextTheme);
  byId("help-open").addEventListener("click", () => byId("help").showModal());
  for (const button of ranges) button.addEventListener("click", () => chooseSpan(button.dataset.span));
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", () => document.hidden || readAll());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  for (const [name, reader] of Object.entries({ answers: readAnswers, shards: readShards, holes: readHoles, tables: readTables, history: readHistory })) {
    setInterval(readWhereThere(reader), 1000 * EVERY[name]);
  }
  const asked = new URLSearchParams(location.search).get("cache");
  const caches = (await read("caches.json")) ?? [];
  showChooser(caches);
  const chosen = caches.find((cache) => cache.name === asked) ?? caches[0];
  if (chosen) byId("cache").value = chosen.name;
  await open(chosen ?? { name: null });
}

start();
