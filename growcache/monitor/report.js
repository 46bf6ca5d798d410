/* Draws the history that the report holds. The report asks nothing of a network. */
"use strict";

(function () {
  const history = JSON.parse(document.getElementById("history").textContent);
  const charts = drawCharts(document.getElementById("charts"), history);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.recolour());
})();
