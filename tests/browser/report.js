// Drives a report as a reader would and writes what it finds into #found; the test reads it there.
addEventListener("load", () => {
  const one = (selector) => document.querySelector(selector);
  const found = { sorted: {} };
  try {
    for (const details of document.querySelectorAll("article details")) details.open = true;
    found.broken_images = [...document.images].filter((image) => !image.complete || !image.naturalWidth).length;
    const heads = [...document.querySelectorAll("#settings th")];
    const column = (th) => [...one("#settings").tBodies[0].rows].map((row) => row.cells[th.cellIndex].dataset.key);
    for (const name of ["mean", "setting"]) {
      const th = heads.find((head) => head.textContent === name), aria = [];
      const read = () => column(th).map((key) => (name === "mean" ? Number(key) : key));
      const press = () => {
        th.querySelector("button").click();
        aria.push(th.getAttribute("aria-sort"));
        return read();
      };
      found.sorted[name] = { first: press(), again: press(), aria };
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
