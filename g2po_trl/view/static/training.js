// -- choosing an iteration and a group --------------------------------------------------------------------------------

let shown, group, network;

async function choose(number, groupNumber = 0) {
  const nearest = run.iterations.reduce((best, n) => (Math.abs(n - number) < Math.abs(best - number) ? n : best));
  $("iteration").value = run.iterations.indexOf(nearest);
  $("iteration-number").textContent = nearest;
  shown = await load("iteration", nearest);
  drawCurves();
  $("used").textContent = howTrained();
  $("groups").replaceChildren(...shown.groups.map((one, g) => make("button", {
    type: "button", role: "option", title: `${taskName(one)} (${one.id})`, onclick: () => showGroup(g) },
    `${g + 1}: ${one.success}/${one.whole} `, one.task ? make("span", { class: "of" }, one.task) : null)));
  $("cases").hidden = shown.value_lambda === null;
  $("case-list").replaceChildren(...shown.disagreements.map((one) => {
    const step = shown.groups[one.group].trajectories[one.trajectory].steps[one.step];
    const [, local, gain] = step.adv;
    return make("li", {}, make("button", { type: "button", onclick: () => showCase(one) }, step.a),
      ` in group ${one.group + 1}: A_NC ${signed(local)}, A_EC ${signed(gain)}`);
  }));
  if (!shown.disagreements.length) $("case-list").append(make("li", {}, run.log ? "none in this log" : "none in this iteration"));
  showGroup(Math.min(groupNumber, shown.groups.length - 1));
}

const estimator = () => run.settings.estimator_name || "g2po";

// What the advantages of this iteration are, and the λ of its values.
function howTrained() {
  if (run.log) return `Credited with ${estimator()}, after the fact: these runs trained nothing.` +
    (shown.value_lambda === null ? " Colours of states are mean discounted returns." : "");
  if (shown.value_lambda === null) return `Trained with ${estimator()}. Colours of states are mean discounted returns.`;
  const certain = shown.groups.every((one) => one.adds_up !== false);
  const how = certain ? "" : ", which does not give the advantages that were trained";
  return `Trained with ${estimator()}, λ ${shown.value_lambda}${how}.`;
}

function showCase(one) {
  showGroup(one.group);
  const step = group.trajectories[one.trajectory].steps[one.step];
  network.selectNodes([step.node]);
  showTrajectory(one.trajectory, one.step);
  $("graph").scrollIntoView({ block: "nearest" });
}

