// Drives a report as a reader would and writes what it finds into #found; the test reads it there.
addEventListener("load", () => {
  const one = (selector) => document.querySelector(selector);
  const visible = (selector) => one(selector) !== null && one(selector).getClientRects().length > 0;
  const found = { charts: document.querySelectorAll("svg.chart").length, images: document.querySelectorAll("img").length };
  try {
    const panel = '.panel[data-panel="0"] ', curve = panel + 'svg[data-metric="accuracy"] g[data-curve="0"]';
    one(panel + "details").open = true;
    const button = one(panel + '.legend button[data-curve="0"]');
    found.toggle = { before: visible(curve) };
    button.click();
    Object.assign(found.toggle, {
      off: visible(curve), pressed: button.getAttribute("aria-pressed"),
      other: visible(curve.replace('curve="0"', 'curve="1"')),
      loss: visible(curve.replace("accuracy", "loss")),
    });
    button.click();
    found.toggle.on = visible(curve);

    found.worst = { before: visible(curve + ".line.worst") };
    one('[data-show="worst"]').click();
    found.worst.off = visible(curve + ".line.worst");
    one('[data-show="worst"]').click();
    one('[data-show="mean"]').click();
    found.mean = { off: visible(curve + ".line.mean"), loss: visible(curve.replace("accuracy", "loss") + ".line") };
    one('[data-show="mean"]').click();

    const chart = one(panel + "svg.chart"), box = chart.getBoundingClientRect();
    chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width * 0.5, clientY: box.top + 20 }));
    found.hover = { shown: visible(panel + ".readout"), text: one(panel + ".readout").textContent };
    chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    found.keyboard = one(panel + ".readout").textContent;

    const head = (name) => [...document.querySelectorAll("#settings th")].find((th) => th.textContent === name);
    const column = (th) => [...one("#settings").tBodies[0].rows].map((row) => row.cells[th.cellIndex].dataset.key);
    found.sorted = {};
    for (const name of ["mean", "setting"]) {
      const th = head(name), read = () => column(th).map((key) => (name === "mean" ? Number(key) : key)), aria = [];
      th.querySelector("button").click();
      const down = read();
      aria.push(th.getAttribute("aria-sort"));
      th.querySelector("button").click();
      aria.push(th.getAttribute("aria-sort"));
      found.sorted[name] = { down, up: read(), aria };
    }
    found.width = document.documentElement.scrollWidth;
    found.window = innerWidth;
    one("#runs a").click();
  } catch (error) {
    problems.push(String(error));
  }
  setTimeout(() => {
    found.link_opens = document.getElementById(one("#runs a").getAttribute("href").slice(1)).open;
    found.problems = problems;
    one("#found").textContent = JSON.stringify(found);
  }, 100);
});
