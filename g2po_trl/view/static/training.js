// -- choosing an iteration and a group --------------------------------------------------------------------------------

let shown, group, network;

// Without a group's number: the first in which some episodes won, since there actions are compared.
async function choose(number, wanted = null) {
  if (!run.iterations.length) return;
  const nearest = run.iterations.reduce((best, n) => (Math.abs(n - number) < Math.abs(best - number) ? n : best));
  $("iteration").value = run.iterations.indexOf(nearest);
  $("iteration-number").textContent = nearest;
  shown = await load("iteration", nearest);
  $("newest").hidden = shown.n === newest();
  $("newest").textContent = `newest: ${newest()}`;
  drawCurves();
  $("used").textContent = howTrained();
  // Of several groups whose sentences are the same, the ids say which task it is.
  const alike = shown.groups.length > 1 && new Set(shown.groups.map((one) => one.task)).size === 1;
  $("groups").replaceChildren(...shown.groups.map((one, g) => make("button", {
    type: "button", role: "option", title: `${taskName(one)} (${one.id})`, class: one.success ? "" : "lost",
    onclick: () => showGroup(g) },
    `${g + 1}: ${one.success}/${one.trajectories.length} `, one.task ? make("span", { class: "of" }, alike ? one.id : one.task) : null)));
  $("cases").hidden = shown.value_lambda === null;
  $("case-list").replaceChildren(...shown.disagreements.map((one) => {
    const step = shown.groups[one.group].trajectories[one.trajectory].steps[one.step];
    const [, local, gain] = step.adv;
    return make("li", {}, make("button", { type: "button", onclick: () => showCase(one) }, step.a),
      ` in group ${one.group + 1}: A_NC ${signed(local)}, A_EC ${signed(gain)}`);
  }));
  if (!shown.disagreements.length) $("case-list").append(make("li", {}, run.log ? "none in this log" : "none in this iteration"));
  const chosen = wanted ?? Math.max(0, shown.groups.findIndex((one) => one.success && one.success < one.trajectories.length));
  if (shown.groups.length) return showGroup(Math.max(0, Math.min(chosen, shown.groups.length - 1)));
  group = null;
  if (network) network.destroy();
  network = null;
  $("legend").replaceChildren();
  fill(make("p", { class: "note" }, "No episode of this iteration is written to its end yet."));
}

const estimator = () => run.settings.estimator_name || "g2po";

// What the advantages of this iteration are, and the λ of its values.
function howTrained() {
  if (run.log) return `Credited with ${estimator()}, after the fact: these runs trained nothing.` +
    (shown.value_lambda === null ? " Values of states are mean discounted returns." : "");
  if (shown.value_lambda === null) return `Trained with ${estimator()}. Values of states are mean discounted returns.`;
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

// A label in lines of a few letters, since states stand beside each other; "drawer 1" is not broken.
const wrapped = (label) => label.replace(/ (\d)/g, "\u00a0$1").match(/[^ ].{0,11}[^ ](?= |$)|[^ ]+/g) || [];

const groupNumber = () => shown.groups.indexOf(group) + 1;
const placeOf = (more = {}) => ({ iteration: run.log ? 1 : shown.n, group: groupNumber(), ...more });

function showGroup(number) {
  drawGroup(number);
  showOverview();
}

function drawGroup(number) {
  group = shown.groups[number];
  [...$("groups").children].forEach((button, i) => button.setAttribute("aria-selected", i === number));
  const edges = edgesOf(group);
  const at = places(group, edges);
  const [low, high] = valueScale(shown);
  const won = wonThrough(group);
  const stateColour = (node, i) => valueColour(high > low ? (node.v - low) / (high - low) : 0, won.has(i));
  const nodes = group.nodes.map((node, i) => ({
    id: i, ...at.get(i), label: [...(gridOf(shown.texts[node.o]) ? [] : wrapped(node.label)), node.v.toFixed(1)].join("\n"),
    shape: "dot", size: 8 + 4 * Math.sqrt(node.visits), ...boardNode(shown.texts[node.o], 8 + 4 * Math.sqrt(node.visits)),
    title: `V ${node.v.toFixed(2)}, ${node.visits} visits\n` +
      `${shown.texts[node.o].slice(0, 500)}`,
    color: { background: stateColour(node, i), border: css("--soft"),
      highlight: { background: stateColour(node, i), border: css("--accent") } },
    font: { color: css("--text"), size: 13, strokeWidth: 4, strokeColor: css("--card") }, borderWidth: 1, borderWidthSelected: 4,
  })).filter((node) => at.has(node.id));
  for (const [id, place] of at) {
    if (typeof id !== "string") continue;
    const colour = id === "success" ? css("--good") : css("--bad");
    nodes.push({ id, ...place, label: ENDS[id] || id, shape: id === "success" ? "star" : "square", size: 18,
      color: { background: colour, border: colour, highlight: { background: colour, border: css("--accent") } },
      font: { color: css("--text"), size: 16, strokeWidth: 4, strokeColor: css("--card") } });
  }
  const placed = edges.filter((e) => at.has(e.from) && at.has(e.to));
  const lines = placed.map((edge, i) => ({
    id: i, from: edge.from, to: edge.to, arrows: { to: { enabled: true, scaleFactor: 0.5 } },
    width: 1 + 1.2 * Math.log2(edge.count + 1), color: { color: advantageColour(edge.advantage),
      highlight: css("--accent"), hover: css("--accent") },
    title: `${ofEdge(edge)}\n` +
      [...edge.actions].map(([action, { count, fault }]) => `${count}× ${action}${fault ? ` (${fault})` : ""}`).join("\n"),
    ...(edge.faults ? { label: "✗", font: { color: css("--bad"), size: 15, strokeWidth: 3, strokeColor: css("--card") } } : {}),
    smooth: { type: "curvedCW", roundness: 0.12 }, selfReference: { size: 14, angle: 0.8 },
  }));
  if (network) network.destroy();
  network = new vis.Network($("graph"), { nodes, edges: lines }, {
    physics: false, layout: { randomSeed: 1 },
    interaction: { hover: true, tooltipDelay: 80, keyboard: false, navigationButtons: false },
  });
  network.on("click", ({ nodes: [node], edges: hit }) => {
    if (typeof node === "number") showNode(node);
    else if (node === undefined && hit.length) showEdge(placed[hit[0]]);
    else if (node === undefined) showOverview();
  });
  network.fit({ animation: false });
  $("legend").replaceChildren(
    ...[["an episode through it won: value", true], ["none won: value", false]].map(([what, is]) => make("span", {}, `${what} ${short(low)}`,
      make("i", { style: `background:linear-gradient(90deg,${valueColour(0, is)},${valueColour(1, is)})` }), short(high))),
    hasAdvantages() ? make("span", {}, "advantage of an edge: below", make("i", { style:
      `background:linear-gradient(90deg,${advantageColour(-2)},${advantageColour(0)},${advantageColour(2)})` }), "above") : "",
    edges.some((edge) => edge.faults) ? make("span", {}, make("b", { class: "minus-mark" }, "✗"), " with actions that are not admissible") : "",
    make("span", {}, "size: visits; left to right: steps from the start"));
}
