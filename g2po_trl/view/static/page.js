"use strict";
// The page of a run. Data come as text (iteration by iteration, when they are looked at) and are shown as text.

const $ = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const signed = (x) => (x > 0 ? "+" : x < 0 ? "−" : "") + Math.abs(x).toFixed(2);
const PHASES = ["environment", "generation", "logps", "advantage", "update"];
const PHASE_COLOURS = ["#4c9f70", "#3b7dd8", "#a86fd1", "#888888", "#e08a3c"];

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// -- data -------------------------------------------------------------------------------------------------------------

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const kept = new Map();
async function load(number) {
  if (!kept.has(number)) {
    const here = $(`iteration-${number}`);
    const data = here ? await unpack(here.textContent) : await (await fetch(`iteration/${number}`)).json();
    if (kept.size > 4) kept.delete(kept.keys().next().value);
    kept.set(number, data);
  }
  return kept.get(number);
}

let run, shown, group, network;

// -- curves -----------------------------------------------------------------------------------------------------------

function chart(title, series, { points = [], top = null, bars = null, colours = [] } = {}) {
  const width = Math.max(200, $("curves").clientWidth / 4 - 34), height = 130, left = 34, bottom = 16;
  const numbers = run.curves.map((c) => c.n);
  const last = Math.max(1, ...numbers, ...points.map((p) => p.x));
  const first = points.length ? 0 : 1;
  const sums = bars ? run.curves.map((c) => bars.reduce((sum, name) => sum + (c.times[name] || 0), 0)) : [];
  const values = [...series.flatMap((s) => s.values), ...points.map((p) => p.y), ...sums].filter(Number.isFinite);
  const highest = top ?? (Math.max(0, ...values) || 1) * 1.05;
  const margin = bars ? ((width - left - 8) / last) * 0.5 : 0;
  const x = (n) => left + margin + ((n - first) / Math.max(1, last - first)) * (width - left - 8 - 2 * margin);
  const y = (v) => 6 + (1 - v / highest) * (height - bottom - 6);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const part of [0, 0.5, 1]) {
    const at = y(part * highest);
    svg.append(drawn("line", { x1: left, x2: width - 8, y1: at, y2: at, stroke: css("--line"), "stroke-width": 1 }));
    const label = drawn("text", { x: left - 5, y: at + 4, "text-anchor": "end", "font-size": 10, fill: css("--soft") });
    label.textContent = Number((part * highest).toPrecision(2));
    svg.append(label);
  }
  for (const n of [first, last]) {
    const anchor = n === last ? "end" : "start";
    const label = drawn("text", { x: x(n), y: height - 3, "text-anchor": anchor, "font-size": 10, fill: css("--soft") });
    label.textContent = n;
    svg.append(label);
  }
  if (bars) {
    const wide = Math.max(0.5, 1.6 * margin);
    run.curves.forEach((c) => {
      let under = 0;
      bars.forEach((name, i) => {
        const value = c.times[name] || 0;
        const tall = y(under) - y(under + value);
        svg.append(drawn("rect", { x: x(c.n) - wide / 2, y: y(under + value), width: wide, height: tall,
          fill: PHASE_COLOURS[i] }));
        under += value;
      });
    });
  }
  series.forEach(({ values: line }, i) => {
    const path = line.map((v, k) => (Number.isFinite(v) ? `${x(numbers[k])},${y(v)}` : null)).filter(Boolean).join(" ");
    svg.append(drawn("polyline", { points: path, fill: "none", stroke: colours[i] || css("--accent"),
      "stroke-width": 1.8, "vector-effect": "non-scaling-stroke" }));
  });
  points.forEach((p) => {
    const title = drawn("title");
    title.textContent = p.title;
    svg.append(drawn("circle", { cx: x(p.x), cy: y(p.y), r: 4, fill: p.hollow ? css("--card") : css("--up"),
      stroke: css("--up"), "stroke-width": 1.5 }, title));
  });
  if (shown) svg.append(drawn("line", { class: "now", x1: x(shown.n), x2: x(shown.n), y1: 4, y2: height - bottom,
    stroke: css("--accent"), "stroke-dasharray": "3 3" }));
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    choose(Math.round(first + ((at - left) / (width - left - 8)) * (last - first)));
  });
  return make("figure", {}, make("figcaption", {}, title), svg);
}

