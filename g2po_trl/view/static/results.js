// -- evaluations: one, or two side by side ----------------------------------------------------------------------------

let sides = [];  // of those chosen: { set: what the overview says of it, data, of: task id -> task }
let rows = [], listed = [], current = null, wanted = "all";
const LETTERS = ["A", "B"];

const setName = (set) => (set.step === null ? set.panel : `${set.panel}, step ${set.step}`);
const rated = (set) => (Number.isFinite(set.success) ? ` (${percent(set.success)} %)` : "");
const counted = (task) => (task ? task.episodes.filter((one) => one.last && !["error", "lost"].includes(one.outcome)) : []);
const wins = (episodes) => episodes.filter((one) => one.outcome === "success").length;
const rate = (task) => wins(counted(task)) / counted(task).length;  // NaN without a result
const of = (task) => `${wins(counted(task))} of ${counted(task).length}`;

// Filters: name -> what its button says. A task is in one of them, and in "all" if it can be compared.
const ONE = { all: "all", every: "solved", some: "solved by some episodes", none: "not solved", void: "no result" };
const TWO = { all: "all", a: "solved by A only", b: "solved by B only", both: "by both", none: "by neither",
  void: "no result on a side", onlyA: "only A has it", onlyB: "only B has it" };
const uncompared = (row) => ["void", "onlyA", "onlyB"].includes(row.is);

function judge(tasks) {
  if (tasks.length === 1) {
    const [share] = tasks.map(rate);
    return Number.isNaN(share) ? "void" : share === 1 ? "every" : share > 0 ? "some" : "none";
  }
  const [a, b] = tasks;
  if (!b) return "onlyA";
  if (!a) return "onlyB";
  const [mine, theirs] = tasks.map(rate);
  if (Number.isNaN(mine) || Number.isNaN(theirs)) return "void";
  return mine && theirs ? "both" : mine ? "a" : theirs ? "b" : "none";
}

async function compare(left, right) {
  const ids = [left, ...(right ? [right] : [])];
  const loaded = await Promise.all(ids.map((id) => load("set", id)));
  sides = ids.map((id, i) => ({ set: page.sets.find((set) => set.id === id), data: loaded[i],
    of: new Map(loaded[i].tasks.map((task) => [task.id, task])) }));
  const names = [...new Set(loaded.flatMap((data) => data.tasks.map((task) => task.id)))];
  rows = names.map((id) => {
    const tasks = sides.map((side) => side.of.get(id));
    const first = (what) => tasks.map((task) => task && task[what]).find(Boolean) || null;
    const row = tasks.map((task, i) => task && loaded[i].texts[task.row]).find(Boolean) || null;
    return { id, tasks, row, task: first("task"), kind: first("kind"), is: judge(tasks) };
  });
  wanted = "all";
  $("search").value = "";
  showSides();
  showNumbers();
  listTasks();
}

// -- what is compared -------------------------------------------------------------------------------------------------

function settingsOf(source, others) {
  return Object.entries(source.settings).map(([name, value]) => {
    const differs = others.length && others.some((other) => String(other.settings[name]) !== String(value));
    return make("span", differs ? { class: "differs", title: "differs" } : {}, `${name} ${value}`);
  });
}

