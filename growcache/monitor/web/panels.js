/* What a status says, as rows and figures. */

import { byId, element, foreign, onChange, setText } from "./dom.js";
import { inBytes, inCount, inPercent, inTime, plural } from "./words.js";

const MOST_ROWS = 12;
const LONG_ANSWER = 140; // characters, beyond which it is written smaller
const BAR = [
  ["samples", "samples"],
  ["leaving", "leaving"],
  ["writing", "being written"],
  ["index", "index and catalog"],
  ["free", "free"],
];

function spaceOf(status) {
  let overhead = status.budget_bytes + status.catalog_bytes;
  if (status.state === "stopped") {
    if (!status.samples) overhead = status.bytes;
    else if (status.sample_bytes == null) overhead = 0;
    else overhead = Math.max(status.bytes - status.samples * status.sample_bytes - status.retired_bytes, status.catalog_bytes);
  }
  const samples = Math.max(0, status.bytes - overhead - status.retired_bytes);
  const free = Math.max(0, status.max_bytes - status.bytes - status.reserved_bytes);
  return { samples, leaving: status.retired_bytes, writing: status.reserved_bytes, index: Math.max(0, overhead), free };
}

const showSpace = onChange(({ space, note }) => {
  const shown = BAR.filter(([name]) => space[name] > 0 || name === "samples");
  const total = Math.max(1, Object.values(space).reduce((sum, one) => sum + one, 0));
  byId("bar").replaceChildren(...shown.map(([name]) => {
    const part = element("span", { class: `bar-part ${name}` });
    part.style.flexGrow = String(space[name] / total);
    return part;
  }));
  byId("bar").setAttribute("aria-label", `Space on the disk: ${note}`);
  const items = shown.map(([name, words]) =>
    element("li", {}, element("span", { class: `swatch ${name}`, "aria-hidden": "true" }), `${words} ${inBytes(space[name])}`));
  byId("bar-legend").replaceChildren(element("li", { class: "whole" }, note), ...items);
});

function spaceNote(status) {
  if (!status.max_bytes) return `${inBytes(status.bytes)} on disk`;
  const used = status.bytes + status.reserved_bytes;
  return `${inPercent(used / status.max_bytes)} of ${inBytes(status.max_bytes)}`;
}

function figuresOf(status) {
  const covered = status.endless ? "unknown" : status.coverage == null ? "not known yet" : inPercent(status.coverage);
  const population = status.population_samples && !status.endless ? `of about ${plural(status.population_samples, "sample")}` : status.listing_complete ? "" : "still listing";
  const isOff = status.state === "stopped";
  return [
    ["cached", inCount(status.samples), plural(status.shards, "shard")],
    ["drawn", inCount(status.drawn), isOff ? "in all" : `${inCount(status.samples_per_second)} samples/s now`],
    ["evicted", inCount(status.evicted_samples), ""],
    ["from the store", isOff ? "0 B/s" : `${inBytes(status.bytes_per_second)}/s`, `${inBytes(status.egress_bytes)} in ${isOff ? "the last run" : "this run"}`],
    ["coverage", covered, population],
    ["reuse", `${status.reuse.toFixed(1)} ×`, `${inCount(status.delivered)} delivered`],
    ["holes", inCount(status.holes), status.failures ? `${plural(status.failures, "attempt")} retried` : ""],
    [isOff ? "stopped for" : "running for", isOff ? sinceStop(status) : inTime(status.uptime_seconds), ""],
  ];
}

function sinceStop(status) {
  return status.updated_at == null ? "–" : inTime(Date.now() / 1000 - status.updated_at);
}

const showFigures = onChange((figures) => {
  byId("figures").replaceChildren(...figures.map(([name, value, more]) =>
    element("div", { class: "figure" }, element("dt", {}, name), element("dd", {}, element("strong", {}, value), more && element("span", {}, more)))));
});

// Tables

