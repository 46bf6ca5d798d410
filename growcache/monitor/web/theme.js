/* Sets the chosen theme before the first paint: "light", "dark", or the system's where none was chosen. */
"use strict";

(function () {
  try {
    const chosen = localStorage.getItem("growcache.theme");
    if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
  } catch {
    // Storage is forbidden, so the system's theme is shown.
  }
})();
