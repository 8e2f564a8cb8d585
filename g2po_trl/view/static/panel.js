// -- the panel beside the graph: the group, a state, an edge, an episode -------------------------------------------------

function fill(...children) {
  $("panel").replaceChildren(...children.filter((child) => child !== null));
}
const say = (text) => { $("said").textContent = text; };  // to a screen reader
const backToGroup = () => make("button", { type: "button", onclick: showOverview }, "group");

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

const MEANINGS = { V: "the value of the state: the mean discounted reward of what followed its visits", A_EP: "the episode's reward compared with the group's", A_NC: "the value of the next state compared with those of other actions from this state",
  A_EC: "the change in value compared with all steps of the group", trained: "what the step was trained with", sum: "A_EP + A_NC + A_EC" };
const explained = (name, text = name) => make("span", { class: "means", title: MEANINGS[name] || "the advantage of the step" }, text);
const times = (n) => (n === 1 ? "once" : n === 2 ? "twice" : `${n} times`);

// How often a state was visited, the action there with a better mean advantage, and whether that is enough to go by.
function comparison(step) {
  if (step.node < 0) return null;
  const { visits } = group.nodes[step.node], actions = new Map();
  if (visits < 2) return make("p", { class: "note compared doubt" }, "This state was visited once: there is no other action to compare with.");
  for (const [other] of allSteps((one) => one.node === step.node)) {
    const key = deed(other, shown.texts);
    actions.set(key, [...(actions.get(key) || []), other]);
  }
  const gain = (some) => meanOf(some.map(total)) ?? -Infinity;
  const mine = actions.get(deed(step, shown.texts)), [best] = [...actions.values()].sort((a, b) => gain(b) - gain(a));
  const is = gain(best) > gain(mine) + 0.005;
  return make("p", { class: "note compared" }, `State visited ${times(visits)}. `,
    is ? `${best.length} other${best.length > 1 ? "s" : ""} left by “${oneLine(best[0].a, 60)}”, ` : "", is ? explained("trained", signed(gain(best))) : "",
    is ? ` against ${signed(gain(mine))}. ` : "", visits < 3 || (is && best.length < 2) ? make("span", { class: "doubt" }, "Few visits: this is uncertain.") : "");
}
const meanOf = (values) => (values.some((x) => x === null) ? null : mean(values));

