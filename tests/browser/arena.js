// Drives an arena's page as a reader would and writes what it finds into #found; the test reads it there.
addEventListener("load", () => {
  const found = { images: document.querySelectorAll("img").length };
  try {
    const table = document.getElementById("worst"), body = table.tBodies[0];
    const labels = () => [...body.rows].map((row) => row.cells[0].textContent);
    const attacks = () => [...table.tHead.rows[0].cells].slice(1).map((cell) => cell.textContent);
    const values = (row) => [...row.cells].slice(1).map((cell) => cell.dataset.key);
    found.before = { rules: labels(), attacks: attacks() };
    table.tHead.rows[0].cells[1].querySelector("button").click();
    found.byColumn = [...body.rows].map((row) => row.cells[1].dataset.key);
    table.tHead.rows[0].cells[1].querySelector("button").click();
    found.byColumnUp = [...body.rows].map((row) => row.cells[1].dataset.key);
    const row = [...body.rows].find((one) => one.cells[0].textContent === "median");
    row.cells[0].querySelector("button").click();
    found.byRow = { attacks: attacks(), values: values(row) };
    found.hover = row.cells[1].title;
    found.width = document.documentElement.scrollWidth;
    found.window = innerWidth;
  } catch (error) {
    problems.push(String(error));
  }
  found.problems = problems;
  document.getElementById("found").textContent = JSON.stringify(found);
});
