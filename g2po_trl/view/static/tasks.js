// -- tasks: which are never solved, and the episodes, states and tools that say why -----------------------------------------

const winsOf = (one) => one.episodes.filter(([outcome]) => index.outcomes[outcome] === "success").length;
const countedOf = (one) => one.episodes.filter(([outcome]) => !UNCOUNTED.includes(index.outcomes[outcome])).length;
const indexName = ({ id, task, row }) => taskName({ id, task }, row);
const KINDS = { never: "never solved", sometimes: "sometimes", always: "always", unknown: "no result" };
const LATE = 5, COLUMNS = 40, ROWS = 60, FOUND = 50;
let kind = "all", rowsShown = ROWS;

async function openGroup(n, g, episode = null) {
  await show("training", false);
  await choose(n, g);
  if (episode !== null) showTrajectory(episode, group.trajectories[episode].turns[0]?.step ?? 0);
}

// Tasks with their groups, never solved first, then by success.
function tasksByFailure() {
  const tasks = index.tasks.map((task) => ({ ...task, groups: [], won: 0, counted: 0, late: false }));
  const last = index.iterations.slice(-LATE).map(({ n }) => n);
  for (const { n, groups } of index.iterations) {
    groups.forEach((one, g) => {
      const task = tasks[one.task], [won, counted] = [winsOf(one), countedOf(one)];
      task.groups.push({ n, g, won, counted });
      task.won += won;
      task.counted += counted;
      task.late ||= last.includes(n) && counted > 0 && !won;
    });
  }
  for (const task of tasks) task.kind = !task.counted ? "unknown" : !task.won ? "never" : task.won < task.counted ? "sometimes" : "always";
  const order = Object.keys(KINDS);
  return tasks.filter((task) => task.groups.length).sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind) ||
    a.won / a.counted - b.won / b.counted || b.counted - a.counted);
}

function showTasks() {
  if (!index) return $("verdict").replaceChildren("Reading the run …");
  const tasks = tasksByFailure(), late = index.iterations.slice(-LATE);
  const groups = late.flatMap((one) => one.groups).filter(countedOf);
  const lost = groups.filter((one) => !winsOf(one)).length;
  const choice = (is, text) => make("button", { type: "button", "aria-pressed": kind === is, onclick: () => { kind = is; showTasks(); } }, text);
  $("verdict").replaceChildren(
    ...(late.length && !run.log ? [choice("late", `${lost} of ${amountOf(groups.length, "group")} failed in every episode`),
      ` in iteration${late.length > 1 ? `s ${late[0].n} to ${late.at(-1).n}` : ` ${late[0].n}`}. `] : []),
    choice("all", amountOf(tasks.length, "task")), ": ", ...Object.entries(KINDS).flatMap(([is, text]) => {
      const number = tasks.filter((task) => task.kind === is).length;
      return number || is === "never" ? [choice(is, `${number} ${text}`), " "] : [];
    }));
  drawHeat(tasks.filter((task) => kind === "all" || (kind === "late" ? task.late : task.kind === kind)));
  showTools();
  search();
}

// A row for each task, a column for each iteration, or for a few; a cell opens its last group.
function drawHeat(tasks) {
  const numbers = index.iterations.map(({ n }) => n), per = Math.ceil(numbers.length / COLUMNS) || 1;
  const columns = Array.from({ length: Math.ceil(numbers.length / per) }, (_, i) => numbers.slice(i * per, (i + 1) * per));
  const named = (some) => (some.length > 1 ? `iterations ${some[0]} to ${some.at(-1)}` : `iteration ${some[0]}`);
  const cell = (task, some) => {
    const groups = task.groups.filter(({ n }) => some.includes(n));
    if (!groups.length) return make("td");
    const [won, counted] = ["won", "counted"].map((what) => groups.reduce((sum, one) => sum + one[what], 0));
    const says = `${named(some)}: ${counted ? `${won} of ${counted} solved` : "no result"}`, { n, g } = groups.at(-1);
    return make("td", {}, make("button", { type: "button", tabindex: -1, title: says, "aria-label": `${indexName(task)}, ${says}`,
      class: !counted ? "void" : won ? "" : "lost", onclick: () => openGroup(n, g),
      style: won ? `background:${valueColour(won / counted, true)}` : null }, won || !counted ? "" : "×"));
  };
  const rows = tasks.slice(0, rowsShown).map((task) => make("tr", {}, make("th", { scope: "row", title: `${indexName(task)}\n${task.id}` },
    make("span", {}, indexName(task))), make("td", { class: "sum" }, `${task.won}/${task.counted}`), ...columns.map((some) => cell(task, some))));
  const head = make("tr", {}, make("th", { scope: "col" }, "task"), make("th", { scope: "col", class: "sum" }, "solved"), ...columns.map((some, i) =>
    make("th", { scope: "col" }, i % 5 && i !== columns.length - 1 ? unseen(named(some)) : some[0])));
  const table = make("table", { class: "heat" }, make("thead", {}, head), make("tbody", {}, ...rows));
  const cells = [...table.querySelectorAll("button")];
  if (cells.length) cells[0].tabIndex = 0;
  table.addEventListener("keydown", (event) => stepThrough(event, table));
  $("heat").replaceChildren(make("p", { class: "note" }, "Success by task over iterations: × never solved; a stronger green, more often. A cell opens its group."), make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "heat map" }, table),
    rows.length ? "" : make("p", { class: "note" }, "No matching task."),
    tasks.length > rows.length ? make("button", { type: "button", onclick: () => { rowsShown += 5 * ROWS; drawHeat(tasks); } },
      `${tasks.length - rows.length} more tasks`) : "");
}

