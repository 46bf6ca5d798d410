/* Samples as cards: traces are drawn, pictures are PNGs that the server made, everything else is text. */

import { byId, element, foreign, setText } from "./dom.js";
import { inBytes, plural } from "./words.js";

const TRACE = { width: 260, height: 110 };
const MOST_SHARED = 3; // traces that are drawn over each other
const OVERLAP = 1.6; // bands that the largest trace may take
const LEVELS = 1000; // of a trace, from its least value to its greatest
const PNG = "data:image/png;base64,";
const PIXELATED = 96; // pictures below so many pixels are shown larger
const COUNT = 8;
const LINES = 6; // colours of traces

function number(value) {
  if (value == null) return "–";
  const text = Number(value).toPrecision(4);
  return text.includes("e") ? text : String(Number(text));
}

function trace(field) {
  const canvas = element("canvas", { role: "img", "aria-label": `${field.name}: ${plural(field.channels, "trace")} of ${plural(field.length, "value")}` });
  canvas.className = "trace";
  canvas.dataset.points = JSON.stringify(field.points);
  return canvas;
}

function drawTrace(canvas) {
  const points = JSON.parse(canvas.dataset.points);
  const ratio = Math.max(1, devicePixelRatio || 1);
  const width = canvas.clientWidth || TRACE.width;
  canvas.width = width * ratio;
  canvas.height = TRACE.height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.lineWidth = 1;
  const style = getComputedStyle(canvas);
  points.forEach((channel, i) => {
    context.strokeStyle = style.getPropertyValue(`--series-${(i % LINES) + 1}`).trim() || "#2563eb";
    drawLine(context, channel, width, heightIn(points, i));
  });
}

/* Returns the height of a level: a few traces share the whole of it, and more of them are one below the other, as in a recording. */
function heightIn(points, i) {
  if (points.length <= MOST_SHARED) return (level) => 3 + (1 - level / LEVELS) * (TRACE.height - 6);
  const known = points.map((channel) => channel.filter((level) => level != null));
  const range = Math.max(1, ...known.map((levels) => Math.max(...levels) - Math.min(...levels)));
  const band = TRACE.height / points.length;
  const middle = (Math.max(...known[i]) + Math.min(...known[i])) / 2;
  return (level) => band * (i + 0.5) - ((level - middle) / range) * band * OVERLAP;
}

function drawLine(context, channel, width, heightOf) {
  const last = Math.max(1, channel.length - 1);
  let pen = false;
  context.beginPath();
  channel.forEach((level, k) => {
    if (level == null) {
      pen = false;
      return;
    }
    const x = (k / last) * width;
    const y = heightOf(level);
    if (pen) context.lineTo(x, y);
    else context.moveTo(x, y);
    pen = true;
  });
  context.stroke();
}

function picture(field) {
  if (!field.source.startsWith(PNG)) return element("p", { class: "note" }, "no picture");
  const size = Math.max(field.width, field.height);
  const image = element("img", { alt: `${field.name}, ${field.shape.join(" × ")}`, width: field.width, height: field.height });
  image.className = size < PIXELATED ? "picture pixelated" : "picture";
  image.src = field.source;
  return image;
}

function facts(field) {
  const kind = field.format ?? field.dtype;
  const shape = field.shape && field.shape.length ? ` ${field.shape.join(" × ")}` : "";
  const length = field.length != null && field.kind !== "trace" ? `, ${inBytes(field.length)}` : "";
  const range = "low" in field ? `, ${number(field.low)} to ${number(field.high)}` : "";
  const some = field.kind === "trace" && field.channels > field.points.length ? `, first ${field.points.length} of ${field.channels}` : "";
  return `${kind}${shape}${length}${range}${some}`;
}

function body(field) {
  if (field.kind === "trace") return trace(field);
  if (field.kind === "picture") return picture(field);
  const more = field.more ? " …" : "";
  const text = element("pre", { class: "value", dir: "auto" }, `${field.text}${more}`);
  return field.note ? element("div", {}, text, element("p", { class: "note" }, field.note)) : text;
}

function fieldView(field) {
  const head = element("div", { class: "field-head" }, foreign(field.name, { class: "field-name" }), element("span", { class: "field-facts" }, facts(field)));
  return element("div", { class: "field", "data-kind": field.kind }, head, body(field));
}

function card(sample) {
  const rows = `[${sample.start}:${sample.stop}]`;
  const version = sample.etag ? element("span", { class: "version" }, "version ", foreign(sample.etag)) : null;
  const place = element("span", { class: "sample-place" }, `${sample.shard}:${sample.i}`);
  const origin = element("p", { class: "origin", title: `${sample.key} ${rows}` }, foreign(sample.key), ` ${rows}`);
  const more = sample.more_fields ? element("p", { class: "note" }, `and ${plural(sample.more_fields, "more field")}`) : null;
  return element("article", { class: "sample" }, element("header", {}, place, version), origin, ...sample.fields.map(fieldView), more);
}

export function makeGallery(load) {
  const place = byId("samples");
  const all = byId("gallery-all");
  let turn = 0;
  let shard = null;
  let wanted = 0;

  async function refresh() {
    const asked = (wanted += 1);
    const answer = await load({ turn, count: COUNT, ...(shard == null ? {} : { shard }) });
    if (answer && asked === wanted) show(answer);
  }

  function show(answer) {
    setText(byId("schema"), answer.schema);
    place.replaceChildren(...answer.samples.map(card));
    place.querySelectorAll("canvas").forEach(drawTrace);
    all.hidden = shard == null;
    setText(byId("gallery-note"), note(answer));
  }

  function note(answer) {
    if (answer.damage) return answer.damage;
    if (!answer.samples.length) return shard == null ? "No sample is cached yet." : `Shard ${shard} is not in the cache any more.`;
    const late = answer.late ? "; the rest took too long to decode" : "";
    if (shard != null) return `${plural(answer.samples.length, "sample")} of shard ${shard}${late}`;
    return `${answer.samples.length} of ${plural(answer.cached, "sample")}, spread over the cache${late}`;
  }

  function next() {
    turn += 1;
    return refresh();
  }

  function showShard(chosen) {
    shard = chosen;
    turn = 0;
    return refresh();
  }

  byId("gallery-next").addEventListener("click", next);
  all.addEventListener("click", () => showShard(null));

  return {
    refresh,
    next,
    showShard,
    recolour: () => place.querySelectorAll("canvas").forEach(drawTrace),
    reset: () => {
      shard = null;
      turn = 0;
      place.replaceChildren();
    },
  };
}
