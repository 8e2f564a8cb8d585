// -- choosing an iteration and a group --------------------------------------------------------------------------------

let shown, group, index = null;

// Without a group's number: the first in which some episodes succeeded, since there actions are compared.
async function choose(number, wanted = null) {
  if (!run.iterations.length) return;
  const nearest = run.iterations.reduce((best, n) => (Math.abs(n - number) < Math.abs(best - number) ? n : best));
  $("iteration").value = run.iterations.indexOf(nearest);
  $("iteration-number").textContent = nearest;
  shown = await load("iteration", nearest);
  $("newest").hidden = shown.n === newest();
  $("newest").textContent = `newest: ${newest()}`;
  drawCurves();
  $("used").replaceChildren(shown.verdict ? make("b", {}, `${shown.verdict} `) : "", `${resultOf(nearest)}${howTrained()}`);
  // Of several groups whose names are the same, the ids say which task it is.
  const alike = shown.groups.length > 1 && new Set(shown.groups.map(groupName)).size === 1;
  $("groups").replaceChildren(...shown.groups.map((one, g) => {
    const name = groupName(one);
    const says = one.nothing ? `no learning signal: ${NOTHING[one.nothing]}` : "";
    return make("button", { type: "button", title: [name, one.id, says].filter(Boolean).join("\n"), class: one.nothing ? "nothing" : "",
      onclick: () => showGroup(g) }, `${g + 1}: ${one.success}/${one.trajectories.length} `,
      one.task || one.row !== null ? make("span", { class: "of" }, alike ? one.id : name) : null);
  }));
  const chosen = wanted ?? Math.max(0, shown.groups.findIndex((one) => one.success && one.success < one.trajectories.length));
  if (shown.groups.length) return showGroup(Math.max(0, Math.min(chosen, shown.groups.length - 1)));
  group = drawing = null;
  $("graph").replaceChildren();
  $("legend").replaceChildren();
  fill(make("p", { class: "note" }, "No episode of this iteration is complete yet."));
}

const groupName = (one) => taskName(one, one.row === null ? null : shown.texts[one.row]);
const estimator = () => run.settings.estimator_name || "g2po";

// How many episodes of an iteration succeeded, with the standard error by groups.
function resultOf(n) {
  const counted = shown.groups.flatMap(({ trajectories }) => trajectories).filter(({ outcome }) => !UNCOUNTED.includes(outcome));
  if (!counted.length || run.log) return "";
  const error = index && index.iterations.find((one) => one.n === n)?.error;
  const idle = shown.groups.filter((one) => one.nothing).length;
  return `${percent(counted.filter(({ outcome }) => outcome === "success").length / counted.length)}` +
    `${error ? ` ± ${percent(error)}` : ""} % of ${counted.length} episodes solved. ` +
    (idle ? `No learning signal in ${idle} of ${amountOf(shown.groups.length, "group")}. ` : "");
}

// What the advantages of this iteration are, and the λ of its values.
function howTrained() {
  if (run.log) return `Credited with ${estimator()}, after the fact: these runs trained nothing.` +
    (shown.value_lambda === null ? " Values of states are mean discounted returns." : "");
  if (shown.value_lambda === null) return `Trained with ${estimator()}. Values of states are mean discounted returns.`;
  const certain = shown.groups.every((one) => one.adds_up !== false);
  const how = certain ? "" : ", which does not give the advantages that were trained";
  return `Trained with ${estimator()}, λ ${shown.value_lambda}${how}.`;
}

const groupNumber = () => shown.groups.indexOf(group) + 1;
const placeOf = (more = {}) => ({ iteration: run.log ? 1 : shown.n, group: groupNumber(), ...more });

function showGroup(number) {
  drawGroup(number);
  showOverview();
}

// Not scrollIntoView, which would also scroll a page that embeds this one.
function inRow(button) {
  const [at, row] = [button, button.parentElement].map((one) => one.getBoundingClientRect());
  button.parentElement.scrollLeft += Math.min(0, at.left - row.left) + Math.max(0, at.right - row.right);
}

function drawGroup(number) {
  group = shown.groups[number];
  [...$("groups").children].forEach((button, i) => {
    button.setAttribute("aria-pressed", i === number);
    if (i === number) inRow(button);
  });
  const [low, high] = valueScale(shown);
  const won = wonThrough(group);
  drawGraph($("graph"), group, {
    colourOf: (node, i) => valueColour(high > low ? (node.v - low) / (high - low) : 0, won.has(i)),
    onnode: showNode, onedge: showEdge, onnothing: showOverview,
  });
  $("legend").replaceChildren(
    ...[["an episode through it succeeded: value", true], ["none succeeded: value", false]].map(([what, is]) => make("span", {}, `${what} ${short(low)}`,
      make("i", { style: `background:linear-gradient(90deg,${valueColour(0, is)},${valueColour(1, is)})` }), short(high))),
    hasAdvantages() ? make("span", {}, "advantage of an edge: below", make("i", { style:
      `background:linear-gradient(90deg,${advantageColour(-2)},${advantageColour(0)},${advantageColour(2)})` }), "above") : "",
    drawing.edges.some((edge) => edge.faults) ? make("span", {}, make("b", { class: "minus-mark" }, "✗"), " with actions that are not admissible") : "",
    make("span", {}, "size: visits; left to right: steps from the start; outline: what is open"));
}

// The index of the run, which comes after the page is open: success by task, standard errors, episodes to be searched.
async function readIndex() {
  if (!run) return;
  index = await load("index", 0);
  if (shown) $("used").textContent = `${resultOf(shown.n)}${howTrained()}`;
  if (visible() === "training") drawCurves();
  if (visible() === "failures") showTasks();
  const list = $("elsewhere");
  if (list) list.replaceChildren(...elsewhere());
}
