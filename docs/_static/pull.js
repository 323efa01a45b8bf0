// How many peers must be pulled? P(max ≤ k) = F(k)^(hT), F the hypergeometric law of the hostile peers among s pulled.
// Exact like the planner: the tail is summed by ratios of neighbouring terms, and the power is taken of log1p(−tail).
"use strict";

function lnFactorials(n) {
  const out = new Float64Array(n + 1);
  for (let i = 2; i <= n; i++) out[i] = out[i - 1] + Math.log(i);
  return out;
}

// tails[k] = P(X > k), X ~ Hypergeometric(population, marked, draws)
function tails(population, marked, draws, lf) {
  const top = Math.min(marked, draws), low = Math.max(0, draws - (population - marked));
  const choose = (a, b) => lf[a] - lf[b] - lf[a - b];
  const out = new Float64Array(top + 1);
  let sum = 0;
  for (let k = top; k >= 0; k--) {
    out[k] = sum;
    if (k >= low) sum += Math.exp(choose(marked, k) + choose(population - marked, draws - k) - choose(population, draws));
  }
  return out;
}

// The smallest b_hat that holds with the given confidence for s pulled peers, and its probability.
function bHat(n, b, rounds, s, confidence, lf) {
  const t = tails(n - 1, b, s, lf), power = (n - b) * rounds;
  for (let k = 0; k < t.length; k++) {
    const p = Math.exp(power * Math.log1p(-Math.min(t[k], 1 - 1e-16)));
    if (p >= confidence) return { bHat: k, probability: p };
  }
  return { bHat: t.length - 1, probability: 1 };
}

function plan(n, b, rounds, confidence, most = 80) {
  const lf = lnFactorials(n), points = [];
  let chosen = null;
  for (let s = 2; s <= Math.min(n - 1, most); s++) {
    const found = { s, ...bHat(n, b, rounds, s, confidence, lf) };
    points.push(found);
    if (!chosen && 2 * found.bHat < s + 1) chosen = found;
  }
  return { points, chosen };
}

if (typeof module !== "undefined") module.exports = { plan, bHat, tails, lnFactorials };

if (typeof customElements !== "undefined") {
  const SLIDERS = [
    ["n", "nodes n", 1, 5, 0.02, 3, (v) => Math.round(10 ** v)],
    ["share", "hostile share b/n", 0, 40, 1, 10, (v) => Number(v) / 100],
    ["T", "rounds T", 1, 4, 0.05, 2.3, (v) => Math.round(10 ** v)],
    ["c", "confidence", 0, 4, 0.05, 2, (v) => 1 - 10 ** -v],
  ];
  const fixed = (x) => x.toLocaleString("en", { maximumFractionDigits: 6 });

  class RpelPull extends HTMLElement {
    connectedCallback() {
      const form = document.createElement("form");
      for (const [name, title, low, high, step, start] of SLIDERS) {
        const label = document.createElement("label");
        label.innerHTML = `<span>${title}: <output></output></span>`;
        const input = Object.assign(document.createElement("input"), { type: "range", name, min: low, max: high, step, value: start });
        input.setAttribute("aria-label", title);
        label.append(input);
        form.append(label);
      }
      this.answer = Object.assign(document.createElement("p"), { className: "answer" });
      this.picture = document.createElement("div");
      this.append(form, this.answer, this.picture);
      form.addEventListener("input", () => this.draw(form));
      form.addEventListener("submit", (event) => event.preventDefault());
      this.draw(form);
    }

    draw(form) {
      const v = {};
      for (const [name, , , , , , read] of SLIDERS) {
        v[name] = read(form.elements[name].value);
        form.elements[name].parentElement.querySelector("output").textContent =
          name === "share" ? `${Math.round(v[name] * 100)} %` : name === "c" ? `${fixed(v[name] * 100)} %` : fixed(v[name]);
      }
      const b = Math.floor(v.n * v.share);
      const { points, chosen } = plan(v.n, b, v.T, v.c);
      this.answer.innerHTML = chosen
        ? `Pull <b>s = ${chosen.s}</b> peers and trim <b>b_hat = ${chosen.bHat}</b>: over all ${fixed(v.n - b)} honest nodes and ${fixed(v.T)} rounds that holds with probability ${fixed(100 * chosen.probability)} %. ` +
          `${fixed(v.n * chosen.s)} messages a round instead of ${fixed(v.n * (v.n - 1))}.`
        : `No s up to ${points[points.length - 1].s} keeps the hostile answers a minority for every node in every round at this confidence.`;
      this.picture.innerHTML = drawing(points, chosen);
    }
  }

  function drawing(points, chosen) {
    const W = 640, H = 260, L = 46, B = 36, R = 10, T = 10, last = points[points.length - 1].s;
    const x = (s) => L + ((s - 2) / Math.max(1, last - 2)) * (W - L - R), y = (f) => H - B - f * (H - B - T);
    const path = points.map((p, i) => `${i ? "L" : "M"}${x(p.s).toFixed(1)},${y(p.bHat / (p.s + 1)).toFixed(1)}`).join("");
    const ticks = [2, 10, 20, 30, 40, 50, 60, 70, 80].filter((s) => s <= last).map((s) => `<text x="${x(s)}" y="${H - B + 16}" text-anchor="middle">${s}</text>`).join("");
    const marks = [0, 0.25, 0.5, 0.75, 1].map((f) => `<line class="axis" x1="${L}" x2="${W - R}" y1="${y(f)}" y2="${y(f)}" ${f === 0.5 ? 'stroke-dasharray="6 4"' : 'opacity=".35"'}/><text x="${L - 6}" y="${y(f) + 4}" text-anchor="end">${f}</text>`).join("");
    const pick = chosen ? `<circle class="chosen" cx="${x(chosen.s)}" cy="${y(chosen.bHat / (chosen.s + 1))}" r="5" fill="none"/>` : "";
    return `<svg viewBox="0 0 ${W} ${H}" role="img" aria-label="b_hat over s plus 1 against s">${marks}${ticks}` +
      `<text x="${(L + W) / 2}" y="${H - 4}" text-anchor="middle">peers pulled, s</text><text x="12" y="${H / 2}" transform="rotate(-90 12 ${H / 2})" text-anchor="middle">b_hat / (s + 1)</text>` +
      `<path d="${path}" fill="none" stroke="#0072b2" stroke-width="2"/>${pick}</svg>`;
  }

  customElements.define("rpel-pull", RpelPull);
}