function tableOf(name, heads, empty) {
  const place = document.querySelector(`[data-table="${name}"]`);
  return onChange((rows) => {
    if (!rows.length) return place.replaceChildren(element("p", { class: "nothing" }, empty));
    const head = heads.length > 0 && element("thead", {}, element("tr", {}, ...heads.map((one) => element("th", { scope: "col" }, one))));
    const lines = rows.slice(0, MOST_ROWS).map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, foreign(cell)))));
    const more = rows.length - MOST_ROWS;
    const note = more > 0 ? element("p", { class: "nothing" }, `and ${more} more`) : "";
    return place.replaceChildren(element("table", {}, head, element("tbody", {}, ...lines)), note);
  });
}

const showJobs = tableOf("jobs", ["job", "received", "reuse", "epoch", "waited", "reader"], "No job has read this cache yet.");
const showLeases = tableOf("leases", ["job", "holds", "for", "process"], "No reader holds anything back from eviction.");
const showSamplers = tableOf("samplers", ["sampler", "state", "progress"], "No sampler runs.");
const showSources = tableOf("sources", [], "Nothing is listed yet.");

const showRanks = tableOf("ranks", ["job", "rank", "batches", "waited", "half below", "99 % below"], "No training loop has reported its waits yet.");
const showStages = tableOf("stages", ["stage", "time", "share", ""], "No group has been filled yet.");
const showRequests = tableOf("requests", [], "No request has been counted yet.");

function shortTime(seconds) {
  if (seconds == null) return "–";
  return seconds < 1 ? `${Number((1000 * seconds).toPrecision(3))} ms` : inTime(seconds);
}

const rankRow = (row) => [
  row.job, `${row.rank}${row.open ? "" : " (ended)"}`, inCount(row.batches), row.wait_seconds < 60 ? `${row.wait_seconds.toFixed(1)} s` : inTime(row.wait_seconds), ...row.below.map(shortTime),
];

const STAGE_WORDS = {
  fetch: "read and decode", transform: "part of fetch: your function", encode: "encode", reserve: "wait for room", write: "write",
};

function stageRows(stages, waiting) {
  const total = stages.reduce((sum, row) => sum + (row.name === "transform" ? 0 : row.amount), 0);
  const rows = stages.map((row) => [row.name, inTime(row.amount), total ? inPercent(row.amount / total) : "", STAGE_WORDS[row.name] ?? ""]);
  return [...rows, ...waiting.map((row) => [`waiting: ${row.name}`, inTime(row.amount), "", "no group could be started"])];
}

export function showTables({ ranks, stages, requests, waiting }) {
  showRanks(ranks.map(rankRow));
  showStages(stageRows(stages, waiting));
  showRequests(requests.map((row) => [row.name, inCount(row.amount)]));
}

const jobRow = (job) => [
  job.name, inCount(job.delivered), `${job.reuse.toFixed(1)} ×`, String(job.epoch),
  `${inTime(job.waits.seconds)}, ${plural(job.waits.count, "time")}`, `${job.open ? "pid" : "ended, pid"} ${job.pid}`,
];

function leaseRow(lease) {
  const left = lease.seconds_left == null ? "" : `, kept for another ${inTime(lease.seconds_left)}`;
  const state = lease.open ? "" : `its reader died${left}; `;
  return [lease.job || "(no job)", plural(lease.shards, "shard"), inTime(lease.age_seconds), `${state}pid ${lease.pid} on ${lease.host}: ${lease.command}`];
}

const foreignLeaseRow = (lease) => [`user ${lease.uid}`, "unknown", "", `${lease.name} cannot be read: ${lease.reason}; ${lease.advice}`];

const samplerRow = (worker) => [
  `${worker.id}, pid ${worker.pid ?? "–"}${worker.node ? ` on ${worker.node}` : ""}`, worker.state, worker.parts ? `${worker.parts_done} of ${plural(worker.parts, "read")}` : "",
];