function showSides() {
  const several = page.sources.length > 1;
  const choice = (at) => {
    const select = make("select", { id: `set-of-${LETTERS[at]}`, "aria-label": `evaluation ${LETTERS[at]}` });
    if (at === 1) select.append(make("option", { value: "" }, "no comparison"));
    const groups = page.sources.map((source, i) => [source.name, page.sets.filter((set) => set.source === i)]);
    for (const [name, sets] of groups.filter(([, some]) => some.length)) {
      const options = sets.map((set) => make("option", { value: set.id }, setName(set) + rated(set)));
      select.append(...(several ? [make("optgroup", { label: name }, ...options)] : options));
    }
    select.value = sides[at] ? sides[at].set.id : "";
    select.addEventListener("change", () => compare($("set-of-A").value, $("set-of-B") ? $("set-of-B").value : ""));
    return select;
  };
  const sourceOf = (at) => sides[at] && page.sources[sides[at].set.source];
  const line = (at) => make("div", { class: `side side-${LETTERS[at]}` },
    page.sets.length > 1 ? make("b", { class: "letter" }, LETTERS[at]) : null,
    several && sides[at] ? make("strong", {}, sourceOf(at).name) : null, choice(at),
    several && sides[at] ? make("span", { class: "side-settings" },
      ...settingsOf(sourceOf(at), [sourceOf(1 - at)].filter(Boolean))) : null);
  const notes = sides.filter((side) => side.data.unfinished).map((side) => `${side.data.unfinished} lines of ` +
    `${setName(side.set)} are not complete and are left out.`);
  if (page.sets.length === 1) $("sides").replaceChildren();  // nothing to choose
  else $("sides").replaceChildren(line(0), line(1));
  $("sides").append(...notes.map((note) => make("p", { class: "note" }, note)));
}

// -- success ----------------------------------------------------------------------------------------------------------

// Mean of the differences of tasks, and half of its 95 % interval: tasks are the sample, both sides played them. Few
// tasks, or equal differences, have no interval.
const FEWEST_TASKS = 10;
function paired(some) {
  const gaps = some.map(({ tasks: [a, b] }) => rate(b) - rate(a));
  const middle = mean(gaps);
  const half = 1.96 * Math.sqrt(gaps.reduce((sum, x) => sum + (x - middle) ** 2, 0) / (gaps.length - 1) / gaps.length);
  return signed(100 * middle, 1) + (gaps.length >= FEWEST_TASKS && half > 0 ? ` ± ${(100 * half).toFixed(1)}` : "");
}

// One column for success, one for each kind of task, turns and valid completions; a line for each side.
function numbersOf(played) {
  const success = (title, some) => ({ title: `${title} (${some.length})`, values: sides.map((_, i) =>
    percent(mean(some.map((row) => rate(row.tasks[i]))))), gap: sides.length === 2 ? paired(some) : "" });
  const over = (title, value) => {
    const means = sides.map((_, i) => mean(played.map((row) => mean(counted(row.tasks[i]).map(value)))));
    return { title, values: means.map((x) => x.toFixed(1)), gap: signed(means[1] - means[0], 1) };
  };
  // As everywhere: of all completions, not a mean over episodes.
  const valid = (some) => {
    const rates = sides.map((_, i) => 100 * mean(some.flatMap((row) => counted(row.tasks[i]).flatMap((one) => one.steps.map((step) => +step.ok)))));
    return { title: "valid completions, %", values: rates.map((x) => (Number.isFinite(x) ? x.toFixed(1) : "–")), gap: signed(rates[1] - rates[0], 1) };
  };
  const kinds = [...new Set(played.map((row) => row.kind).filter(Boolean))].sort();
  return [success("success, %", played),
    ...kinds.map((kind) => success(kind, played.filter((row) => row.kind === kind))),
    over("turns", (one) => one.steps.length),
    valid(played)];
}