function drawCurves() {
  const of = (name, scale = 1) => run.curves.map((c) => (c[name] === undefined ? NaN : c[name] * scale));
  const last = Math.max(...run.evaluations.map((e) => e.step), 1);  // older runs do not say how long an iteration is
  const steps = run.optimizer_steps_per_iteration || last / (run.curves.length || 1);
  const points = run.evaluations.filter((e) => Number.isFinite(e.success_rate))
    .map((e) => ({ x: e.step / steps, y: e.success_rate * 100, hollow: e.name === "report",
      title: `${e.name || "eval"}, step ${e.step}: ${(e.success_rate * 100).toFixed(1)} %` }));
  const reported = points.some((p) => p.hollow) ? ", circles: reported panel" : "";
  const charts = [chart(`success of training (%), dots: held-out panel${reported}`,
    [{ values: of("success", 100) }], { top: 100, points })];
  if (run.curves.length) {
    charts.push(chart("turns of an episode", [{ values: of("turns") }]));
    charts.push(chart("valid replies (%)", [{ values: of("valid", 100) }], { top: 100 }));
    const bars = chart("seconds of an iteration, by phase", [], { bars: PHASES });
    const key = make("div", { class: "key" });
    PHASES.forEach((name, i) => key.append(make("i", { style: `background:${PHASE_COLOURS[i]}` }), name));
    bars.append(key);
    charts.push(bars);
  }
  $("curves").replaceChildren(...charts);
}

// -- choosing ---------------------------------------------------------------------------------------------------------

async function choose(number, groupNumber = 0) {
  const nearest = run.iterations.reduce((best, n) => (Math.abs(n - number) < Math.abs(best - number) ? n : best));
  $("iteration").value = run.iterations.indexOf(nearest);
  $("iteration-number").textContent = nearest;
  shown = await load(nearest);
  drawCurves();
  $("groups").replaceChildren(...shown.groups.map((one, g) => make("button", {
    type: "button", role: "option", title: `task ${one.task}`, onclick: () => showGroup(g) },
    `${g + 1}: ${one.success}/${one.trajectories.length}`)));
  $("case-list").replaceChildren(...shown.disagreements.map((one) => {
    const step = shown.groups[one.group].trajectories[one.trajectory].steps[one.step];
    const [, local, gain] = step.adv;
    return make("li", {}, make("button", { type: "button", onclick: () => showCase(one) }, step.a),
      ` in group ${one.group + 1}: A_NC ${signed(local)}, A_EC ${signed(gain)}`);
  }));
  if (!shown.disagreements.length) $("case-list").append(make("li", {}, "none in this iteration"));
  showGroup(Math.min(groupNumber, shown.groups.length - 1));
}

function showCase(one) {
  showGroup(one.group);
  const step = group.trajectories[one.trajectory].steps[one.step];
  network.selectNodes([step.node]);
  showTrajectory(one.trajectory, one.step);
  $("graph").scrollIntoView({ block: "nearest" });
}

// -- the graph --------------------------------------------------------------------------------------------------------

const ENDS = { success: "won", failure: "failed", truncated: "out of turns", lost: "lost with its worker" };

