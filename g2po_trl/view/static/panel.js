// -- the panel beside the graph: the group, a state, an edge, an episode -------------------------------------------------

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
const amountOf = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;
const ofEdge = (edge) => (edge.advantage === null ? "" : `advantage ${signed(edge.advantage)}, `) +
  `taken ${edge.count} time${edge.count === 1 ? "" : "s"}`;

const MEANINGS = { A_EP: "the episode's reward against the group's mean", A_NC: "the value of the next state against those of other actions from this state",
  A_EC: "the change of value against all steps of the group", trained: "what the step was trained with", sum: "A_EP + A_NC + A_EC" };
const meanOf = (values) => (values.some((x) => x === null) ? null : mean(values));

// Steps by action: how often, with which mean advantage, in how many episodes that won. A click shows the visits.
function steps(rows) {
  const actions = new Map();
  for (const row of rows) {
    const key = JSON.stringify([deed(row[0], shown.texts), row[0].ok, row[0].in]);
    actions.set(key, [...(actions.get(key) || []), row]);
  }
  const meanNumbers = (some) => heads().map((_, i) => meanOf(some.map(([step]) => numbers(step)[i])));
  const sorted = [...actions.values()].map((some) => [some, meanNumbers(some)])
    .sort(([, a], [, b]) => (b.at(-1) ?? 0) - (a.at(-1) ?? 0));
  const names = ["action", "times", ...heads(), "won"].map((name) => make("th", { title: MEANINGS[name] }, name));
  return make("table", { class: "actions" }, make("thead", {}, make("tr", {}, ...names)), make("tbody", {}, ...sorted.flatMap(([some, means]) => {
    const visits = some.map(([step, t, s]) => make("tr", { tabindex: 0, class: "visit", hidden: "", onclick: () => showTrajectory(t, s) },
      make("td", {}, `episode ${t + 1}, step ${s + 1}`), make("td", {}), ...numbers(step).map(number),
      make("td", { class: group.trajectories[t].outcome }, ENDS[group.trajectories[t].outcome] || group.trajectories[t].outcome)));
    const toggle = () => visits.forEach((row) => { row.hidden = !row.hidden; });
    const episodes = [...new Set(some.map(([, t]) => t))];
    const [first, t, s] = some[0];
    return [make("tr", { tabindex: 0, class: "action", title: some.length > 1 ? "show its visits" : "read the episode",
      onclick: some.length > 1 ? toggle : () => showTrajectory(t, s) },
      make("td", {}, first.a, ...faults(first)), make("td", {}, `${some.length}×`), ...means.map(number),
      make("td", {}, `${episodes.filter((e) => group.trajectories[e].outcome === "success").length}/${episodes.length}`)), ...visits];
  })));
}

function allSteps(wanted) {
  const rows = [];
  group.trajectories.forEach((trajectory, t) => trajectory.steps.forEach((step, s) => {
    if (wanted(step, trajectory, s)) rows.push([step, t, s]);
  }));
  return rows;
}

function showOverview() {
  mark(placeOf());
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
    make("p", {}, `${group.success} of ${group.trajectories.length} episodes won; ${group.nodes.length} states. ` +
      "Click a state or an edge, or read an episode:"),
    make("div", {}, ...group.trajectories.map((t, i) => make("button", { type: "button", class: t.outcome,
      style: "margin: 0 6px 6px 0", onclick: () => showTrajectory(i, 0) }, `${i + 1}: ${ENDS[t.outcome] || t.outcome}, ` +
      amountOf(t.steps.length, "step")))),
    ...notes.map((note) => make("p", { class: "note" }, note)),
    visited.length ? make("details", {}, make("summary", {}, "states, most visits first"), make("table", {},
      make("tbody", {}, ...visited.map(([node, i]) => make("tr", { tabindex: 0, onclick: () => showNode(i) },
        make("td", {}, make("b", {}, node.label), ` ${shown.texts[node.o].slice(0, 120)}`), make("td", {}, `V ${node.v.toFixed(2)}`),
        make("td", {}, `${node.visits}×`)))))) : null);
}

function showNode(node) {
  mark(placeOf({ state: node + 1 }));
  const one = group.nodes[node];
  const actions = one.actions === null ? "" : shown.texts[one.actions];
  fill(make("h2", {}, `State with value ${one.v.toFixed(2)}, ${one.visits} visits`),
    ...asked(one, shown.texts),
    actions ? make("details", {}, make("summary", {}, "admissible actions"), make("pre", {}, actions)) : null,
    make("h3", {}, "Actions taken here"), steps(allSteps((step) => step.node === node)));
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
  const place = placeOf({ episode: t + 1, step: at + 1 });
  mark(place);
  const trajectory = group.trajectories[t];
  const names = heads();
  const cards = trajectory.steps.map((step, s) => make("div", { class: s === at ? "step here" : "step" },
    make("div", { class: "adv" }, `${s + 1}. V ${step.node >= 0 ? group.nodes[step.node].v.toFixed(2) : "–"}`,
      ...faults(step)),
    ...asked(step, shown.texts), answered(step, shown.texts),
    hasAdvantages() ? make("div", { class: "adv" },
      numbers(step).map((x, i) => `${names[i]} ${shownNumber(x)}`).join("  ")) : null,
    completionOf(step, shown.texts), folded("prompt", shown.texts[step.p])));
  const move = (way) => () => showTrajectory((t + way + group.trajectories.length) % group.trajectories.length, 0);
  fill(
    make("h2", {}, `Episode ${t + 1}: `, make("span", { class: trajectory.outcome },
      ENDS[trajectory.outcome] || trajectory.outcome), `, reward ${trajectory.reward}`),
    make("div", {}, make("button", { type: "button", onclick: move(-1) }, "‹ previous"), " ",
      make("button", { type: "button", onclick: move(1) }, "next ›"), " ",
      make("button", { type: "button", onclick: showOverview }, "group"), " ", linkTo(place)),
    ...troubles(trajectory, shown.texts), ...cards,
    trajectory.final === null ? null : observed(shown.texts[trajectory.final]));
  const here = trajectory.steps[at];
  if (here && here.node >= 0) network.selectNodes([here.node]);
  const card = $("panel").querySelector(".here");
  if (card && at > 0) card.scrollIntoView({ block: "nearest" });
  else $("panel").scrollTop = 0;
}