// Arrow keys go from cell to cell.
function stepThrough(event, table) {
  const way = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!way || !event.target.matches("td button")) return;
  event.preventDefault();
  event.stopPropagation();
  const rows = [...table.tBodies[0].rows];
  let [r, c] = [rows.indexOf(event.target.closest("tr")), event.target.parentNode.cellIndex];
  do {
    r += way[0];
    c += way[1];
    const next = rows[r]?.cells[c]?.querySelector("button");
    if (!next) continue;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    return next.focus();
  } while (rows[r]?.cells[c]);
}

// -- search -----------------------------------------------------------------------------------------------------------

const WHERE = { any: "anywhere", task: "in the task", state: "in a state", action: "in an action or a tool's call" };

// The episodes that have all the words, each in a task, a state or an action, and end as wanted.
function episodesWith(words, where, ended) {
  const lower = (texts) => texts.map((text) => text.toLowerCase());
  index.lower ??= [lower(index.tasks.map((task) => `${indexName(task)} ${task.row || ""} ${task.id} ${task.environment || ""}`)),
    lower(index.states), lower(index.actions)];
  const [tasks, states, actions] = index.lower.map((texts) => words.map((word) => texts.map((text) => text.includes(word))));
  const found = [];
  for (const { n, groups } of [...index.iterations].reverse()) {
    groups.forEach(({ task, episodes }, g) => episodes.forEach(([outcome, saw, did], e) => {
      const name = index.outcomes[outcome];
      if (ended !== "all" && name !== ended) return;
      const fits = words.every((_, w) => (["any", "task"].includes(where) && tasks[w][task]) ||
        (["any", "state"].includes(where) && saw.some((i) => states[w][i])) || (["any", "action"].includes(where) && did.some((i) => actions[w][i])));
      if (fits) found.push({ n, g, e, task, outcome: name, turns: saw.length });
    }));
  }
  return found;
}

function search() {
  if (!$("where").options.length) {
    $("where").append(...Object.entries(WHERE).map(([value, text]) => make("option", { value }, text)));
    $("ended").append(...["all", ...index.outcomes].map((value) => make("option", { value }, value === "all" ? "any end" : ENDS[value] || value)));
  }
  const words = $("words").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = episodesWith(words, $("where").value, $("ended").value);
  $("number-found").textContent = amountOf(found.length, "episode") + (found.length > FOUND ? `, the last ${FOUND} are listed` : "");
  $("found").replaceChildren(make("ul", {}, ...found.slice(0, FOUND).map(({ n, g, e, task, outcome, turns }) => make("li", {},
    make("button", { type: "button", onclick: () => openGroup(n, g, e) }, `iteration ${n}, ${g + 1}.${e + 1}`), " ",
    make("span", { class: outcome }, ENDS[outcome] || outcome), `, ${amountOf(turns, "step")}: ${oneLine(indexName(index.tasks[task]), 80)}`))));
}

function showTools() {
  const sums = new Map();
  for (const { tools } of index.iterations) {
    for (const [name, ...counts] of tools) sums.set(name, counts.map((n, i) => n + (sums.get(name) || [0, 0, 0])[i]));
  }
  $("tools").hidden = !sums.size;
  if (!sums.size) return;
  const heads = ["tool", "calls", "failed to parse", "unknown tool"].map((text) => make("th", { scope: "col" }, text));
  const find = (name) => { $("words").value = name; $("where").value = "action"; search(); $("find").scrollIntoView({ block: "start" }); };
  $("tools").replaceChildren(make("h2", {}, "Tool calls"), make("table", {}, make("thead", {}, make("tr", {}, ...heads)),
    make("tbody", {}, ...[...sums].sort((a, b) => b[1][0] - a[1][0]).map(([name, counts]) => make("tr", {},
      make("th", { scope: "row" }, name === null ? "completions without a call" : make("button", { type: "button", onclick: () => find(name) }, name)),
      ...counts.map((n, i) => make("td", {}, name === null && i ? "" : n)))))));
}
