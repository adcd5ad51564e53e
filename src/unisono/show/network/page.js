// Point at a node: its links. Choose two ranks: the way between them.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const svg = document.querySelector("#network svg");
const says = document.getElementById("says");
const nodes = new Map([...svg.querySelectorAll(".node")].map((n) => [Number(n.dataset.node), n]));
const cables = [...svg.querySelectorAll(".cable")].map((path) => ({
  path, ends: path.dataset.ends.split(" ").map(Number),
}));
const hint = data.routes.length ? "Choose two ranks to see the way between them." : "";
let first = null;
let fixed = false;

function light(wanted, lit) {
  svg.classList.toggle("busy", wanted !== null);
  for (const { path, ends } of cables) path.classList.toggle("lit", wanted !== null && wanted(ends));
  for (const [number, node] of nodes) node.classList.toggle("lit", lit.includes(number));
}

function clear() {
  fixed = false;
  first = null;
  light(null, []);
  says.textContent = hint;
}

function choose(number) {
  if (number >= data.ranks || !data.routes.length) return;
  if (first === null || first === number) {
    fixed = false;
    first = number;
    says.textContent = `From rank ${number} to ...`;
    return;
  }
  const way = data.routes[first * data.ranks + number];
  const hops = new Set(way.slice(1).map((node, i) => [way[i], node].sort((a, b) => a - b).join(" ")));
  light((ends) => hops.has(ends.join(" ")), way);
  says.textContent = `From rank ${first} to rank ${number}: ${way.length - 1} links.`;
  first = null;
  fixed = true;
}

for (const [number, node] of nodes) {
  node.addEventListener("pointerenter", () => fixed || light((ends) => ends.includes(number), [number, first]));
  node.addEventListener("pointerleave", () => fixed || light(null, [first]));
  node.addEventListener("click", (event) => { event.stopPropagation(); choose(number); });
}
svg.addEventListener("click", clear);
clear();
