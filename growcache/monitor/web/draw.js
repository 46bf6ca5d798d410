/* Time series of a cache's history, drawn by uPlot. The page and the offline report share this file.

   It needs the global `uPlot` (uPlot.iife.min.js), and the rules of uPlot.min.css and draw.css.

     const charts = drawCharts(element, history, {charts: ["cached", "rates"], from, to});
     charts.update(history);    // the same object with more rows, or another one
     charts.range(from, to);    // seconds since the epoch; without arguments everything is shown
     charts.recolour();         // after a change of the theme
     charts.destroy();

   `history` is what /history.json gives: equally long columns, {at: [...], samples: [...], ...,
   jobs: {name: {delivered: [...], ..., rank_wait_seconds: {rank: [...]}}}}. A column may be missing, and a value may be null.
   All options may be left out: `charts` (ids, in order; the default is drawCharts.ids), `from` and `to`,
   `height` in pixels, `onRange(from, to)`, called when the reader has zoomed (undefined: everything).
   `drawCharts.format` has the formatters of the page: bytes, count, percent, duration. */
"use strict";

(function () {
  const RATE_SECONDS = 10; // that a rate looks back at least, because samples come a shard at a time
  const POINTS = 720; // of a line; more than that no screen shows
  const HEIGHT = 9.25; // of a chart, in the root's font sizes
  const TEXT = 0.69;
  const MOST_LINES = 8; // of jobs; the latest ones are last
  const MINUTE = 60;
  const HOUR = 60 * MINUTE;
  const DAY = 24 * HOUR;
  const DURATIONS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, ...[1, 2, 5, 10, 20, 30].map((n) => n * MINUTE), ...[1, 2, 3, 6, 12].map((n) => n * HOUR), ...[1, 2, 5, 10, 20, 50, 100, 200].map((n) => n * DAY)];
  const COLOURS = ["#2563eb", "#0d9488", "#c2410c", "#7c3aed", "#be185d", "#4d7c0f", "#0369a1", "#92400e"];

  // Formatters

  function scaled(value, units, base) {
    let step = 0;
    while (Math.abs(value) >= base * 0.9995 && step < units.length - 1) {
      value /= base;
      step += 1;
    }
    const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
    return [value.toFixed(digits), units[step]];
  }

  const format = {
    bytes: (value) => scaled(value, ["B", "kB", "MB", "GB", "TB", "PB"], 1000).join(" "),
    perSecond: (value) => `${format.bytes(value)}/s`,
    count: (value) => scaled(value, ["", "k", "M", "G", "T"], 1000).join(""),
    percent: (value) => {
      const percent = 100 * value;
      if (percent < 0.005) return "0 %";
      if (percent >= 10) return `${percent < 100 ? Math.min(99, Math.round(percent)) : Math.round(percent)} %`;
      return `${percent.toFixed(percent >= 1 ? 1 : 2)} %`;
    },
    ratio: (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2)),
    duration: (value) => {
      const seconds = Math.max(0, value);
      if (seconds < 10 && !Number.isInteger(seconds)) return `${seconds.toFixed(1)} s`;
      if (seconds < 1.5 * MINUTE && seconds !== MINUTE) return `${Math.round(seconds)} s`;
      if (seconds < HOUR) return `${Math.round(seconds / MINUTE)} min`;
      if (seconds < 1.5 * DAY && seconds !== DAY) return `${trimmed(seconds / HOUR)} h`;
      return `${trimmed(seconds / DAY)} d`;
    },
    moment: (seconds) => {
      const date = new Date(1000 * seconds);
      const two = (number) => String(number).padStart(2, "0");
      const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
      return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
    },
  };

  function trimmed(value) {
    return value.toFixed(value < 10 ? 1 : 0).replace(/\.0$/, "");
  }

  // The charts, each with its lines: of columns as they are, of their rates, one of each job, or one of each rank of a job

  const value = (column) => ({ column, derive: valuesOf });
  const rate = (column) => ({ column, derive: ratesOf });
  const named = (label, line, look) => ({ label, ...line, ...look });
  const ofJobs = (line) => ({ ...line, jobs: true });
  const ofRanks = (line) => ({ ...line, ranks: true });
  const CHARTS = [
    { id: "cached", title: "Samples cached", unit: format.count, lines: [named("cached", value("samples"), { fill: true })] },
    {
      id: "rates", title: "Samples per second", unit: format.count,
      lines: [named("drawn", rate("drawn")), named("delivered", rate("delivered")), named("evicted", rate("evicted_samples"))],
    },
    { id: "wait", title: "Exposed wait, share of time, ranks summed", unit: format.percent, least: 0.01, lines: [ofJobs(rate("wait_seconds"))] },
    { id: "ranks", title: "Exposed wait by rank", unit: format.percent, least: 0.01, ofJob: true, lines: [ofRanks(rate("rank_wait_seconds"))] },
    {
      id: "bytes", title: "Bytes on disk", unit: format.bytes,
      lines: [named("used", value("bytes"), { fill: true }), named("bound", value("max_bytes"), { dash: true })],
    },
    { id: "link", title: "Read from the store", unit: format.perSecond, lines: [named("read", rate("egress_bytes"), { fill: true })] },
    {
      id: "store", title: "Requests to the store, per second", unit: format.count,
      lines: [named("requests", rate("requests")), named("errors", rate("errors")), named("retried", rate("failures"))],
    },
    { id: "coverage", title: "Coverage of the population", unit: format.percent, least: 0.01, lines: [named("drawn at least once", value("coverage"), { fill: true })] },
    { id: "reuse", title: "Reuse: delivered over drawn", unit: format.ratio, least: 1, lines: [named("all jobs", value("reuse"), { hue: COLOURS.length - 1 }), ofJobs(value("reuse"))] },
    { id: "ess", title: "Effective sample size", unit: format.count, lines: [ofJobs(value("ess_samples"))] },
    { id: "age", title: "Mean age of cached samples", unit: format.duration, steps: DURATIONS, lines: [named("age", value("age_seconds_mean"))] },
    {
      id: "totals", title: "Drawn and evicted, in all", unit: format.count,
      lines: [named("drawn", value("drawn")), named("evicted", value("evicted_samples"))],
    },
    { id: "holes", title: "Holes, in all", unit: format.count, least: 5, lines: [named("holes", value("holes"))] },
  ];

  // Columns of the shown rows. Counters are read at these rows only, so a rate is exact between two of them.

  function valuesOf(column, rows) {
    return rows.map((row) => column[row] ?? null);
  }

  /* A rate is that since a row some seconds before; the first one is that of the row after it. */
  function ratesOf(column, rows, at) {
    let from = 0;
    const rates = rows.map((row, i) => {
      while (from + 1 < i && at[rows[from + 1]] <= at[row] - RATE_SECONDS) from += 1;
      const before = i ? rows[from] : row - 1;
      const change = column[row] - column[before];
      const known = before >= 0 && column[row] != null && column[before] != null;
      return known && change >= 0 && at[row] > at[before] ? change / (at[row] - at[before]) : null;
    });
    if (rates.length > 1) rates[0] ??= rates[1];
    return rates;
  }

  function firstRowAt(at, moment) {
    let low = 0;
    let high = at.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (at[middle] < moment) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function shownRows(at, from, to) {
    const first = Math.max(0, firstRowAt(at, from) - 1);
    const stop = Math.min(at.length, firstRowAt(at, to) + 1);
    const rows = [];
    const step = (to - from) / POINTS;
    for (let row = first, next = -Infinity; row < stop; row += 1) {
      if (at[row] >= next || row === stop - 1) {
        rows.push(row);
        next = at[row] + step;
      }
    }
    return rows;
  }

  function linesOf(chart, history, job) {
    return chart.lines.flatMap((line) => {
      if (line.ranks) return rankLines(line, ranksOf(history, job));
      if (!line.jobs) return line.column in history ? [{ ...line, data: history[line.column] }] : [];
      return Object.entries(history.jobs ?? {}).slice(-MOST_LINES).flatMap(([name, columns], hue) =>
        line.column in columns ? [{ ...line, label: name, data: columns[line.column], hue }] : [],
      );
    });
  }

  function rankLines(line, ranks) {
    return Object.entries(ranks).map(([rank, data], hue) => ({ ...line, label: `rank ${rank}`, data, hue, dash: hue >= COLOURS.length }));
  }

  function ranksOf(history, job) {
    return (history.jobs && Object.hasOwn(history.jobs, job) && history.jobs[job].rank_wait_seconds) || {};
  }

  function rankedJobs(history) {
    return Object.keys(history.jobs ?? {}).filter((job) => Object.keys(ranksOf(history, job)).length);
  }

  // Looks

  function colourOf(element, name, otherwise) {
    return getComputedStyle(element).getPropertyValue(name).trim() || otherwise;
  }

  /* The colour of a line; that of a job is the same in every chart. */
  function seriesColour(element, line, i) {
    const k = (line.hue ?? i) % COLOURS.length;
    return colourOf(element, `--series-${k + 1}`, COLOURS[k]);
  }

  function momentLabels(plot, splits, _axis, _space, increment) {
    const two = (number) => String(number).padStart(2, "0");
    return splits.map((seconds) => {
      const date = new Date(1000 * seconds);
      const isMidnight = !date.getHours() && !date.getMinutes() && !date.getSeconds();
      if (increment >= DAY || isMidnight) return date.toLocaleDateString("en", { month: "short", day: "numeric" });
      return `${two(date.getHours())}:${two(date.getMinutes())}${increment < MINUTE ? `:${two(date.getSeconds())}` : ""}`;
    });
  }

  function rootSize() {
    return parseFloat(getComputedStyle(document.documentElement).fontSize) || 16;
  }

  function axesOf(element, { unit, steps }) {
    const rem = rootSize();
    const line = { stroke: () => colourOf(element, "--grid", "#e3e7ec"), width: 1 };
    const text = {
      stroke: () => colourOf(element, "--muted", "#5c6773"),
      font: `${Math.round(TEXT * rem)}px system-ui, sans-serif`,
      grid: line,
      ticks: { ...line, size: 4 },
    };
    return [
      { ...text, space: 4 * rem, size: 1.5 * rem, gap: 3, values: momentLabels },
      { ...text, space: 2.1 * rem, size: 4.2 * rem, ...(steps ? { incrs: steps } : {}), values: (_plot, splits) => splits.map((split) => (split == null ? "" : unit(split))) },
    ];
  }

  function seriesOf(element, lines, unit) {
    const moment = { label: "at" };
    const drawn = lines.map((line, i) => ({
      label: line.label,
      stroke: () => seriesColour(element, line, i),
      fill: line.fill ? () => `${seriesColour(element, line, i)}22` : undefined,
      width: 1.5,
      dash: line.dash ? [5, 4] : undefined,
      spanGaps: true,
      points: { show: false },
      value: (plot, shown, series) => valueText(shown ?? lastOf(plot.data[series]), unit),
    }));
    return [moment, ...drawn];
  }

  function lastOf(column) {
    return column.findLast((value) => value != null);
  }

  function valueText(value, unit) {
    return value == null ? "–" : unit(value);
  }

  /* The upper end is at least `least`, so that what is next to nothing looks so. */
  function fromZero(least = 0) {
    return (_plot, _low, high) => [0, Math.max((high ?? 0) * 1.08, least) || 1];
  }

  // One chart

  function makeChart(chart, board) {
    const figure = document.createElement("figure");
    const title = figure.appendChild(document.createElement("figcaption"));
    const place = figure.appendChild(document.createElement("div"));
    const empty = figure.appendChild(document.createElement("p"));
    figure.className = "chart";
    figure.dataset.chart = chart.id;
    place.className = "chart-plot";
    empty.className = "chart-empty";
    empty.textContent = "nothing recorded yet";
    title.textContent = chart.title;
    const when = title.appendChild(document.createElement("span")); // of the cursor
    when.className = "chart-when";
    board.element.append(figure);
    const chooser = chart.ofJob ? makeJobChooser(title, () => board.update()) : null;
    let plot = null;
    let labels = "";

    function show(history, rows, view) {
      const lines = linesOf(chart, history, chooser?.choose(rankedJobs(history)));
      const columns = lines.map((line) => line.derive(line.data, rows, history.at));
      const known = columns.some((column) => column.some((shown) => shown != null));
      empty.hidden = known;
      place.hidden = !known;
      if (!known) return;
      const wanted = JSON.stringify(lines.map((line) => line.label));
      const data = [rows.map((row) => history.at[row]), ...columns];
      if (plot && wanted === labels) plot.setData(data);
      else begin(lines, data, view);
      labels = wanted;
      describe(lines, columns);
    }

    function describe(lines, columns) {
      const last = lines.map((line, i) => {
        const shown = lastOf(columns[i]);
        return shown == null ? "" : `${line.label} ${chart.unit(shown)}`;
      });
      figure.setAttribute("aria-label", `${chart.title}: ${last.filter(Boolean).join(", ")} at the end`);
    }

    function tellWhen(drawn) {
      const { idx } = drawn.legend;
      when.textContent = idx == null ? "" : format.moment(drawn.data[0][idx]);
    }

    function begin(lines, data, view) {
      if (plot) plot.destroy();
      const options = {
        width: Math.max(220, place.clientWidth),
        height: board.height,
        series: seriesOf(board.element, lines, chart.unit),
        axes: axesOf(board.element, chart),
        scales: { x: { time: true, range: () => [view.from, view.to] }, y: { range: fromZero(chart.least) } },
        cursor: { sync: { key: board.key }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
        legend: { markers: { fill: (_plot, i) => markerColour(lines[i - 1], i - 1), width: 0 } },
        hooks: { setSelect: [(drawn) => board.zoom(drawn)], setLegend: [tellWhen] },
        padding: [8, 20, 0, 0],
      };
      plot = new uPlot(options, data, place);
      plot.over.addEventListener("dblclick", () => board.choose());
    }

    const markerColour = (line, i) => {
      const k = (line?.hue ?? i) % COLOURS.length;
      return `var(--series-${k + 1}, ${COLOURS[k]})`;
    };
    const fit = () => {
      const width = Math.max(220, place.clientWidth);
      if (plot && !place.hidden && plot.width !== width) plot.setSize({ width, height: board.height });
    };
    const end = () => {
      if (plot) plot.destroy();
      figure.remove();
    };
    return { show, fit, end, redraw: () => plot && plot.redraw(false, true) };
  }

  /* A select of the job that a chart shows; before the reader chooses one, it is the latest. */
  function makeJobChooser(title, onChange) {
    const select = document.createElement("select");
    select.className = "chart-job";
    select.setAttribute("aria-label", "Job");
    title.firstChild.after(select);
    let listed = "";
    let chosen = null;
    select.addEventListener("change", () => {
      chosen = select.value;
      onChange();
    });

    function choose(jobs) {
      const job = jobs.includes(chosen) ? chosen : jobs.at(-1);
      if (listed !== JSON.stringify(jobs)) select.replaceChildren(...jobs.map((name) => new Option(name, name)));
      listed = JSON.stringify(jobs);
      select.hidden = !jobs.length;
      select.value = job ?? "";
      return job;
    }

    return { choose };
  }

  // All of them

  let boards = 0;

  function drawCharts(element, history, options = {}) {
    const view = { from: 0, to: 1 };
    let shown = history;
    let chosen = [options.from, options.to];
    const board = { element, height: options.height ?? HEIGHT * rootSize(), key: `growcache-${(boards += 1)}`, zoom, choose, update };
    const wanted = options.charts ?? drawCharts.ids;
    element.classList.add("charts");
    const charts = wanted.map((id) => makeChart(CHARTS.find((chart) => chart.id === id), board));
    const watcher = new ResizeObserver(() => charts.forEach((chart) => chart.fit()));

    function update(found = shown) {
      shown = found;
      const at = shown.at;
      if (at.length) {
        view.from = chosen[0] ?? at[0];
        view.to = chosen[1] ?? at[at.length - 1];
        if (view.to <= view.from) view.to = view.from + 1;
      }
      const rows = at.length ? shownRows(at, view.from, view.to) : [];
      charts.forEach((chart) => chart.show(shown, rows, view));
    }

    function range(from, to) {
      chosen = [from, to];
      update();
    }

    function choose(from, to) {
      range(from, to);
      if (options.onRange) options.onRange(from, to);
    }

    function zoom(plot) {
      if (plot.select.width < 4) return;
      const from = plot.posToVal(plot.select.left, "x");
      const to = plot.posToVal(plot.select.left + plot.select.width, "x");
      plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      choose(from, to);
    }

    update();
    watcher.observe(element);
    return {
      update,
      range,
      recolour: () => charts.forEach((chart) => chart.redraw()),
      destroy: () => {
        watcher.disconnect();
        charts.forEach((chart) => chart.end());
      },
    };
  }

  drawCharts.ids = CHARTS.map((chart) => chart.id);
  drawCharts.format = format;
  globalThis.drawCharts = drawCharts;
})();