// Steps by action: how often, with which mean advantage, in how many successful episodes. A click shows the visits.
function steps(rows) {
  const actions = new Map();
  for (const row of rows) {
    const key = JSON.stringify([deed(row[0], shown.texts), row[0].ok, row[0].in]);
    actions.set(key, [...(actions.get(key) || []), row]);
  }
  const meanNumbers = (some) => heads().map((_, i) => meanOf(some.map(([step]) => numbers(step)[i])));
  const sorted = [...actions.values()].map((some) => [some, meanNumbers(some)])
    .sort(([, a], [, b]) => (b.at(-1) ?? 0) - (a.at(-1) ?? 0));
  const names = ["action", "times", ...heads(), "solved"].map((name) => make("th", { title: MEANINGS[name] }, name));
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

// Why a group has no learning signal, and the marks of an episode.
const NOTHING = { solved: "all episodes solved, and in the same way", failed: "all episodes failed", equal: "all episodes have the same reward",
  one: "one episode has a result, and there is none to compare it with", errors: "no episode has a result: environment errors" };
const CUT_OFF = "The turn limit ended the episode here. Such an end has the value 0 regardless of the last action, so the advantage of this step is low even if its action was right.";
const isCutOff = (trajectory, s) => trajectory.outcome === "truncated" && s === trajectory.steps.length - 1;
function turnWords(turn, { steps: taken }) {
  const { node, next } = taken[turn.step];
  const fewest = Math.min(...[node, next].flatMap((one) => group.nodes[one]?.visits ?? []));
  const falls = () => `V ${turn.from.toFixed(1)} → ${turn.to.toFixed(1)}${fewest < 3 ? `, only ${amountOf(fewest, "visit")}` : ""}`;
  if (turn.why === "limit") return `the turn limit (${falls()})`;
  const why = { fall: falls, fault: () => faultOf(taken[turn.step]),
    return: () => "leads back to an earlier state" }[turn.why]();
  return `step ${turn.step + 1}: ${oneLine(taken[turn.step].a, 60)} (${why})`;
}
// Buttons to the turning point of an episode, and to the largest fall before the turn limit.
const turnButtons = (t) => group.trajectories[t].turns.map((turn) => make("button", { type: "button", class: "turn",
  title: "where the episode lost most value", onclick: () => showTrajectory(t, turn.step) }, turnWords(turn, group.trajectories[t])));

// The command that prints an episode in a terminal, to be copied.
function playCommand(episode = 1) {
  if (run.log) return null;
  const command = `g2po view ${run.folder} --text --episode ${groupNumber()}.${episode} --iterations ${shown.n}`;
  const button = make("button", { type: "button", onclick: () => Promise.resolve(navigator.clipboard)
    .then((board) => board.writeText(command)).then(() => { button.textContent = "copied"; }, () => getSelection().selectAllChildren(button.nextSibling)) }, "copy");
  return make("p", { class: "command" }, button, make("code", {}, command));
}

// Other groups of this task: where it was solved.
function elsewhere() {
  if (!index || run.log) return [];
  const others = index.iterations.flatMap(({ n, groups }) => groups.map((one, g) => ({ n, g, one })))
    .filter(({ n, g, one }) => index.tasks[one.task].id === group.id && !(n === shown.n && g === groupNumber() - 1));
  if (!others.length) return [`The task is in no other group of ${amountOf(index.iterations.length, "iteration")}.`];
  return [`This task in other groups (iteration: solved episodes): `, ...others.slice(-24).flatMap(({ n, g, one }) => [make("button", { type: "button",
    class: winsOf(one) ? "success" : "", title: `iteration ${n}, group ${g + 1}`, onclick: () => openGroup(n, g) },
    `${n}: ${winsOf(one)}/${one.episodes.length}`), " "])];
}

function showOverview() {
  mark(placeOf());
  outline({});
  const notes = [];
  if (shown.unfinished) notes.push(`${amountOf(shown.unfinished, "line")} of this ${run.log ? "log" : "iteration"} not complete, and left out.`);
  if (!group.nodes.length) notes.push(`No episode ${group.nothing === "errors" ? "came to a result" : "took a step"}: there is no graph.`);
  if (run.log && !group.stored) notes.push("This task has no two episodes with a result: nothing is compared.");
  else if (!group.stored && group.nodes.length) notes.push("This run did not store what its steps were trained with. " +
    (hasParts() ? "Advantages are computed now, with the settings in run.json." : "There are no advantages to show."));
  if (group.adds_up === false) notes.push("A_EP, A_NC and A_EC are computed now, and do not add up to what was trained.");
  const visited = group.nodes.map((node, i) => [node, i]).filter(([node]) => node.visits).sort((a, b) => b[0].visits - a[0].visits);
  const about = [group.task || group.row !== null ? `Task ${group.id}` : "", group.environment || ""].filter(Boolean).join(", ");
  fill(make("h2", {}, groupName(group)), about ? make("p", { class: "note" }, about) : null,
    make("p", {}, `${group.success} of ${group.trajectories.length} episodes solved; ${amountOf(group.nodes.length, "state")}.`),
    group.nothing && !run.log ? make("p", { class: "nothing" }, make("b", {}, "No learning signal: "), `${NOTHING[group.nothing]}.`) : null,
    ...notes.map((note) => make("p", { class: "note" }, note)),
    group.trajectories.some((t) => t.turns.length && t.outcome !== "success") ? make("p", { class: "note fact" },
      "Next to a failed episode is its turning point: the step at which the value V of its states falls most, or else the first fault.") : null,
    make("ol", { class: "episodes" }, ...group.trajectories.map((t, i) => make("li", {}, make("button", { type: "button", class: t.outcome,
      onclick: () => showTrajectory(i, 0) }, `${i + 1}: ${ENDS[t.outcome] || t.outcome}, ${amountOf(t.steps.length, "step")}`),
      make("span", {}, ...(t.outcome === "success" ? [] : turnButtons(i)))))),
    folded("row", group.row === null ? null : shown.texts[group.row]), playCommand(), make("p", { id: "elsewhere" }, ...elsewhere()),
    visited.length ? make("details", {}, make("summary", {}, "states, most visits first"), make("ul", { class: "states" },
      ...visited.map(([node, i]) => make("li", {}, make("button", { type: "button", onclick: () => showNode(i) },
        make("b", {}, node.label), ` V ${node.v.toFixed(2)}, ${node.visits}× `, make("span", { class: "note" }, oneLine(shown.texts[node.o], 90)))))) ) : null);
  $("panel").scrollTop = 0;
}

// What two keys do not share: their beginnings and ends are left out.
function differing(mine, other) {
  let start = 0, end = 0;
  while (start < Math.min(mine.length, other.length) && mine[start] === other[start]) start += 1;
  while (end < Math.min(mine.length, other.length) - start && mine[mine.length - 1 - end] === other[other.length - 1 - end]) end += 1;
  const part = (text) => `${start ? "…" : ""}${text.slice(start, text.length - end) || "(nothing)"}${end ? "…" : ""}`;
  return [part(mine), part(other)];
}

// The state's key, the states that read the same and how their keys differ, and what else was seen under this key.
function identity(node) {
  const one = group.nodes[node], key = (other) => shown.texts[other.key ?? other.o];
  const alike = group.nodes.map((other, i) => [other, i]).filter(([other, i]) => i !== node && other.o === one.o);
  const seen = [...new Set(allSteps((step) => step.node === node).map(([step]) => step.o))].filter((o) => o !== one.o);
  return [one.key === null ? null : make("details", { open: "" }, make("summary", {}, "state key"), make("pre", {}, shown.texts[one.key])),
    ...alike.map(([other, i]) => {
      const [mine, theirs] = differing(key(one), key(other));
      return make("p", { class: "alike" }, make("button", { type: "button", onclick: () => showNode(i) }, `state ${i + 1}: ${other.label}`),
        " reads the same. In the keys, here ", make("code", {}, oneLine(mine)), ", there ", make("code", {}, oneLine(theirs)));
    }),
    seen.length ? make("details", {}, make("summary", {}, `${amountOf(seen.length, "other observation")} under this key`),
      ...seen.slice(0, 20).map((o) => observed(shown.texts[o]))) : null].filter(Boolean);
}

function showNode(node) {
  mark(placeOf({ state: node + 1 }));
  outline({ nodes: [node] });
  const one = group.nodes[node];
  const actions = one.actions === null ? "" : shown.texts[one.actions];
  const title = `State with value ${one.v.toFixed(2)}, ${amountOf(one.visits, "visit")}`;
  say(title);
  fill(make("h2", {}, "State with ", explained("V", "value"), ` ${one.v.toFixed(2)}, ${amountOf(one.visits, "visit")}`), backToGroup(),
    one.visits < 3 ? make("p", { class: "note compared doubt" }, `The value rests on ${amountOf(one.visits, "visit")}: it is uncertain.`) : null,
    ...asked(one, shown.texts), ...identity(node),
    actions ? make("details", {}, make("summary", {}, "admissible actions"), make("pre", {}, actions)) : null,
    make("h3", {}, "Actions taken here"), steps(allSteps((step) => step.node === node)));
  $("panel").scrollTop = 0;
}

function showEdge(edge) {
  outline({ edges: [edge.key] });
  say(`Edge: ${ofEdge(edge)}`);
  fill(make("h2", {}, `Edge: ${ofEdge(edge)}`), backToGroup(),
    make("h3", {}, "from"), ...asked(group.nodes[edge.from], shown.texts), make("h3", {}, "to"),
    ...(typeof edge.to === "number" ? asked(group.nodes[edge.to], shown.texts) : [make("pre", {}, ENDS[edge.to] || edge.to)]),
    steps(allSteps((step, trajectory, s) => step.node >= 0 && edgeKey(trajectory, s) === edge.key)));
  $("panel").scrollTop = 0;
}

function showTrajectory(t, at) {
  const place = placeOf({ episode: t + 1, step: at + 1 });
  mark(place);
  const trajectory = group.trajectories[t], turn = trajectory.turns[0];
  const names = heads();
  const cards = trajectory.steps.map((step, s) => make("div", { class: s === at ? "step here" : "step" },
    make("div", { class: "adv" }, `${s + 1}. `, explained("V"), ` ${step.node >= 0 ? group.nodes[step.node].v.toFixed(2) : "–"}`, ...faults(step),
      ...trajectory.turns.flatMap((one, i) => (one.step === s ? [" ", make("span", { class: "tag turn" },
        i ? "largest fall before the turn limit" : "turning point")] : [])),
      ...(isCutOff(trajectory, s) ? [" ", make("span", { class: "tag" }, "turn limit")] : [])),
    ...asked(step, shown.texts), answered(step, shown.texts),
    hasAdvantages() ? make("div", { class: "adv" },
      ...numbers(step).flatMap((x, i) => [explained(names[i]), ` ${shownNumber(x)}  `])) : null,
    hasAdvantages() ? comparison(step) : null,
    isCutOff(trajectory, s) && hasAdvantages() ? make("p", { class: "note fact" }, CUT_OFF) : null,
    completionOf(step, shown.texts), folded("prompt", shown.texts[step.p])));
  const move = (way) => () => showTrajectory((t + way + group.trajectories.length) % group.trajectories.length, 0);
  const ended = ENDS[trajectory.outcome] || trajectory.outcome;
  fill(
    make("h2", {}, `Episode ${t + 1}: `, make("span", { class: trajectory.outcome }, ended), `, reward ${trajectory.reward}`),
    make("div", {}, make("button", { type: "button", onclick: move(-1) }, "‹ previous"), " ",
      make("button", { type: "button", onclick: move(1) }, "next ›"), " ", backToGroup(), " ", linkTo(place)),
    turn ? make("p", {}, "Turning point: ", ...turnButtons(t)) : null,
    playCommand(t + 1), ...troubles(trajectory, shown.texts), ...cards,
    trajectory.final === null ? null : observed(shown.texts[trajectory.final]));
  const here = trajectory.steps[at];
  outline({ episode: trajectory, nodes: here && here.node >= 0 ? [here.node] : [] });
  say(`Episode ${t + 1}: ${ended}${here ? `, step ${at + 1}: ${here.a}` : ""}`);
  const card = $("panel").querySelector(".here");
  $("panel").scrollTop = card && at > 0 ? card.offsetTop - 8 : 0;
}
