// Hovering over a node highlights its links. Choosing two ranks highlights the route between them.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const svg = document.querySelector("#network svg");
const says = document.getElementById("says");
const nodes = new Map([...svg.querySelectorAll(".node")].map((n) => [Number(n.dataset.node), n]));
const cables = [...svg.querySelectorAll(".cable")].map((path) => ({
  path, ends: path.dataset.ends.split(" ").map(Number),
}));
const hint = data.routes.length ? "Choose two ranks to see the route between them." : "";
let first = null;
let pinned = false;

function highlight(wanted, lit) {
  svg.classList.toggle("busy", wanted !== null);
  for (const { path, ends } of cables) path.classList.toggle("lit", wanted !== null && wanted(ends));
  for (const [number, node] of nodes) node.classList.toggle("lit", lit.includes(number));
}

function clear() {
  pinned = false;
  first = null;
  highlight(null, []);
  says.textContent = hint;
}

function choose(number) {
  if (number >= data.ranks || !data.routes.length) return;
  if (first === null || first === number) {
    pinned = false;
    first = number;
    says.textContent = `From rank ${number} to ...`;
    return;
  }
  const route = data.routes[first * data.ranks + number];
  const hops = new Set(route.slice(1).map((node, i) => [route[i], node].sort((a, b) => a - b).join(" ")));
  highlight((ends) => hops.has(ends.join(" ")), route);
  says.textContent = `From rank ${first} to rank ${number}: ${route.length - 1} links.`;
  first = null;
  pinned = true;
}

for (const [number, node] of nodes) {
  node.addEventListener("pointerenter", () => pinned || highlight((ends) => ends.includes(number), [number, first]));
  node.addEventListener("pointerleave", () => pinned || highlight(null, [first]));
  node.addEventListener("click", (event) => { event.stopPropagation(); choose(number); });
}
svg.addEventListener("click", clear);
clear();
