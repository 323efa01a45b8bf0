// Looks at a peer's page as a reader would and writes what it finds into #found; the test reads it there.
addEventListener("load", () => {
  const text = (selector) => [...document.querySelectorAll(selector)].map((one) => one.textContent.trim());
  const found = {
    title: document.title, state: text(".state"), tiles: text(".tiles dt"), warnings: text(".warnings li"),
    members: text("tbody td:first-child"), states: text("tbody td:nth-child(2)"), versions: text("tbody td:last-child"), charts: text("figcaption"),
    lines: document.querySelectorAll("polyline").length, strip: document.querySelectorAll("rect").length,
    foreign: document.querySelectorAll("img, iframe, form, input, button, link, b").length,
    scripts: document.querySelectorAll("script").length, width: document.documentElement.scrollWidth, window: innerWidth,
    paper: getComputedStyle(document.body).backgroundColor, problems,
  };
  document.getElementById("found").textContent = JSON.stringify(found);
});