function mix(low, high, part) {
  const read = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const [a, b] = [read(low), read(high)];
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * Math.min(1, Math.max(0, part)))).join(",")})`;
}
const dark = () => document.documentElement.dataset.theme === "dark";
const valueColour = (part) => (dark() ? mix("#2a3442", "#35c48d", part) : mix("#eef1f5", "#15905f", part));
function advantageColour(x) {
  const part = Math.min(1, Math.abs(x) / 2);
  return mix(dark() ? "#56616f" : "#b9c0ca", x > 0 ? css("--up") : css("--down"), 0.25 + 0.75 * part);
}

function edgesOf(one) {
  const edges = new Map();
  one.trajectories.forEach((trajectory) => trajectory.steps.forEach((step, s) => {
    if (step.node < 0) return;
    const ends = s === trajectory.steps.length - 1;
    const to = ends ? trajectory.outcome : step.next;
    const key = `${step.node}>${to}`;
    if (!edges.has(key)) edges.set(key, { from: step.node, to, count: 0, advantage: 0, actions: new Map() });
    const edge = edges.get(key);
    edge.count += 1;
    edge.advantage += total(step);
    edge.actions.set(step.a, (edge.actions.get(step.a) || 0) + 1);
  }));
  edges.forEach((edge) => { edge.advantage /= edge.count; });
  return [...edges.values()];
}

// Columns by distance from where episodes begin; rows so that neighbours are near each other.
function places(one, edges) {
  const level = new Map();
  let front = [...new Set(one.trajectories.filter((t) => t.steps.length && t.steps[0].node >= 0)
    .map((t) => t.steps[0].node))];
  front.forEach((n) => level.set(n, 0));
  while (front.length) {
    const next = [];
    for (const edge of edges) {
      if (front.includes(edge.from) && typeof edge.to === "number" && !level.has(edge.to)) {
        level.set(edge.to, level.get(edge.from) + 1);
        next.push(edge.to);
      }
    }
    front = next;
  }
  const columns = [];
  for (const [node, at] of level) (columns[at] = columns[at] || []).push(node);
  const row = new Map();
  columns.forEach((column) => column.forEach((node, i) => row.set(node, i - (column.length - 1) / 2)));
  for (let sweep = 0; sweep < 4; sweep++) {
    for (const column of columns) {
      const wanted = new Map(column.map((node) => {
        const near = edges.filter((e) => e.from === node || e.to === node)
          .map((e) => row.get(e.from === node ? e.to : e.from)).filter((r) => r !== undefined);
        return [node, near.length ? near.reduce((a, b) => a + b, 0) / near.length : row.get(node)];
      }));
      column.sort((a, b) => wanted.get(a) - wanted.get(b));
      column.forEach((node, i) => row.set(node, i - (column.length - 1) / 2));
    }
  }
  // Wide enough for a label and as tall as the canvas is, so that fitting it shrinks nothing more than it must.
  const tallest = Math.max(2, ...columns.map((column) => column.length));
  const across = columns.length > 8 ? 80 : 105;
  const down = Math.max(64, Math.min(190, (columns.length * across * 0.62) / tallest));
  const at = new Map();
  for (const [node, l] of level) at.set(node, { x: l * across, y: row.get(node) * down + (l % 2 ? down / 4 : 0) });
  const ends = [...new Set(edges.map((e) => e.to).filter((to) => typeof to === "string"))];
  ends.forEach((end, i) => at.set(end, { x: columns.length * across, y: (i - (ends.length - 1) / 2) * 2 * down }));
  return at;
}

function showGroup(number) {
  group = shown.groups[number];
  [...$("groups").children].forEach((button, i) => button.setAttribute("aria-selected", i === number));
  const edges = edgesOf(group);
  const at = places(group, edges);
  const values = group.nodes.map((n) => n.v);
  const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 0];  // none: all errors
  const part = (v) => (high > low ? (v - low) / (high - low) : 0.5);
  const nodes = group.nodes.map((node, i) => ({
    id: i, ...at.get(i), label: node.v.toFixed(1), shape: "dot", size: 8 + 4 * Math.sqrt(node.visits),
    title: `V ${node.v.toFixed(2)}, ${node.visits} visits\n${shown.texts[node.o].slice(0, 500)}`,
    color: { background: valueColour(part(node.v)), border: css("--soft"),
      highlight: { background: valueColour(part(node.v)), border: css("--accent") } },
    font: { color: css("--text"), size: 15, strokeWidth: 4, strokeColor: css("--card") }, borderWidth: 1, borderWidthSelected: 4,
  })).filter((node) => at.has(node.id));
  for (const [id, place] of at) {
    if (typeof id !== "string") continue;
    const colour = id === "success" ? css("--good") : css("--bad");
    nodes.push({ id, ...place, label: ENDS[id] || id, shape: id === "success" ? "star" : "square", size: 18,
      color: { background: colour, border: colour, highlight: { background: colour, border: css("--accent") } },
      font: { color: css("--text"), size: 16, strokeWidth: 4, strokeColor: css("--card") } });
  }
  const lines = edges.filter((e) => at.has(e.from) && at.has(e.to)).map((edge, i) => ({
    id: i, from: edge.from, to: edge.to, arrows: { to: { enabled: true, scaleFactor: 0.5 } },
    width: 1 + 1.2 * Math.log2(edge.count + 1), color: { color: advantageColour(edge.advantage),
      highlight: css("--accent"), hover: css("--accent") },
    title: `advantage ${signed(edge.advantage)}, taken ${edge.count} times\n` +
      [...edge.actions].map(([action, count]) => `${count}× ${action}`).join("\n"),
    smooth: { type: "curvedCW", roundness: 0.12 }, selfReference: { size: 14, angle: 0.8 },
  }));
  if (network) network.destroy();
  network = new vis.Network($("graph"), { nodes, edges: lines }, {
    physics: false, layout: { randomSeed: 1 },
    interaction: { hover: true, tooltipDelay: 80, keyboard: false, navigationButtons: false },
  });
  network.on("click", ({ nodes: [node], edges: hit }) => {
    if (typeof node === "number") showNode(node);
    else if (node === undefined && hit.length) showEdge(edges[hit[0]]);
    else if (node === undefined) showOverview();
  });
  network.fit({ animation: false });
  $("legend").replaceChildren(
    make("span", {}, `value ${low.toFixed(1)}`,
      make("i", { style: `background:linear-gradient(90deg,${valueColour(0)},${valueColour(1)})` }), high.toFixed(1)),
    make("span", {}, "advantage of an edge: below", make("i", { style:
      `background:linear-gradient(90deg,${advantageColour(-2)},${advantageColour(0)},${advantageColour(2)})` }), "above"),
    make("span", {}, "size: visits; left to right: steps from the start"));
  showOverview();
}

// -- the panel --------------------------------------------------------------------------------------------------------

function fill(...children) {
  $("panel").replaceChildren(...children.filter((child) => child !== null));
}

const number = (x) => make("td", { class: x > 0.005 ? "plus" : x < -0.005 ? "minus" : null }, signed(x));
// What the step was trained with; a run that did not write it down gets the sum of its parts.
const total = (step) => step.trained ?? step.adv[0] + step.adv[1] + step.adv[2];
const totalName = () => (group.stored ? "trained" : "sum");

function steps(rows) {
  const heads = ["action", "A_EP", "A_NC", "A_EC", totalName(), "episode"].map((name) => make("th", {}, name));
  return make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {},
    ...rows.map(([step, t, s]) => make("tr", { onclick: () => showTrajectory(t, s) }, make("td", {}, step.a),
      ...step.adv.map(number), number(total(step)),
      make("td", { class: group.trajectories[t].outcome }, `${t + 1}, step ${s + 1}`)))));
}

function allSteps(wanted) {
  const rows = [];
  group.trajectories.forEach((trajectory, t) => trajectory.steps.forEach((step, s) => {
    if (wanted(step, trajectory, s)) rows.push([step, t, s]);
  }));
  return rows.sort((a, b) => total(b[0]) - total(a[0]));
}

function showOverview() {
  const estimator = run.settings.estimator_name || "g2po";
  const notes = [];
  if (!group.nodes.length) notes.push("No episode came to a result: there is no graph.");
  if (!group.stored && group.nodes.length) notes.push("This run did not store what its steps were trained with. " +
    "Advantages are computed now, with the settings in run.json.");
  if (!estimator.startsWith("g2po")) notes.push(`This run was trained with ${estimator}. A_EP, A_NC and A_EC are what ` +
    "G2PO computes on the same graph.");
  else if (!group.adds_up) notes.push("A_EP, A_NC and A_EC are computed now, and do not add up to what was trained.");
  fill(make("h2", {}, `Task ${group.task}`),
    make("p", {}, `${group.success} of ${group.trajectories.length} episodes won; ${group.nodes.length} states. ` +
      "Click a state or an edge, or read an episode:"),
    make("div", {}, ...group.trajectories.map((t, i) => make("button", { type: "button", class: t.outcome,
      style: "margin: 0 6px 6px 0", onclick: () => showTrajectory(i, 0) }, `${i + 1}: ${ENDS[t.outcome] || t.outcome}, ` +
      `${t.steps.length} steps`))),
    ...notes.map((note) => make("p", { class: "note" }, note)));
}

function showNode(node) {
  const one = group.nodes[node];
  const actions = one.actions === null ? "" : shown.texts[one.actions];
  fill(make("h2", {}, `State with value ${one.v.toFixed(2)}, ${one.visits} visits`),
    make("pre", {}, shown.texts[one.o]),
    actions ? make("details", {}, make("summary", {}, "admissible actions"), make("pre", {}, actions)) : null,
    make("h3", {}, "What was done here"), steps(allSteps((step) => step.node === node)));
  $("panel").scrollTop = 0;
}

function showEdge(edge) {
  const ends = (trajectory, s) => (s === trajectory.steps.length - 1 ? trajectory.outcome : trajectory.steps[s].next);
  fill(make("h2", {}, `Edge with advantage ${signed(edge.advantage)}, taken ${edge.count} times`),
    make("h3", {}, "from"), make("pre", {}, shown.texts[group.nodes[edge.from].o]), make("h3", {}, "to"),
    make("pre", {}, typeof edge.to === "number" ? shown.texts[group.nodes[edge.to].o] : ENDS[edge.to] || edge.to),
    steps(allSteps((step, trajectory, s) => step.node === edge.from && ends(trajectory, s) === edge.to)));
}

function showTrajectory(t, at) {
  const trajectory = group.trajectories[t];
  const text = (title, which) => (which === null || which === undefined ? null
    : make("details", {}, make("summary", {}, title), make("pre", {}, shown.texts[which])));
  const cards = trajectory.steps.map((step, s) => make("div", { class: s === at ? "step here" : "step" },
    make("div", { class: "adv" }, `${s + 1}. V ${step.node >= 0 ? group.nodes[step.node].v.toFixed(2) : "–"}`,
      step.ok ? "" : " ", step.ok ? null : make("span", { class: "tag" }, "invalid reply")),
    make("pre", {}, shown.texts[step.o]), make("div", { class: "act" }, `→ ${step.a}`),
    make("div", { class: "adv" }, `A_EP ${signed(step.adv[0])}  A_NC ${signed(step.adv[1])}  ` +
      `A_EC ${signed(step.adv[2])}  ${totalName()} ${signed(total(step))}`),
    text("reply", step.r), text("prompt", step.p)));
  const move = (way) => () => showTrajectory((t + way + group.trajectories.length) % group.trajectories.length, 0);
  fill(
    make("h2", {}, `Episode ${t + 1}: `, make("span", { class: trajectory.outcome },
      ENDS[trajectory.outcome] || trajectory.outcome), `, reward ${trajectory.reward}`),
    make("div", {}, make("button", { type: "button", onclick: move(-1) }, "‹ previous"), " ",
      make("button", { type: "button", onclick: move(1) }, "next ›"), " ",
      make("button", { type: "button", onclick: showOverview }, "group")),
    trajectory.error ? make("pre", { class: "error" }, trajectory.error) : null, ...cards,
    trajectory.final === null ? null : make("pre", {}, shown.texts[trajectory.final]));
  const here = trajectory.steps[at];
  if (here && here.node >= 0) network.selectNodes([here.node]);
  const card = $("panel").querySelector(".here");
  if (card && at > 0) card.scrollIntoView({ block: "nearest" });
  else $("panel").scrollTop = 0;
}

// -- start ------------------------------------------------------------------------------------------------------------

function theme(name) {
  document.documentElement.dataset.theme = name;
  if (!run) return;
  drawCurves();
  const [panel, selected] = [[...$("panel").childNodes], network.getSelectedNodes()];
  showGroup(shown.groups.indexOf(group));
  $("panel").replaceChildren(...panel);
  network.selectNodes(selected);
}

async function start() {
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const here = $("overview");
  run = here ? await unpack(here.textContent) : await (await fetch("overview")).json();
  document.title = `${run.name} – g2po-trl`;
  $("name").textContent = run.name;
  $("settings").replaceChildren(...Object.entries(run.settings).map(([name, value]) =>
    make("span", {}, `${name} ${value}`)));
  $("theme").addEventListener("click", () => theme(dark() ? "light" : "dark"));
  const slider = $("iteration");
  slider.max = run.iterations.length - 1;
  slider.addEventListener("input", () => { $("iteration-number").textContent = run.iterations[slider.value]; });
  slider.addEventListener("change", () => choose(run.iterations[slider.value]));
  await choose(run.iterations[run.iterations.length - 1]);
  document.body.dataset.ready = "yes";
}
start();
