"use strict";
(() => {
  // drawings

  // By a factor, or (0) to fit; what is at `x`, `y` of the window stays there. A drawing without a view box only becomes
  // wider: text keeps its size.
  const zoom = (drawing, step, x, y) => {
    const { width = 0, height = 0 } = drawing.viewBox.baseVal || {};
    const frame = drawing.parentElement;
    const before = drawing.getBoundingClientRect();
    if (!before.width) return;  // it is not shown
    const room = Math.min(frame.clientWidth, (Math.max(0.75 * innerHeight - 8, 200) * width) / height || Infinity);
    const fitted = width ? Math.min(room, width) : frame.clientWidth;
    const now = step ? Math.min(Math.max(before.width * step, width ? 100 : fitted), 8 * (width || fitted)) : fitted;
    drawing.setAttribute("width", !width && now === fitted ? "100%" : now);
    if (width) drawing.setAttribute("height", (now * height) / width);
    const grown = now / before.width;
    frame.scrollLeft += (x - before.left) * (grown - 1);
    frame.scrollTop += (y - before.top) * (width ? grown - 1 : 0);
  };
  const zoomAtCentre = (drawing, step) => {
    const { left, top, width, height } = drawing.parentElement.getBoundingClientRect();
    zoom(drawing, step, left + width / 2, top + height / 2);
  };

  const KEYS = { "+": 1.25, "=": 1.25, "-": 0.8, 0: 0 };
  const zoomable = (box) => {
    const drawing = box.querySelector("svg");
    const frame = drawing.parentElement;
    box.querySelectorAll("[data-zoom]").forEach((button) => {
      button.addEventListener("click", () => zoomAtCentre(drawing, Number(button.dataset.zoom)));
    });
    frame.addEventListener("keydown", (event) => {
      if (!(event.key in KEYS) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      zoomAtCentre(drawing, KEYS[event.key]);
    });
    // Trackpads say that two fingers pinch as a wheel with Ctrl.
    frame.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(drawing, Math.exp(-event.deltaY / 200), event.clientX, event.clientY);
    }, { passive: false });
    let apart;
    const between = ({ touches: [one, other] }) => ({
      x: (one.clientX + other.clientX) / 2,
      y: (one.clientY + other.clientY) / 2,
      apart: Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY),
    });
    frame.addEventListener("touchstart", (event) => { if (event.touches.length === 2) ({ apart } = between(event)); });
    frame.addEventListener("touchmove", (event) => {
      if (event.touches.length !== 2) return;
      event.preventDefault();
      const now = between(event);
      zoom(drawing, now.apart / apart, now.x, now.y);
      apart = now.apart;
    }, { passive: false });
    zoomAtCentre(drawing, 0);
    // A mouse takes hold of the drawing; fingers scroll it anyway.
    let held;
    frame.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse" && event.button === 0) held = [event.clientX, event.clientY];
    });
    frame.addEventListener("pointermove", (event) => {
      if (!held || !(event.buttons & 1)) return;
      frame.scrollLeft -= event.clientX - held[0];
      frame.scrollTop -= event.clientY - held[1];
      held = [event.clientX, event.clientY];
    });
    addEventListener("pointerup", () => { held = undefined; });
  };

  // graphs

  const walkable = (graph) => {
    const drawing = graph.querySelector("svg");
    const nodes = [...drawing.querySelectorAll("[data-node]")];
    const named = new Map(nodes.map((node) => [node.dataset.node, node]));
    const lines = [...drawing.querySelectorAll("[data-from]")];
    const titles = [...graph.querySelectorAll("th")].map((title) => title.textContent);
    const rows = new Map([...graph.querySelectorAll("tbody tr")].map((row) => [row.cells[0].textContent, row]));

    // Names that lines lead to from one, which itself is not among them.
    const reached = (name, from, to) => {
      const found = new Set();
      for (const todo = [name]; todo.length; ) {
        const next = todo.pop();
        lines.filter((line) => line.dataset[from] === next && !found.has(line.dataset[to])).forEach((line) => {
          found.add(line.dataset[to]);
          todo.push(line.dataset[to]);
        });
      }
      return found;
    };
    const describe = (name) => {
      const heading = document.createElement("h3");
      heading.textContent = name;
      const list = document.createElement("dl");
      [...rows.get(name).cells].slice(1).forEach((cell, index) => {
        if (!cell.textContent.trim()) return;
        list.appendChild(document.createElement("dt")).textContent = titles[index + 1];
        list.appendChild(document.createElement("dd")).append(...cell.cloneNode(true).childNodes);
      });
      graph.querySelector(".chosen").replaceChildren(heading, list);
    };
    const choose = (node) => {
      const name = node.dataset.node;
      const earlier = reached(name, "to", "from");
      const later = reached(name, "from", "to");
      const among = (names) => (line) => [line.dataset.from, line.dataset.to].every((e) => e === name || names.has(e));
      drawing.classList.add("choosing");
      nodes.forEach((each) => {
        each.classList.toggle("earlier", earlier.has(each.dataset.node));
        each.classList.toggle("later", later.has(each.dataset.node));
        each.classList.toggle("picked", each === node);
        each.setAttribute("aria-pressed", each === node);
        each.setAttribute("tabindex", each === node ? 0 : -1);
      });
      lines.forEach((line) => {
        line.classList.toggle("earlier", among(earlier)(line));
        line.classList.toggle("later", among(later)(line));
      });
      describe(name);
    };

    const neighbour = (node, key) => {
      const along = { ArrowLeft: ["to", "from"], ArrowRight: ["from", "to"] }[key];
      if (!along) return nodes[nodes.indexOf(node) + (key === "ArrowUp" ? -1 : 1)];
      const follow = (name) => {
        const line = lines.find((each) => each.dataset[along[0]] === name);
        const next = line && line.dataset[along[1]];
        return next && (named.get(next) || follow(next));  // lines may run together on the way
      };
      return follow(node.dataset.node);
    };
    nodes.forEach((node) => {
      node.addEventListener("click", () => choose(node));
      node.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") choose(node);
        else if (!event.key.startsWith("Arrow")) return;
        event.preventDefault();
        const next = event.key.startsWith("Arrow") && neighbour(node, event.key);
        if (!next) return;
        choose(next);
        next.focus();
        next.scrollIntoView({ block: "nearest", inline: "nearest" });
      });
    });
  };

  addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll(".zoom").forEach(zoomable);
    document.querySelectorAll(".graph").forEach(walkable);
  });
  // Paper shows what is closed.
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details:not([open])").forEach((each) => {
      each.dataset.closed = "";
      each.open = true;
    });
  });
  addEventListener("afterprint", () => {
    document.querySelectorAll("details[data-closed]").forEach((each) => {
      delete each.dataset.closed;
      each.open = false;
    });
  });
})();
