"use strict";
// Animates the schedule that draw.js draws. Handles keys, buttons and the pointer.

const ROUND_MS = 1100;
const TRAVEL = 0.72; // fraction of a round in which chunks move; afterwards they are written
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const player = { playing: false, frame: 0, pinned: null };

// Moving from round to round

function show(step) {
  cancelAnimationFrame(player.frame);
  const target = Math.max(0, Math.min(view.rounds.length, step));
  if (target !== current.at || !current.state.size) setState(target);
  $("packets").replaceChildren();
  drawArrows(target);
  showText(target);
}

function advance(then) {
  if (current.at >= view.rounds.length) return;
  if (reducedMotion.matches) {
    show(current.at + 1);
    player.frame = 0;
    if (then) setTimeout(then, ROUND_MS / Number($("speed").value));
    return;
  }
  cancelAnimationFrame(player.frame);
  const next = current.at + 1;
  const arrows = view.rounds[next - 1].arrows;
  $("packets").replaceChildren();
  drawArrows(next);
  showTitle(next);
  const moving = arrows.length <= MANY_PACKETS ? packets(arrows) : [];
  const began = performance.now();
  const tick = (now) => {
    const share = (now - began) / ROUND_MS * Number($("speed").value);
    const progress = Math.min(1, Math.max(0, share / TRAVEL));
    placePackets(moving, progress * progress * (3 - 2 * progress));
    if (progress >= 1 && current.at < next) { setState(next); drawProgress(); drawTraffic(); }
    if (share < 1) player.frame = requestAnimationFrame(tick);
    else { show(next); then?.(); }
  };
  player.frame = requestAnimationFrame(tick);
}

function play(on) {
  player.playing = on && view.rounds.length > 0;
  $("play").textContent = player.playing ? "Pause" : "Play";
  if (!player.playing) return show(current.at);
  if (current.at >= view.rounds.length) show(0);
  const next = () => {
    if (!player.playing) return;
    if (current.at >= view.rounds.length) play(false);
    else advance(next);
  };
  next();
}

function showTitle(step) {
  const round = step ? view.rounds[step - 1] : null;
  $("stage-title").replaceChildren(round ? `Round ${round.number}` : "Start", element("small", {}, round ? ` · ${round.kind}` : ""));
  $("slider").value = step;
}

function showText(step) {
  const round = step ? view.rounds[step - 1] : null;
  showTitle(step);
  document.body.dataset.round = round ? round.number : "start";
  const done = round ? round.done : view.doneAtStart;
  const text = round
    ? `round ${round.number} (${step} of ${view.rounds.length}), ${done} of ${view.allWanted} done`
    : `start, ${plural(view.rounds.length, "round")} to come`;
  $("says").textContent = text;
  $("slider").setAttribute("aria-valuetext", text);
  $("transfers").replaceChildren(...(round ? round.lines : ["none yet"]).map((line) => element("li", {}, line)));
  $("back").disabled = $("first").disabled = step === 0;
  $("forward").disabled = $("last").disabled = step === view.rounds.length;
  drawProgress();
  drawTraffic();
  history.replaceState(null, "", round ? `#round=${round.number}` : "#start");
}

function showAddressedRound() {
  const wanted = /^#round=(\d+)$/.exec(location.hash);
  const at = wanted ? view.rounds.findIndex((round) => round.number === Number(wanted[1])) + 1 : 0;
  show(location.hash === "#end" ? view.rounds.length : at);
}

// Pointer

function focusOn(what) {
  const [kind, value] = what ?? player.pinned ?? [];
  const rules = {
    chunk: `#holdings td:not([data-chunk="${value}"]), #stage .arrow:not([data-chunks~="${value}"]), #stage .packet:not([data-chunks~="${value}"])`,
    color: `#holdings td:not([data-color="${value}"]), #stage .arrow:not([data-colors~="${value}"]), #stage .packet:not([data-colors~="${value}"])`,
    rank: `#holdings tr[data-rank]:not([data-rank="${value}"]) td, #stage .arrow:not([data-ranks~="${value}"]), #stage .packet:not([data-ranks~="${value}"])`,
  };
  $("focus").textContent = kind ? `${rules[kind]} { opacity: .18; }` : "";
}