function showNumbers() {
  const played = rows.filter((row) => !uncompared(row));
  const two = sides.length === 2;
  const columns = played.length ? numbersOf(played) : [];
  const lines = sides.map((side, i) => [two ? make("b", { class: `letter letter-${LETTERS[i]}` }, LETTERS[i]) : setName(side.set),
    ...columns.map((one) => one.values[i])]);
  if (two) lines.push(["B − A", ...columns.map((one) => one.gap)]);
  const seeds = two ? [] : [...new Set(sides[0].data.tasks.flatMap((task) => task.episodes.map((one) => one.seed)))];
  const bySeed = seeds.length > 1 ? "Success by seed: " + seeds.map((seed) => {
    const mine = sides[0].data.tasks.flatMap(counted).filter((one) => one.seed === seed);
    return `${percent(wins(mine) / mine.length)} (seed ${seed})`;
  }).join(", ") + "." : "";
  const only = ["onlyA", "onlyB"].map((is) => rows.filter((row) => row.is === is).length);
  const lost = rows.filter((row) => row.is === "void").length;
  const notes = [bySeed];
  if (two) notes.push(`${rows.length - only[0] - only[1]} tasks are on both sides` +
    (only[0] + only[1] ? `; ${only[0]} only A has and ${only[1]} only B has: they are in no number here.` : "."));
  if (two && played.length) notes.push("± is half of the 95 % interval of the mean difference, over tasks.");
  if (two && !played.length && !lost) notes.push("There is nothing to compare: tasks are matched by their task_id.");
  if (lost) notes.push(`${lost} tasks have no result (environment errors) and are in no number here.`);
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...[null, ...columns.map((one) => one.title)].map((title) =>
    make("th", { scope: "col" }, title === null ? unseen("evaluation") : title.replaceAll("_", "_\u200b"))))), make("tbody", {}, ...lines.map((line) =>
    make("tr", {}, ...line.map((cell) => make("td", {}, cell))))));
  $("numbers").replaceChildren(...(columns.length ? [make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "table of success" }, table)] : []),
    make("p", { class: "note" }, notes.filter(Boolean).join(" ")));
}

// -- the list of tasks ------------------------------------------------------------------------------------------------

function showFilters() {
  const names = sides.length === 2 ? TWO : ONE;
  const several = rows.some((row) => row.tasks.some((task) => counted(task).length > 1));
  const buttons = Object.entries(names).map(([is, title]) => {
    const number = rows.filter((row) => (is === "all" ? !uncompared(row) : row.is === is)).length;
    return number || ["all", "a", "b", "both", "none", "every"].includes(is) ? make("button", { type: "button",
      "aria-pressed": is === wanted, "data-is": is, onclick: () => { wanted = is; listTasks(); } }, `${title} `,
      make("b", {}, number)) : null;
  });
  $("filters").replaceChildren(...buttons.filter(Boolean));
  if (several && sides.length === 2) $("filters").append(make("span", { class: "note" }, "solved: by at least one of its episodes"));
}

function listTasks() {
  showFilters();
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  listed = rows.filter((row) => (wanted === "all" ? !uncompared(row) : row.is === wanted) &&
    words.every((word) => `${row.task || ""} ${row.row || ""} ${row.kind || ""} ${row.id}`.toLowerCase().includes(word)));
  $("tasks").replaceChildren(...listed.map((row, i) => make("div", { role: "option", id: `task-${i}`, class: "task",
    title: row.id, onclick: () => pick(i) }, make("div", { class: "what" }, taskName(row, row.row)),
    make("div", { class: "who" }, row.kind ? make("span", { class: "kind" }, row.kind) : null,
      ...row.tasks.map((task, at) => verdict(task, at))))));
  if (!listed.length) $("tasks").append(make("p", { class: "note" }, "No matching task."));
  const at = listed.findIndex((row) => current && row.id === current.id);
  pick(Math.max(0, at), false);
}

function verdict(task, at) {
  const number = counted(task).length;
  const text = !task ? "not played" : !number ? "no result" : number === 1 ? (rate(task) ? "✓ solved" : "✗ not solved")
    : `${wins(counted(task))}/${number} solved`;
  const is = !number ? "truncated" : rate(task) === 1 ? "success" : rate(task) > 0 ? "mixed" : "failure";
  return make("span", { class: `verdict ${is}` }, sides.length === 2 ? make("b", { class: `letter-${LETTERS[at]}` },
    LETTERS[at]) : null, ` ${text}`);
}

function pick(number, reveal = true) {
  current = listed[Math.min(listed.length - 1, Math.max(0, number))] || null;
  [...$("tasks").children].forEach((one, i) => one.setAttribute("aria-selected", current !== null && listed[i] === current));
  if (!current) {
    $("tasks").removeAttribute("aria-activedescendant");
    $("episodes").replaceChildren();
    return;
  }
  const id = `task-${listed.indexOf(current)}`;
  $("tasks").setAttribute("aria-activedescendant", id);
  if (reveal) $(id).scrollIntoView({ block: "nearest" });
  showTask();
}