function sourceRows(status) {
  const found = [["objects", `${inCount(status.objects)}${status.listing_complete ? "" : " so far"}`]];
  if (status.unmatched) found.push(["without a matching file", inCount(status.unmatched)]);
  const left = Object.entries(status.left_out).map(([name, count]) => `${name} ${inCount(count)}`);
  if (left.length) found.push(["left out", left.join(", ")]);
  if (status.sample_bytes) found.push(["bytes of a sample", inBytes(status.sample_bytes)]);
  for (const one of status.sources) {
    found.push([one.url, `${inPercent(one.share)} of draws, about ${plural(one.samples, "sample")} in ${plural(one.objects, "object")}, drawn ${one.rounds.toFixed(1)} times`]);
  }
  for (const one of status.subsets) {
    found.push([`${one.name}${one.used ? " (drawn from)" : ""}`, `${plural(one.objects, "object")} in ${plural(one.groups, "group")}`]);
  }
  const moved = movedText(status);
  if (moved) found.push(["lanes", moved]);
  if (status.fingerprint) found.push(["fingerprint", status.fingerprint]);
  return status.objects || status.fingerprint || status.sources.length ? found : [];
}

function movedText({ moved }) {
  if (!moved || !(moved.parts || moved.left)) return "";
  const more = moved.left ? `; ${inCount(moved.left)} more to come` : "";
  return `${plural(moved.parts, "part")} drawn from lanes that another node owned earlier in the pass and may have drawn as well${more}`;
}

const showErrors = onChange(({ errors, aside }) => {
  const items = errors.map((error) => element("li", {}, foreign(error)));
  if (aside) items.unshift(element("li", { class: "aside" }, foreign(aside)));
  byId("errors").replaceChildren(...(items.length ? items : [element("li", { class: "nothing" }, "None.")]));
});

function asideText({ set_aside: aside }) {
  if (!aside || !aside.parts) return "";
  const objects = aside.objects ? `${plural(aside.objects, "object")} ${aside.objects === 1 ? "keeps" : "keep"} failing: ` : "";
  return `${objects}${plural(aside.parts, "part")} set aside${aside.key ? ` (${aside.key}: ${aside.reason})` : ""}`;
}

export const showHoles = onChange(({ total, noted, groups }) => {
  const place = byId("holes");
  if (!total) return place.replaceChildren(element("p", { class: "nothing" }, "None: every visit yielded its samples."));
  const note = noted < total ? `${plural(total, "hole")} in all; the last ${noted} by reason:` : `${plural(total, "hole")}:`;
  return place.replaceChildren(element("p", { class: "nothing" }, note), ...groups.map(holeGroup));
});

function holeGroup(group) {
  const examples = group.examples.map((one) => element("li", {}, foreign(one.key), ` part ${one.part}, shard ${one.shard}`));
  const summary = element("summary", {}, element("strong", {}, inCount(group.count)), " ", foreign(group.reason));
  return element("details", {}, summary, element("ul", {}, ...examples));
}

export const showAnswers = onChange((answers) => {
  for (const [name, answer] of Object.entries(answers)) {
    const place = document.querySelector(`[data-answer="${name}"]`);
    if (!place) continue;
    if (place.dataset.level && place.dataset.level !== answer.level) setText(byId("announced"), `${answer.question} ${answer.answer}`);
    place.dataset.level = answer.level;
    setText(place.querySelector("h2"), answer.question);
    setText(place.querySelector(".words"), answer.answer);
    place.classList.toggle("long", answer.answer.length > LONG_ANSWER);
    setText(place.querySelector(".action"), answer.action);
  }
});

export function showNoStatus() {
  byId("state").dataset.state = "unknown";
  setText(byId("state"), "no cache");
  setText(byId("path"), "");
  setText(byId("footer"), "");
}

export function showStatus(status) {
  const state = byId("state");
  state.dataset.state = status.state;
  setText(state, status.state);
  setText(byId("path"), status.path);
  showSpace({ space: spaceOf(status), note: spaceNote(status) });
  showFigures(figuresOf(status));
  showJobs(status.jobs.toReversed().map(jobRow));
  showLeases([...status.leases.map(leaseRow), ...status.foreign_leases.map(foreignLeaseRow)]);
  showSamplers(status.worker_states.map(samplerRow));
  showSources(sourceRows(status));
  showErrors({ errors: status.last_errors.toReversed(), aside: asideText(status) });
  const process = status.pid == null ? "no service" : `service pid ${status.pid} on ${status.host}`;
  setText(byId("footer"), `${status.path} · ${process}${status.generation ? ` · generation ${status.generation}` : ""}`);
}
