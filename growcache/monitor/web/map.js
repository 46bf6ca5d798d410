/* The map of a cache: a cell per shard, in the order of the numbers. */

import { byId, element, press, setText, store, stored } from "./dom.js";
import { inCount, inTime, inBytes, plural } from "./words.js";

const TALLEST = 340; // pixels of the whole map, where cells can be that small
const LARGEST_CELL = 16;
const SMALLEST_WITH_GAP = 4;
const STEPS = 64; // of a colour scale

/* Colours from the newest or least used to the oldest or most used. */
const SCALES = {
  light: { age: ["#0f766e", "#36a394", "#8cc9bd", "#c9d9dd", "#dde1e6"], uses: ["#dfe3e8", "#f3c47c", "#e5893a", "#c24b2e", "#86206b"] },
  dark: { age: ["#5eead4", "#2ba899", "#1f766f", "#27515a", "#2b3542"], uses: ["#2b3542", "#7a5a26", "#c27c2c", "#ea9a62", "#ffd7c4"] },
};
const FLAT = {
  light: { idle: "#d3d9df", held: "#2563eb", retired: "#d97706" },
  dark: { idle: "#303b48", held: "#60a5fa", retired: "#f59e0b" },
};

/* Pairs of a value and how often it repeats, as a column. */
export function decodeRuns(pairs, count) {
  const column = new Float64Array(count);
  for (let i = 0, at = 0; i < pairs.length; at += pairs[i + 1], i += 2) column.fill(pairs[i], at, at + pairs[i + 1]);
  return column;
}

export function decodeSteps(pairs, count) {
  const column = decodeRuns(pairs, count);
  for (let i = 1; i < count; i += 1) column[i] += column[i - 1];
  return column;
}

function decodeMap(answer) {
  const { count } = answer;
  return {
    count,
    now: answer.now,
    numbers: decodeSteps(answer.numbers, count),
    drawnAt: decodeSteps(answer.drawn_at, count),
    uses: decodeRuns(answer.uses, count),
    samples: decodeRuns(answer.samples, count),
    bytes: decodeRuns(answer.bytes, count),
    retired: decodeRuns(answer.retired, count),
    held: decodeRuns(answer.held, count),
  };
}