function describe(target) {
  const place = target.closest("#holdings td")?.dataset.place;
  if (place) {
    const [rank, location] = place.split(",").map(Number);
    const held = current.state.get(place);
    const where = `rank ${rank}, chunk ${view.chunkLabels[location] ?? location}`;
    if (!held) return [`${where}: empty`, null];
    const ranks = bits(held[1]);
    const other = held[0] === location ? "" : ` (chunk ${view.chunkLabels[held[0]]})`;
    const parts = view.slots > 1 ? `${ranks.length} of ${view.slots} contributions: rank${ranks.length > 1 ? "s" : ""} ${spell(ranks)}` : "held";
    return [`${where}${other}: ${parts}${held[2] ? ", finished" : ""}`, ["chunk", held[0]]];
  }
  const link = target.closest("#traffic td");
  if (link?.dataset.amount) {
    const [src, dst] = link.dataset.link.split(",");
    return [`rank ${src} to rank ${dst}: ${link.dataset.amount} ${current.total ? "so far" : "in this round"}`, null];
  }
  const arrow = target.closest("#stage .arrow, #stage .packet");
  if (arrow) {
    const [src, dst] = arrow.dataset.ranks.split(" ");
    const chunks = arrow.dataset.chunks.split(" ").map(Number);
    const verb = view.rounds[current.at - 1]?.arrows.some(([l, reduce]) => reduce && `${l}` === arrow.dataset.link) ? "reduces" : "sends";
    return [`rank ${src} ${verb} chunk ${chunkText(chunks)} ${verb === "reduces" ? "into" : "to"} rank ${dst}: ${amount(chunks.length)}`,
      chunks.length === 1 ? ["chunk", chunks[0]] : null];
  }
  const rank = target.closest("#ranks .rank")?.dataset.rank;
  if (rank !== undefined) {
    const done = document.querySelector(`#ranks [data-rank="${rank}"]`).dataset.done;
    return [`rank ${rank}: ${done} of ${view.wanted[rank]} finished`, ["rank", rank]];
  }
  const chip = target.closest("#legend button");
  return chip ? [null, ["color", chip.dataset.color]] : [null, null];
}

function point(event) {
  const [text, focus] = event.target instanceof Element ? describe(event.target) : [null, null];
  $("detail").hidden = !text;
  $("detail").textContent = text ?? "";
  focusOn(focus);
}

// Texts and controls

function buildTexts() {
  document.title = view.title;
  $("title").textContent = view.title;
  $("summary").textContent = view.summary;
  $("source").textContent = view.source ? `Source: ${view.source}` : "";
  $("meaning").textContent = view.meaning;
  $("problem").hidden = !view.problem;
  $("problem").textContent = view.problem ? `This schedule is wrong: ${view.problem}` : "";
  for (const [term, value] of view.facts) {
    $("facts").append(element("div", {}, element("dt", {}, term), element("dd", {}, value)));
  }
  for (const [kind, head, dash] of [["reduce", "M34 6L24 1V11Z", ""], ["copy", "M25 1L34 6L25 11", "6 4"]]) {
    if (kind === "reduce" && view.slots === 1) continue;
    const line = element("path", { d: "M0 6H26", stroke: "currentColor", "stroke-width": 2.5, "stroke-dasharray": dash });
    const tip = element("path", { d: head, stroke: "currentColor", "stroke-width": dash ? 2 : 0, fill: dash ? "none" : "currentColor" });
    const drawing = element("svg", { viewBox: "0 0 36 12", "aria-hidden": "true" }, line, tip);
    $("legend").append(element("span", { class: "kind" }, drawing, kind));
  }
  if (view.colors.length < 2 || view.colors.length > 32) return;
  view.colors.forEach((mark, i) => {
    const chip = element("button", { type: "button", "data-color": i, "aria-pressed": "false" }, view.colorNames[i]);
    chip.style.setProperty("--mark", mark);
    chip.addEventListener("click", () => pin(chip, i));
    $("legend").append(chip);
  });
}

function pin(chip, i) {
  const same = player.pinned?.[1] === i;
  player.pinned = same ? null : ["color", i];
  for (const other of document.querySelectorAll("#legend button")) other.setAttribute("aria-pressed", String(!same && other === chip));
  focusOn(null);
}

function step(by) {
  play(false);
  if (by === 1) advance(); else show(current.at + by);
}

const keys = {
  ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => step(-Infinity), End: () => step(Infinity),
  " ": () => play(!player.playing),
};

function listen() {
  $("play").addEventListener("click", () => play(!player.playing));
  $("forward").addEventListener("click", () => step(1));
  $("back").addEventListener("click", () => step(-1));
  $("first").addEventListener("click", () => step(-Infinity));
  $("last").addEventListener("click", () => step(Infinity));
  $("slider").max = view.rounds.length;
  $("slider").addEventListener("input", () => { const to = Number($("slider").value); play(false); show(to); });
  for (const [id, total] of [["now", false], ["total", true]]) $(id).addEventListener("click", () => {
    current.total = total;
    $("now").setAttribute("aria-pressed", String(!total));
    $("total").setAttribute("aria-pressed", String(total));
    drawTraffic();
  });
  $("theme").addEventListener("click", () => {
    const root = document.documentElement.style;
    const dark = root.colorScheme ? root.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.colorScheme = dark ? "light" : "dark";
  });
  document.addEventListener("keydown", (event) => {
    const field = event.target instanceof Element && event.target.closest("input, select");
    const button = event.target instanceof Element && event.target.closest("button");
    if (field || (button && event.key === " ") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  document.addEventListener("pointerover", point);
  document.addEventListener("click", point);
  addEventListener("hashchange", showAddressedRound);
}

document.head.append(element("style", { id: "focus" }));
buildTexts();
buildHoldings();
buildStage();
buildTraffic();
listen();
showAddressedRound();
