"use strict";
(() => {
  const root = document.documentElement;
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 30rem)");
  const KEY = "llama-npu2-theme";

  // Some browsers refuse storage to files.
  const stored = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
  const store = (theme) => { try { localStorage.setItem(KEY, theme); } catch { /* then it is not remembered */ } };

  const chosen = () => root.dataset.theme || (systemDark.matches ? "dark" : "light");
  const remembered = stored();
  if (remembered === "light" || remembered === "dark") root.dataset.theme = remembered;

  // charts

  let probe;
  const colours = (value) => {
    if (Array.isArray(value)) return value.map(colours);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, colours(inner)]));
    }
    if (typeof value !== "string" || !/^var\(--[a-z0-9-]+\)$/.test(value)) return value;
    probe.style.color = value;
    return getComputedStyle(probe).color;
  };

  const axis = {
    automargin: true,
    gridcolor: "var(--rule)",
    linecolor: "var(--rule)",
    zerolinecolor: "var(--muted)",
  };
  const template = () => ({
    layout: {
      autosize: true,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      colorway: Array.from({ length: 8 }, (_, index) => `var(--series-${index + 1})`),
      font: { family: "system-ui, sans-serif", size: 13, color: "var(--text)" },
      hoverlabel: { bgcolor: "var(--raised)", bordercolor: "var(--muted)", font: { color: "var(--text)" }, align: "left" },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", traceorder: "normal" },
      margin: { l: 48, r: 16, t: 16, b: 44 },
      // Dragging scrolls a phone's page; elsewhere it zooms in, and a double click out.
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      xaxis: axis,
      yaxis: axis,
    },
  });

  const draw = (figure) => {
    const plot = figure.querySelector(".plot");
    if (!plot || !plot.offsetWidth) return;
    const { data, layout } = JSON.parse(figure.querySelector("script.figure").textContent);
    // On a phone a legend takes several lines.
    if (narrow.matches && layout.height) layout.height += 12 * data.length;
    plot.style.minHeight = layout.height ? `${layout.height}px` : "";
    const shown = colours({ ...layout, template: template() });
    Plotly.react(plot, colours(data), shown, { responsive: true, displayModeBar: false });
  };
  const drawAll = (within = document) => {
    if (typeof Plotly === "undefined") return;
    probe = document.body.appendChild(document.createElement("span"));
    within.querySelectorAll("figure").forEach(draw);
    probe.remove();
  };

  // the page

  const show = (theme) => {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    document.getElementById("theme").textContent = chosen() === "dark" ? "Light colours" : "Dark colours";
    drawAll();
  };

  const zoom = (button) => {
    const drawing = button.closest(".zoom").querySelector("svg");
    const { width, height } = drawing.viewBox.baseVal;
    const step = Number(button.dataset.zoom);
    const room = drawing.parentElement.clientWidth;
    const now = step ? drawing.getBoundingClientRect().width * step : Math.min(room, width);
    drawing.setAttribute("width", now);
    drawing.setAttribute("height", (now * height) / width);
  };

  addEventListener("DOMContentLoaded", () => {
    show(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      show(chosen() === "dark" ? "light" : "dark");
      store(chosen());
    });
    document.querySelectorAll("[data-zoom]").forEach((b) => b.addEventListener("click", () => zoom(b)));
  });
  systemDark.addEventListener("change", () => show(root.dataset.theme));
  narrow.addEventListener("change", () => drawAll());
  // Charts that nobody saw were not drawn: they had no width.
  document.addEventListener("toggle", (event) => event.target.open && drawAll(event.target), true);

  // Paper is white, and shows what is closed.
  let before;
  addEventListener("beforeprint", () => {
    before = root.dataset.theme;
    document.querySelectorAll("details:not([open])").forEach((each) => {
      each.dataset.closed = "";
      each.open = true;
    });
    show("light");
  });
  addEventListener("afterprint", () => {
    document.querySelectorAll("details[data-closed]").forEach((each) => {
      delete each.dataset.closed;
      each.open = false;
    });
    show(before);
  });
})();
