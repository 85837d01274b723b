"use strict";
// Light or dark: as the system has it, or as the button `theme` was pressed, which is remembered. Paper is white.
(() => {
  const root = document.documentElement;
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const KEY = "llama-npu2-theme";

  // Some browsers refuse storage to files.
  const stored = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
  const store = (theme) => { try { localStorage.setItem(KEY, theme); } catch { /* then it is not remembered */ } };

  const chosen = () => root.dataset.theme || (systemDark.matches ? "dark" : "light");
  const remembered = stored();
  if (remembered === "light" || remembered === "dark") root.dataset.theme = remembered;

  const show = (theme) => {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    document.getElementById("theme").textContent = chosen() === "dark" ? "Light colours" : "Dark colours";
  };

  addEventListener("DOMContentLoaded", () => {
    show(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      show(chosen() === "dark" ? "light" : "dark");
      store(chosen());
    });
  });
  systemDark.addEventListener("change", () => show(root.dataset.theme));
  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    show("light");
  });
  addEventListener("afterprint", () => show(before));
})();