function parts(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

function packed([red, green, blue]) {
  return (255 << 24) | (blue << 16) | (green << 8) | red; // as canvas has it in memory, on little-endian machines
}

function ramp(anchors) {
  const stops = anchors.map(parts);
  return Array.from({ length: STEPS }, (_, step) => {
    const place = (step / (STEPS - 1)) * (stops.length - 1);
    const left = Math.min(Math.floor(place), stops.length - 2);
    return packed(stops[left].map((from, k) => Math.round(from + (stops[left + 1][k] - from) * (place - left))));
  });
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function makeMap(onShard) {
  const place = byId("map-cells");
  const canvas = place.querySelector("canvas");
  const cursor = place.querySelector(".map-cursor");
  const detail = byId("map-detail");
  const buttons = [...byId("map-colours").querySelectorAll("button")];
  let shown = null;
  let colour = stored("map", "age");
  let grid = { cell: 1, columns: 1 };
  let chosen = -1;

  function colours() {
    const theme = isDark() ? "dark" : "light";
    if (colour === "held") {
      const { idle, held, retired } = FLAT[theme];
      const [none, reading, leaving] = [idle, held, retired].map((one) => packed(parts(one)));
      return (i) => (shown.retired[i] ? leaving : shown.held[i] ? reading : none);
    }
    const scale = ramp(SCALES[theme][colour]);
    const { least, most, valueOf } = extent();
    const factor = most > least ? (STEPS - 1) / (most - least) : 0;
    return (i) => scale[Math.round((valueOf(i) - least) * factor)];
  }

  function extent() {
    const valueOf = colour === "uses" ? (i) => shown.uses[i] : (i) => shown.now - shown.drawnAt[i];
    let least = Infinity;
    let most = -Infinity;
    for (let i = 0; i < shown.count; i += 1) {
      const value = valueOf(i);
      if (value < least) least = value;
      if (value > most) most = value;
    }
    return { least: colour === "uses" ? 0 : least, most, valueOf };
  }

  function draw() {
    if (!shown) return;
    const width = Math.max(1, place.clientWidth);
    const fitting = Math.floor(Math.sqrt((width * TALLEST) / Math.max(1, shown.count)));
    const cell = Math.max(1, Math.min(LARGEST_CELL, fitting));
    const columns = Math.max(1, Math.floor(width / cell));
    grid = { cell, columns };
    const rows = Math.ceil(shown.count / columns);
    const ratio = Math.max(1, Math.round(devicePixelRatio || 1));
    const size = cell * ratio;
    const filled = cell >= SMALLEST_WITH_GAP ? size - ratio : size;
    canvas.width = columns * size;
    canvas.height = Math.max(1, rows * size);
    canvas.style.width = `${columns * cell}px`;
    canvas.style.height = `${rows * cell}px`;
    if (shown.count) paint(columns, size, filled);
    legend();
    mark();
  }

  function paint(columns, size, filled) {
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, canvas.height);
    const pixels = new Uint32Array(image.data.buffer);
    const colourOf = colours();
    for (let i = 0; i < shown.count; i += 1) {
      const value = colourOf(i);
      const first = Math.floor(i / columns) * size * canvas.width + (i % columns) * size;
      for (let row = 0; row < filled; row += 1) {
        const start = first + row * canvas.width;
        pixels.fill(value, start, start + filled);
      }
    }
    context.putImageData(image, 0, 0);
  }

  function legend() {
    const theme = isDark() ? "dark" : "light";
    const target = byId("map-scale");
    if (!shown.count) return target.replaceChildren();
    if (colour === "held") return target.replaceChildren(...flatLegend(FLAT[theme]));
    const { least, most } = extent();
    const ends = colour === "uses" ? [inCount(least), `${inCount(most)} uses`] : [inTime(least), `${inTime(most)} old`];
    const strip = element("span", { class: "scale-strip", "aria-hidden": "true" });
    strip.style.backgroundImage = `linear-gradient(to right, ${SCALES[theme][colour].join(", ")})`;
    return target.replaceChildren(ends[0], strip, ends[1]);
  }

  function flatLegend(flat) {
    const words = { held: "held by a reader", retired: "retired, still held", idle: "free to go" };
    return Object.entries(words).map(([name, text]) => {
      const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
      swatch.style.backgroundColor = flat[name];
      return element("span", { class: "scale-item" }, swatch, text);
    });
  }

  function describe(i) {
    const held = shown.retired[i] ? ", retired but still held" : shown.held[i] ? ", held by a reader" : "";
    const uses = shown.uses[i] === 1 ? "once" : `${inCount(shown.uses[i])} times`;
    const drawn = inTime(shown.now - shown.drawnAt[i]);
    return `Shard ${shown.numbers[i]}: ${plural(shown.samples[i], "sample")}, ${inBytes(shown.bytes[i])}, drawn ${drawn} ago, used ${uses}${held}.`;
  }

  function summary() {
    if (!shown.count) return "No shard yet.";
    const retired = shown.retired.reduce((sum, one) => sum + one, 0);
    const leaving = retired ? `, ${inCount(retired)} of them retired but still held by readers` : "";
    return `${plural(shown.count, "shard")}${leaving}. Point at a cell, or use the arrow keys; Enter shows its samples.`;
  }

  function mark() {
    const known = shown && chosen >= 0 && chosen < shown.count;
    cursor.hidden = !known;
    setText(detail, known ? describe(chosen) : shown ? summary() : "");
    place.setAttribute("aria-valuemax", String(Math.max(0, (shown?.count ?? 1) - 1)));
    if (!known) return;
    const { cell, columns } = grid;
    cursor.style.left = `${(chosen % columns) * cell}px`;
    cursor.style.top = `${Math.floor(chosen / columns) * cell}px`;
    cursor.style.width = cursor.style.height = `${cell}px`;
    place.setAttribute("aria-valuenow", String(chosen));
    place.setAttribute("aria-valuetext", describe(chosen));
  }

  function choose(i) {
    chosen = shown && shown.count ? Math.max(0, Math.min(shown.count - 1, i)) : -1;
    mark();
  }

  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / grid.cell);
    const row = Math.floor((event.clientY - box.top) / grid.cell);
    const i = row * grid.columns + column;
    return column >= 0 && column < grid.columns && row >= 0 && shown && i < shown.count ? i : -1;
  }

  function open() {
    if (shown && chosen >= 0) onShard(shown.numbers[chosen]);
  }

  function onKey(event) {
    const { columns } = grid;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, PageDown: 10 * columns, PageUp: -10 * columns };
    if (event.key in steps) choose(Math.max(0, chosen) + (chosen < 0 ? 0 : steps[event.key]));
    else if (event.key === "Home") choose(0);
    else if (event.key === "End") choose(Infinity);
    else if (event.key === "Enter") open();
    else return;
    event.preventDefault();
  }

  function setColour(name) {
    colour = buttons.some((button) => button.dataset.colour === name) ? name : "age";
    store("map", colour);
    press(buttons, buttons.find((button) => button.dataset.colour === colour));
    draw();
  }

  place.addEventListener("keydown", onKey);
  place.addEventListener("pointermove", (event) => {
    const i = cellAt(event);
    if (i >= 0) choose(i);
  });
  place.addEventListener("click", (event) => {
    if (cellAt(event) < 0) return;
    choose(cellAt(event));
    open();
  });
  for (const button of buttons) button.addEventListener("click", () => setColour(button.dataset.colour));
  let width = place.clientWidth;
  new ResizeObserver(() => {
    if (place.clientWidth === width) return; // only its height changed, by what was drawn
    width = place.clientWidth;
    requestAnimationFrame(draw);
  }).observe(place);
  setColour(colour);

  return {
    show(answer) {
      shown = decodeMap(answer);
      if (chosen >= shown.count) chosen = -1;
      draw();
    },
    clear() {
      shown = null;
      chosen = -1;
      setText(detail, "");
    },
    recolour: draw,
    next: () => setColour(buttons[(buttons.findIndex((button) => button.dataset.colour === colour) + 1) % buttons.length].dataset.colour),
  };
}
