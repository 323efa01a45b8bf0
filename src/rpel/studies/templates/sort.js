"use strict";
// Tables sort by their headings: numbers from the largest, words from A; again turns the order round.
for (const table of document.querySelectorAll("table"))
  [...table.tHead.rows[0].cells].forEach((th, at) => th.firstElementChild.addEventListener("click", () => {
    const body = table.tBodies[0], rows = [...body.rows], key = (row) => row.cells[at].dataset.key;
    const numbers = rows.every((row) => key(row) !== "" && !Number.isNaN(Number(key(row))));
    const [first, other] = numbers ? ["descending", "ascending"] : ["ascending", "descending"];
    const order = th.getAttribute("aria-sort") === first ? other : first, sign = order === "ascending" ? 1 : -1;
    rows.sort((a, b) => sign * (numbers ? key(a) - key(b) : key(a).localeCompare(key(b), "en", { numeric: true })));
    body.append(...rows);
    for (const one of th.parentNode.cells) one.setAttribute("aria-sort", one === th ? order : "none");
  }));
// A link to a run opens it; printing opens everything.
const reveal = () => {
  const target = document.getElementById(location.hash.slice(1));
  if (target) target.open = true;
};
addEventListener("hashchange", reveal);
reveal();
addEventListener("beforeprint", () => {
  for (const one of document.querySelectorAll("details")) one.open = true;
});
