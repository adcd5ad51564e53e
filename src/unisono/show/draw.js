"use strict";
// Draws the state of a schedule at one time. Python computes the rounds: `writes` are new contents of
// locations, `arrows` are transfers, and `amounts` are texts of sizes.

const view = JSON.parse(document.getElementById("view").textContent);
const $ = (id) => document.getElementById(id);
const MANY_PACKETS = 400;
const dense = view.ranks > 24 || view.columns.length > 24;

const current = { at: 0, state: new Map(), total: true };

const element = (name, attributes = {}, ...children) => {
  const svg = ["svg", "g", "path", "circle", "rect", "text"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
const amount = (chunks) => view.amounts[chunks] ?? `${chunks} chunks`;
const color = (chunk) => view.colors[view.chunkColors[chunk]];
const bits = (mask) => {
  const found = [];
  [...view.masks[mask]].reverse().forEach((digit, i) => {
    const value = parseInt(digit, 16);
    for (let bit = 0; bit < 4; bit++) if (value >> bit & 1) found.push(4 * i + bit);
  });
  return found;
};
const runs = (numbers) => numbers.reduce((found, n) => {
  if (found.length && n === found.at(-1)[1] + 1) found.at(-1)[1] = n; else found.push([n, n]);
  return found;
}, []);
const spell = (numbers) => runs(numbers).map(([a, b]) => a === b ? `${a}` : `${a}-${b}`).join(", ");

// Contents of the ranks

const cells = new Map(); // "rank,location" -> cell
const backgrounds = new Map(); // "chunk,mask" -> background

function buildHoldings() {
  const table = $("holdings");
  table.classList.toggle("dense", dense);
  table.style.setProperty("--row", `${Math.max(4, Math.min(30, 460 / view.ranks))}px`);
  table.append(headRow(view.columns, "rank"));
  const body = element("tbody");
  view.cells.forEach((row, rank) => {
    const line = element("tr", { "data-rank": rank }, rowHead(rank));
    for (const location of row) {
      const cell = element("td", { "data-place": `${rank},${location}` });
      cells.set(`${rank},${location}`, cell);
      line.append(cell);
    }
    body.append(line);
  });
  table.append(body);
}

function headRow(names, corner) {
  const every = Math.ceil(names.length / 20);
  const heads = names.map((name, i) => element("th", { scope: "col" }, i % every ? "" : name));
  return element("thead", {}, element("tr", {}, element("th", { scope: "row" }, corner), ...heads));
}

function rowHead(rank) {
  return element("th", { scope: "row" }, dense && rank % 8 ? "" : `${rank}`);
}

function backgroundOf(chunk, mask) {
  const key = `${chunk},${mask}`;
  if (!backgrounds.has(key)) backgrounds.set(key, view.slots > 1 ? slots(chunk, bits(mask)) : color(chunk));
  return backgrounds.get(key);
}

function slots(chunk, ranks) {
  if (ranks.length === view.slots) return color(chunk);
  if (view.thin) { // too thin to see: the opacity shows the number of contributions
    const share = Math.round(8 + 92 * ranks.length / view.slots);
    return `color-mix(in srgb, ${color(chunk)} ${share}%, transparent)`;
  }
  const stops = ["transparent 0%"];
  for (const [first, last] of runs(ranks)) {
    const [from, to] = [100 * first / view.slots, 100 * (last + 1) / view.slots];
    stops.push(`transparent ${from}%`, `${color(chunk)} ${from}%`, `${color(chunk)} ${to}%`, `transparent ${to}%`);
  }
  return `linear-gradient(to right, ${stops.join(", ")})`;
}

function paintCell(place) {
  const cell = cells.get(place);
  if (!cell) return;
  const held = current.state.get(place);
  if (!held) {
    cell.removeAttribute("style");
    delete cell.dataset.chunk;
    delete cell.dataset.ranks;
    cell.className = "";
    return;
  }
  const [chunk, mask, finished] = held;
  const background = backgroundOf(chunk, mask);
  const isImage = background.startsWith("linear");
  cell.style.backgroundImage = isImage ? background : "";
  cell.style.backgroundColor = isImage ? "" : background;
  cell.style.setProperty("--tick", view.inks[view.chunkColors[chunk]]);
  cell.dataset.chunk = chunk;
  cell.dataset.color = view.chunkColors[chunk];
  cell.dataset.ranks = bits(mask).join(" ");
  cell.classList.toggle("finished", finished === 1);
}

function setState(step) {
  if (current.state.size && step === current.at + 1) write(view.rounds[current.at].writes, true);
  else {
    current.state.clear();
    write(view.start, false);
    for (let i = 0; i < step; i++) write(view.rounds[i].writes, false);
    for (const place of cells.keys()) paintCell(place);
  }
  current.at = step;
  for (const cell of document.querySelectorAll("#holdings td.written")) cell.classList.remove("written");
  for (const [rank, location] of step ? view.rounds[step - 1].writes : []) {
    cells.get(`${rank},${location}`)?.classList.add("written");
  }
}

function write(writes, paint) {
  for (const [rank, location, chunk, mask, finished] of writes) {
    current.state.set(`${rank},${location}`, [chunk, mask, finished]);
    if (paint) paintCell(`${rank},${location}`);
  }
}

// Ranks and arrows

function buildStage() {
  const { size, radius, points, inside } = view.stage;
  const stage = $("stage");
  stage.setAttribute("viewBox", `0 0 ${size} ${size}`);
  stage.append(element("g", { id: "arrows" }), element("g", { id: "ranks" }), element("g", { id: "packets" }));
  points.forEach(([x, y], rank) => {
    const kind = `rank${rank === view.root ? " root" : ""}${inside ? "" : " out"}`;
    const group = element("g", { class: kind, "data-rank": rank });
    if (inside) {
      for (const part of ["goal", "done"]) group.append(element("circle", {
        class: part, cx: x, cy: y, r: radius + 4, "stroke-width": 4, pathLength: 100,
        "stroke-dasharray": part === "goal" ? "100 0" : "0 100", transform: `rotate(-90 ${x} ${y})`,
      }));
    }
    group.append(element("circle", { class: "disc", cx: x, cy: y, r: radius, "stroke-width": inside ? 1.8 : .6 }));
    const angle = Math.atan2(y - size / 2, x - size / 2);
    const far = inside ? 0 : radius + 14;
    if (inside || rank % 8 === 0) group.append(element("text", {
      x: x + far * Math.cos(angle), y: y + far * Math.sin(angle), "font-size": inside ? Math.min(18, radius) : 12,
    }, `${rank}`));
    $("ranks").append(group);
  });
}

function drawArrows(step) {
  $("arrows").replaceChildren();
  if (!step) return;
  const arrows = view.rounds[step - 1].arrows;
  const many = arrows.length > 100;
  const width = arrows.length <= 40 ? 3 : Math.max(.6, 1.8 - arrows.length / 250);
  $("arrows").setAttribute("opacity", many ? .6 : 1);
  for (const [link, reduce, chunks] of arrows) {
    const { src, dst, path, tip: [x, y, angle] } = view.links[link];
    const size = 3.5 + 2 * width;
    const head = reduce ? `M0 0L${-size} ${size / 2}L${-size} ${-size / 2}Z` : `M${-size} ${size / 2}L0 0L${-size} ${-size / 2}`;
    const group = element("g", {
      class: `arrow ${reduce ? "reduce" : "copy"}`, "stroke-width": width,
      "data-chunks": chunks.join(" "), "data-ranks": `${src} ${dst}`, "data-link": link,
      "data-colors": [...new Set(chunks.map((c) => view.chunkColors[c]))].join(" "),
    }, element("path", { d: path, ...(reduce ? {} : { "stroke-dasharray": `${2.6 * width} ${1.8 * width}` }) }),
      element("path", { d: head, class: "head", transform: `translate(${x} ${y}) rotate(${angle})` }));
    if (new Set(chunks.map(color)).size === 1) group.style.setProperty("--mark", color(chunks[0]));
    $("arrows").append(group);
  }
  if (arrows.length <= MANY_PACKETS) placePackets(packets(arrows), arrows.length <= 40 ? "rest" : 2);
}

function packets(arrows) {
  const group = $("packets");
  group.replaceChildren();
  const small = arrows.length > 40;
  return arrows.map(([link, reduce, chunks], i) => {
    const label = small ? "" : (view.columns.length > 1 ? chunkText(chunks) : "") + (reduce ? "+" : "");
    const wide = small ? 8 : Math.max(20, 8.2 * label.length + 10);
    const high = small ? 8 : 20;
    const mark = chunks.length === 1 ? color(chunks[0]) : null;
    const packet = element("g", { class: "packet", "data-chunks": chunks.join(" "), "data-ranks": `${view.links[link].src} ${view.links[link].dst}`,
      "data-colors": [...new Set(chunks.map((c) => view.chunkColors[c]))].join(" ") },
      element("rect", { x: -wide / 2, y: -high / 2, width: wide, height: high, rx: high / 2, fill: mark ?? "var(--soft)" }),
      element("text", { fill: mark ? view.inks[view.chunkColors[chunks[0]]] : "var(--paper)" }, label));
    group.append(packet);
    return { packet, path: $("arrows").children[i].firstChild };
  });
}

function chunkText(chunks) {
  if (chunks.length === 1) return view.chunkLabels[chunks[0]];
  const numbers = runs([...chunks].sort((a, b) => a - b));
  return numbers.length > 2 ? `${chunks.length} chunks` : numbers.map(([a, b]) =>
    a === b ? view.chunkLabels[a] : `${view.chunkLabels[a]}-${view.chunkLabels[b]}`).join(",");
}

function placePackets(moving, share) {
  for (const { packet, path } of moving) {
    packet.style.display = share > 1 ? "none" : "";
    if (share > 1) continue;
    const length = path.getTotalLength(); // long arrows cross in the middle, so packets stop before the middle
    const position = share === "rest" ? (length > .4 * view.stage.size ? .33 : .5) : share;
    const { x, y } = path.getPointAtLength(position * length);
    packet.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
  }
}

function drawProgress() {
  const done = new Array(view.ranks).fill(0);
  for (const [place, [, , finished]] of current.state) if (finished) done[parseInt(place, 10)] += 1;
  document.querySelectorAll("#ranks .rank").forEach((group, rank) => {
    const share = view.wanted[rank] ? 100 * done[rank] / view.wanted[rank] : 100;
    group.dataset.done = done[rank];
    const ring = group.querySelector(".done");
    ring?.setAttribute("stroke-dasharray", `${share} ${100 - share}`);
    ring?.style.setProperty("visibility", share ? "visible" : "hidden");
  });
}

// Bytes per link

function buildTraffic() {
  const table = $("traffic");
  table.classList.toggle("dense", dense);
  table.style.setProperty("--row", `${Math.max(4, Math.min(26, 400 / view.ranks))}px`);
  table.append(headRow(view.cells.map((_, rank) => `${rank}`), "from"));
  const body = element("tbody");
  for (let src = 0; src < view.ranks; src++) {
    const line = element("tr", { "data-rank": src }, rowHead(src));
    for (let dst = 0; dst < view.ranks; dst++) {
      line.append(element("td", { "data-link": `${src},${dst}`, ...(src === dst ? { class: "self" } : {}) }));
    }
    body.append(line);
  }
  table.append(body);
}

function drawTraffic() {
  const carried = new Map();
  const sent = new Array(view.ranks).fill(0);
  for (let i = current.total ? 0 : Math.max(0, current.at - 1); i < current.at; i++) {
    for (const [link, , chunks] of view.rounds[i].arrows) {
      const { src, dst } = view.links[link];
      if (src === dst) continue;
      carried.set(`${src},${dst}`, (carried.get(`${src},${dst}`) ?? 0) + chunks.length);
      sent[src] += chunks.length;
    }
  }
  const most = Math.max(1, ...carried.values());
  for (const cell of document.querySelectorAll("#traffic td:not(.self)")) {
    const count = carried.get(cell.dataset.link) ?? 0;
    cell.style.setProperty("--share", `${count ? 12 + 88 * count / most : 0}%`);
    cell.classList.toggle("strong", count > .5 * most);
    cell.textContent = count && view.ranks <= 10 ? amount(count) : "";
    cell.dataset.amount = amount(count);
  }
  const range = sent.length ? [Math.min(...sent), Math.max(...sent)] : [0, 0];
  $("load").textContent = range[0] === range[1]
    ? `Each rank sends ${amount(range[0])} ${current.total ? "so far" : "in this round"}.`
    : `A rank sends ${amount(range[0])} to ${amount(range[1])} ${current.total ? "so far" : "in this round"}.`;
}