function showGroup(number) {
  group = shown.groups[number];
  [...$("groups").children].forEach((button, i) => button.setAttribute("aria-selected", i === number));
  const edges = edgesOf(group);
  const at = places(group, edges);
  const values = group.nodes.map((n) => n.v);
  const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [0, 0];  // none: all errors
  const part = (v) => (high > low ? (v - low) / (high - low) : 0.5);
  const begun = branchPoints(group);
  const nodes = group.nodes.map((node, i) => ({
    id: i, ...at.get(i), label: node.v.toFixed(1), shape: "dot", size: 8 + 4 * Math.sqrt(node.visits),
    ...boardNode(shown.texts[node.o], 8 + 4 * Math.sqrt(node.visits)),
    title: `V ${node.v.toFixed(2)}, ${node.visits} visits` + (begun.has(i) ? `, ${amountOf(begun.get(i), "branch")} from here` : "") +
      `\n${shown.texts[node.o].slice(0, 500)}`,
    color: { background: valueColour(part(node.v)), border: begun.has(i) ? css("--accent") : css("--soft"),
      highlight: { background: valueColour(part(node.v)), border: css("--accent") } },
    font: { color: css("--text"), size: 15, strokeWidth: 4, strokeColor: css("--card") }, borderWidth: begun.has(i) ? 3 : 1, borderWidthSelected: 4,
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
    title: `${ofEdge(edge)}\n` +
      [...edge.actions].map(([action, count]) => `${count}× ${action}`).join("\n"),
    dashes: edge.whole ? false : [6, 5], smooth: { type: "curvedCW", roundness: 0.12 }, selfReference: { size: 14, angle: 0.8 },
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
    hasAdvantages() ? make("span", {}, "advantage of an edge: below", make("i", { style:
      `background:linear-gradient(90deg,${advantageColour(-2)},${advantageColour(0)},${advantageColour(2)})` }), "above") : "",
    begun.size ? make("span", {}, "blue border: branches begin here; dashed: taken by branches alone") : "",
    make("span", {}, "size: visits; left to right: steps from the start"));
  showOverview();
}

// -- the panel --------------------------------------------------------------------------------------------------------

function fill(...children) {
  $("panel").replaceChildren(...children.filter((child) => child !== null));
}

const shownNumber = (x) => (x === null ? "–" : signed(x));
const number = (x) => make("td", { class: x > 0.005 ? "plus" : x < -0.005 ? "minus" : null }, shownNumber(x));
// What the step was trained with; G2PO's of a run that did not write it down is the sum of its parts.
const total = (step) => step.trained ?? (step.adv && !group.stored && !run.log ? step.adv[0] + step.adv[1] + step.adv[2] : null);
const hasParts = () => shown.value_lambda !== null;
const hasAdvantages = () => group.stored || (hasParts() && !run.log);
// The tasks of a log that have nothing to compare have no numbers.
const heads = () => (run.log && !group.stored ? [] : [...(hasParts() ? ["A_EP", "A_NC", "A_EC"] : []),
  !hasParts() ? `A of ${estimator()}` : run.log ? "advantage" : group.stored ? "trained" : "sum"]);
const numbers = (step) => (run.log && !group.stored ? [] : [...(step.adv || []), total(step)]);
const amountOf = (n, what) => `${n} ${what}${n === 1 ? "" : what.endsWith("ch") ? "es" : "s"}`;
const isBranch = (trajectory) => trajectory.parent !== undefined;
// A step's number in the game: a branch goes on where its parent was.
const turnOf = (t, s) => s + 1 + (group.trajectories[t].start || 0);
const branchOrigin = (trajectory) => `branch of episode ${trajectory.parent + 1} from step ${trajectory.start + 1}`;
const ofEdge = (edge) => (edge.advantage === null ? "" : `advantage ${signed(edge.advantage)}, `) +
  `taken ${edge.count} time${edge.count === 1 ? "" : "s"}`;

function steps(rows) {
  const names = ["action", ...heads(), "episode"].map((name) => make("th", {}, name));
  return make("table", {}, make("thead", {}, make("tr", {}, ...names)), make("tbody", {},
    ...rows.map(([step, t, s]) => make("tr", { tabindex: 0, onclick: () => showTrajectory(t, s) },
      make("td", {}, step.a, ...faults(step)), ...numbers(step).map(number),
      make("td", { class: group.trajectories[t].outcome }, `${t + 1}, step ${turnOf(t, s)}`)))));
}

function allSteps(wanted) {
  const rows = [];
  group.trajectories.forEach((trajectory, t) => trajectory.steps.forEach((step, s) => {
    if (wanted(step, trajectory, s)) rows.push([step, t, s]);
  }));
  return rows.sort((a, b) => total(b[0]) - total(a[0]));
}

function showOverview() {
  const notes = [];
  if (shown.unfinished) notes.push(`${amountOf(shown.unfinished, "line")} of this ${run.log ? "log" : "iteration"} not written to the end: left out.`);
  if (!group.nodes.length) notes.push("No episode came to a result: there is no graph.");
  if (run.log && !group.stored) notes.push("This task has no two episodes with a result: nothing is compared.");
  else if (!group.stored && group.nodes.length) notes.push("This run did not store what its steps were trained with. " +
    (hasParts() ? "Advantages are computed now, with the settings in run.json." : "There are no advantages to show."));
  if (group.adds_up === false) notes.push("A_EP, A_NC and A_EC are computed now, and do not add up to what was trained.");
  const visited = group.nodes.map((node, i) => [node, i]).filter(([node]) => node.visits)
    .sort((a, b) => b[0].visits - a[0].visits);
  fill(make("h2", {}, taskName(group)), group.task ? make("p", { class: "note" }, `Task ${group.id}`) : null,
    make("p", {}, `${group.success} of ${group.whole} episodes won` + wonByBranches() + `; ${group.nodes.length} states. ` +
      "Click a state or an edge, or read an episode:"),
    make("div", {}, ...group.trajectories.map((t, i) => make("button", { type: "button", class: t.outcome,
      style: "margin: 0 6px 6px 0", onclick: () => showTrajectory(i, 0) }, `${i + 1}: ${ENDS[t.outcome] || t.outcome}, ` +
      amountOf(t.steps.length, "step") + (isBranch(t) ? `, ${branchOrigin(t)}` : "")))),
    ...notes.map((note) => make("p", { class: "note" }, note)),
    visited.length ? make("details", {}, make("summary", {}, "states, most visits first"), make("table", {},
      make("tbody", {}, ...visited.map(([node, i]) => make("tr", { tabindex: 0, onclick: () => showNode(i) },
        make("td", {}, shown.texts[node.o].slice(0, 120)), make("td", {}, `V ${node.v.toFixed(2)}`),
        make("td", {}, `${node.visits}×`)))))) : null);
}

function wonByBranches() {
  const branches = group.trajectories.filter(isBranch);
  if (!branches.length) return "";
  return `, and ${branches.filter((t) => t.outcome === "success").length} of ${amountOf(branches.length, "branch")}`;
}

function showNode(node) {
  const one = group.nodes[node];
  const actions = one.actions === null ? "" : shown.texts[one.actions];
  fill(make("h2", {}, `State with value ${one.v.toFixed(2)}, ${one.visits} visits`),
    ...asked(one, shown.texts),
    actions ? make("details", {}, make("summary", {}, "admissible actions"), make("pre", {}, actions)) : null,
    make("h3", {}, "What was done here"), steps(allSteps((step) => step.node === node)));
  $("panel").scrollTop = 0;
}

function showEdge(edge) {
  const ends = (trajectory, s) => (s === trajectory.steps.length - 1 ? trajectory.outcome : trajectory.steps[s].next);
  fill(make("h2", {}, `Edge: ${ofEdge(edge)}`),
    make("h3", {}, "from"), ...asked(group.nodes[edge.from], shown.texts), make("h3", {}, "to"),
    ...(typeof edge.to === "number" ? asked(group.nodes[edge.to], shown.texts) : [make("pre", {}, ENDS[edge.to] || edge.to)]),
    steps(allSteps((step, trajectory, s) => step.node === edge.from && ends(trajectory, s) === edge.to)));
}

function showTrajectory(t, at) {
  const trajectory = group.trajectories[t];
  const names = heads();
  const cards = trajectory.steps.map((step, s) => make("div", { class: s === at ? "step here" : "step" },
    make("div", { class: "adv" }, `${turnOf(t, s)}. V ${step.node >= 0 ? group.nodes[step.node].v.toFixed(2) : "–"}`,
      ...faults(step)),
    ...asked(step, shown.texts), answered(step, shown.texts),
    hasAdvantages() ? make("div", { class: "adv" },
      numbers(step).map((x, i) => `${names[i]} ${shownNumber(x)}`).join("  ")) : null,
    folded("completion", shown.texts[step.r]), folded("prompt", shown.texts[step.p])));
  const move = (way) => () => showTrajectory((t + way + group.trajectories.length) % group.trajectories.length, 0);
  fill(
    make("h2", {}, `Episode ${t + 1}: `, make("span", { class: trajectory.outcome },
      ENDS[trajectory.outcome] || trajectory.outcome), `, reward ${trajectory.reward}`),
    make("div", {}, make("button", { type: "button", onclick: move(-1) }, "‹ previous"), " ",
      make("button", { type: "button", onclick: move(1) }, "next ›"), " ",
      make("button", { type: "button", onclick: showOverview }, "group")),
    isBranch(trajectory) ? make("p", { class: "note" }, "This is a ",
      make("button", { type: "button", onclick: () => showTrajectory(trajectory.parent, trajectory.start) }, branchOrigin(trajectory)),
      ". The steps before were played again as they were, and are no visits of its own. It is compared with no whole episode: it has no A_EP.") : null,
    ...troubles(trajectory, shown.texts), ...cards,
    trajectory.final === null ? null : observed(shown.texts[trajectory.final]));
  const here = trajectory.steps[at];
  if (here && here.node >= 0) network.selectNodes([here.node]);
  const card = $("panel").querySelector(".here");
  if (card && at > 0) card.scrollIntoView({ block: "nearest" });
  else $("panel").scrollTop = 0;
}

