"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const { charts = [] } = JSON.parse(document.getElementById("data").textContent);
  const section = document.querySelector(".curves");
  document.documentElement.classList.add("js");

  // --- legends: a curve is hidden in all charts of its panel ---
  const toggle = (button) => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    return on;
  };
  for (const panel of all(".panel"))
    for (const button of all(".legend button", panel))
      button.addEventListener("click", () => {
        const on = toggle(button);
        for (const curve of all(`g[data-curve="${button.dataset.curve}"]`, panel)) curve.toggleAttribute("hidden", !on);
      });
  for (const button of all("button[data-show]"))
    button.addEventListener("click", () =>
      section.classList.toggle(`hide-${button.dataset.show}`, !toggle(button)));

  // --- values under the pointer ---
  const text = (value, metric) =>
    value === null ? "overflowed" : metric === "accuracy" ? value.toFixed(4) : value.toPrecision(4);
  const nearest = (rounds, wanted) =>
    rounds.reduce((best, r, k) => (Math.abs(r - wanted) < Math.abs(rounds[best] - wanted) ? k : best), 0);
  const size = (svg) => ({ // of the drawing, in its own units
    left: Number(svg.dataset.left), right: Number(svg.dataset.right),
    width: Number(svg.dataset.width), last: Number(svg.dataset.last),
  });
  const fill = (row, curve, round, button, svg) => { // a curve's mark, its values, and smaller their range over seeds
    const i = nearest(curve.rounds, round), metric = svg.dataset.metric, name = document.createElement("span");
    name.className = "unseen";
    name.textContent = button.textContent;
    row.insertCell().append(button.querySelector(".swatch").cloneNode(true), name);
    curve.columns.forEach(([mean, low, high], c) => {
      const [kind, word] = curve.columns.length > 1 ? [["mean", "mean"], ["worst", "lowest"]][c] : ["", ""];
      if (kind && section.classList.contains(`hide-${kind}`)) return;
      const td = row.insertCell();
      td.textContent = `${word} `.trimStart() + text(mean[i], metric) + (curve.rounds[i] === round ? "" : ` in round ${curve.rounds[i]}`);
      if (curve.seeds < 2) return;
      const range = document.createElement("small");
      range.textContent = `${text(low[i], metric)} to ${text(high[i], metric)}`;
      td.append(range);
    });
  };
  const readout = (svg, panel, curves, round) => {
    const box = svg.parentNode.querySelector(".readout"), table = document.createElement("table");
    const shown = [...curves.keys()].filter((k) => !svg.querySelector(`g[data-curve="${k}"]`).hasAttribute("hidden"));
    const at = shown.map((k) => curves[k].rounds[nearest(curves[k].rounds, round)]);
    if (!shown.length) return hide(svg);
    const common = at.reduce((best, r) => (Math.abs(r - round) < Math.abs(best - round) ? r : best), at[0]);
    table.createCaption().textContent = `round ${common.toLocaleString("en")}`;
    const buttons = all(".legend button", panel);
    for (const k of shown) fill(table.insertRow(), curves[k], common, buttons[k], svg);
    box.replaceChildren(table);
    box.hidden = false;
    const { left: start, right: end, width: whole, last } = size(svg);
    const place = (start + ((end - start) * common) / last) / whole, wide = svg.getBoundingClientRect().width;
    const line = svg.querySelector(".cursor");
    line.setAttribute("x1", place * whole);
    line.setAttribute("x2", place * whole);
    line.removeAttribute("hidden");
    const left = place * wide < wide / 2 ? place * wide + 12 : place * wide - box.offsetWidth - 12;
    box.style.left = `${Math.max(0, Math.min(left, wide - box.offsetWidth))}px`;
    svg.dataset.round = common;
  };
  const hide = (svg) => {
    svg.parentNode.querySelector(".readout").hidden = true;
    svg.querySelector(".cursor").setAttribute("hidden", "");
  };

  for (const panel of all(".panel"))
    for (const svg of all("svg.chart", panel)) {
      const curves = charts[Number(panel.dataset.panel)][svg.dataset.metric];
      const { left, right, width, last } = size(svg);
      const rounds = [...new Set(curves.flatMap((curve) => curve.rounds))].sort((a, b) => a - b);
      const point = (event) => {
        const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * width;
        readout(svg, panel, curves, Math.min(Math.max(((x - left) / (right - left)) * last, 0), last));
      };
      svg.setAttribute("tabindex", "0");
      svg.addEventListener("pointermove", point);
      svg.addEventListener("pointerdown", point);
      svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide(svg));
      addEventListener("pointerdown", (event) => svg.contains(event.target) || hide(svg)); // fingers tap elsewhere
      svg.addEventListener("blur", () => hide(svg));
      svg.addEventListener("focus", () => {
        if (svg.matches(":focus-visible")) readout(svg, panel, curves, Number(svg.dataset.round ?? last));
      });
      svg.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (event.key === "Escape") hide(svg);
        if (!step) return;
        event.preventDefault();
        const now = nearest(rounds, Number(svg.dataset.round ?? last));
        readout(svg, panel, curves, rounds[Math.min(Math.max(now + step, 0), rounds.length - 1)]);
      });
    }

  // --- tables that sort: numbers from the largest, words from A; again turns it round ---
  const sort = (table, at, th) => {
    const body = table.tBodies[0], rows = [...body.rows];
    const keys = new Map(rows.map((row) => [row, row.cells[at].dataset.key]));
    const numbers = [...keys.values()].every((key) => key !== "" && !Number.isNaN(Number(key)));
    const first = numbers ? "descending" : "ascending", other = numbers ? "ascending" : "descending";
    const order = th.getAttribute("aria-sort") === first ? other : first, sign = order === "ascending" ? 1 : -1;
    const compare = (a, b) => (numbers ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true }));
    rows.sort((a, b) => sign * compare(keys.get(a), keys.get(b)));
    body.append(...rows);
    for (const one of th.parentNode.cells) one.setAttribute("aria-sort", one === th ? order : "none");
  };
  for (const table of all("table.sortable"))
    [...table.tHead.rows[0].cells].forEach((th, at) =>
      th.querySelector("button").addEventListener("click", () => sort(table, at, th)));

  // --- heat maps: an attack's heading sorts the rules, a rule's heading the attacks; again turns it round ---
  const order = (button, cells) => {
    const down = button.dataset.order !== "down";
    button.dataset.order = down ? "down" : "up";
    const key = (cell) => (cell.dataset.key === "" ? -1 : Number(cell.dataset.key));
    return [...cells.entries()].sort(([, a], [, b]) => (down ? key(b) - key(a) : key(a) - key(b))).map(([at]) => at);
  };
  for (const table of all("table.heat")) {
    table.tHead.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const at = button.parentNode.cellIndex, rows = [...table.tBodies[0].rows];
      table.tBodies[0].append(...order(button, rows.map((row) => row.cells[at])).map((k) => rows[k]));
    });
    table.tBodies[0].addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      const places = order(button, [...button.closest("tr").cells].slice(1));
      for (const row of [table.tHead.rows[0], ...table.tBodies[0].rows]) {
        const cells = [...row.cells].slice(1);
        row.append(...places.map((k) => cells[k]));
      }
    });
  }

  // --- folded parts: a link opens its run, printing opens everything ---
  const reveal = () => {
    const target = document.getElementById(location.hash.slice(1));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();
  for (const button of all("button[data-open]"))
    button.addEventListener("click", () => {
      for (const one of all("details.run")) one.open = button.dataset.open === "true";
    });
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open])");
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of closed) one.open = false;
  });
})();
