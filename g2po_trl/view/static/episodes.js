// -- episodes of a task, two side by side -----------------------------------------------------------------------------
// Beside each other are an episode of each evaluation, or, of one evaluation, two episodes of the task.

let at = [0, 0];  // which episode of the task is shown in each column
let apart = false;  // of one evaluation: two columns?

const won = (one) => one !== undefined && one.outcome === "success";

function showTask() {
  const last = (task) => (task ? Math.max(0, task.episodes.findIndex((one) => one.last)) : 0);
  const [mine, theirs] = current.tasks;
  at = [last(mine), last(sides.length === 2 ? theirs : mine)];
  if (sides.length === 1) {
    // What says most: where an episode that succeeded and one that did not part.
    const first = (is) => mine.episodes.findIndex((one) => one.last && won(one) === is);
    apart = current.is === "some";
    if (apart) at = [first(true), first(false)];
    else if (mine.episodes.length > 1) at = [at[0], (at[0] + 1) % mine.episodes.length];
  } else if (mine && theirs) {
    const differ = mine.episodes.findIndex((one, n) => one.last && theirs.episodes[n] && theirs.episodes[n].last &&
      won(one) !== won(theirs.episodes[n]));
    if (differ >= 0) at = [differ, differ];
  }
  showEpisodes();
}

// The columns: which evaluation, the task in it, which of its episodes.
function columns() {
  const two = sides.length === 2 || (apart && current.tasks[0].episodes.length > 1);
  return [0, 1].slice(0, two ? 2 : 1).map((i) => {
    const [side, task] = sides.length === 2 ? [sides[i], current.tasks[i]] : [sides[0], current.tasks[0]];
    const name = sides.length === 2 ? LETTERS[i] : ["the left one", "the right one"][i];
    return { i, side, task, name, one: task ? task.episodes[at[i]] : null, texts: side.data.texts };
  });
}

function episodeName(one, many) {
  const parts = [one.seed === null ? null : `seed ${one.seed}`, many ? `trial ${one.trial + 1}` : null];
  return parts.filter(Boolean).join(", ");
}

function episodeHead({ i, side, task, one, texts }) {
  const letter = sides.length === 2 ? make("b", { class: `letter letter-${LETTERS[i]}` }, LETTERS[i]) : null;
  const name = page.sources.length > 1 ? `${page.sources[side.set.source].name}: ${setName(side.set)}` : setName(side.set);
  if (!task) return make("div", { class: "head" }, letter, ` ${name} has not played this task.`);
  const trials = task.episodes.some((other) => !other.last || other.trial > 0);
  const facts = [`${one.steps.length} steps`, `reward ${one.reward}`];
  if (one.tokens) facts.push(`${one.tokens[0]} prompt and ${one.tokens[1]} completion tokens`);
  if (!one.last) facts.push("not the last trial: it does not count");
  return make("div", { class: "head" },
    make("div", {}, letter, sides.length === 2 ? make("span", { class: "note" }, ` ${name} `) : null,
      ...(task.episodes.length > 1 ? task.episodes.map((other, n) => make("button", { type: "button", class: other.outcome,
        "aria-pressed": n === at[i], onclick: () => { at[i] = n; showEpisodes(); } },
        `${episodeName(other, trials) || `episode ${n + 1}`} ${won(other) ? "✓" : "✗"}`)) : [])),
    make("div", {}, make("strong", { class: one.outcome }, ENDS[one.outcome] || one.outcome),
      make("span", { class: "note" }, `, ${facts.join(", ")}`)),
    ...troubles(one, texts),
    ...one.reflections.map((note, n) => folded(`reflection ${n + 1}, read by this trial`, texts[note])));
}

// A step of one column, or one that both share.
function stepCard(s, from, kind = "") {
  const [{ one: { steps }, texts }] = from;
  const more = (title, which) => {
    const shownTexts = from.map(({ one, texts: of }) => of[one.steps[s][which]]);
    if (shownTexts.length === 1 || shownTexts[0] === shownTexts[1]) return [folded(title, shownTexts[0])];
    return shownTexts.map((text, i) => folded(`${title} of ${from[i].name}`, text));
  };
  return make("div", { class: `step ${kind}` },
    make("div", { class: "adv" }, `${s + 1}. `, ...faults(steps[s])),
    ...asked(steps[s], texts), answered(steps[s], texts),
    ...more("completion", "r"), ...more("prompt", "p"));
}

const sameDeed = (left, right, s) => deed(left.one.steps[s], left.texts) === deed(right.one.steps[s], right.texts);

// How many steps two episodes share from the start: same observation, same action, both valid or not.
function sharedSteps([left, right]) {
  const [a, b] = [left.one.steps, right.one.steps];
  let s = 0;
  while (a[s] && b[s] && left.texts[a[s].o] === right.texts[b[s].o] && sameDeed(left, right, s) && a[s].ok === b[s].ok) s += 1;
  return s;
}

function sayParting([left, right], s) {
  const [a, b] = [left.one.steps[s], right.one.steps[s]];
  if (!a && !b) return "The same steps to the end.";
  const why = !a || !b ? `${(a ? right : left).name} ends here`
    : left.texts[a.o] !== right.texts[b.o] ? "different observations"
      : !sameDeed(left, right, s) ? "the same observation, different actions" : "the same action, once in an invalid completion";
  return s ? `They differ after ${s} shared step${s > 1 ? "s" : ""}: ${why}.` : `They differ from the first step: ${why}.`;
}

// The n-th episode of the task, in the first column.
function showEpisode(n) {
  if (!current.tasks[0] || !current.tasks[0].episodes[n]) return;
  at[0] = n;
  showEpisodes();
}

function showEpisodes() {
  const all = columns();
  const place = { evaluation: sides[0].set.id, beside: sides[1] && sides[1].set.id, task: current.id, episode: at[0] + 1 };
  mark(place);
  const pair = all.length === 2 && all.every(({ one }) => one);
  const cells = all.map(episodeHead);
  const shared = pair ? sharedSteps(all) : 0;
  for (let s = 0; s < shared; s++) cells.push(stepCard(s, all, "shared"));
  if (pair) cells.push(make("p", { class: "parting" }, sayParting(all, shared)));
  const longest = Math.max(...all.map(({ one }) => (one ? one.steps.length : 0)));
  for (let s = shared; s < longest; s++) {
    all.forEach((column) => cells.push(column.one && column.one.steps[s] ? stepCard(s, [column]) : make("div", {})));
  }
  all.forEach(({ one, texts }) => cells.push(make("div", { class: "last" }, ...(one && one.final !== null
    ? [make("div", { class: "adv" }, "the last observation"), observed(texts[one.final])] : []))));
  const several = sides.length === 1 && current.tasks[0].episodes.length > 1;
  $("episodes").replaceChildren(make("h2", {}, taskName(current, current.row)),
    make("p", { class: "note" }, [current.task || current.row ? `Task ${current.id}` : "", current.kind || ""].filter(Boolean).join(", "), " ", linkTo(place)),
    several ? make("button", { type: "button", id: "apart", "aria-pressed": apart, onclick: toggleApart },
      "two episodes side by side (s)") : "",
    folded("row", current.row) || "",
    make("div", { class: all.length === 2 ? "columns two" : "columns" }, ...cells));
  $("episodes").scrollTop = 0;
}

function toggleApart() {
  apart = !apart;
  if (current && sides.length === 1) showEpisodes();
}

// The next episode of the task, in both columns at once: the same seed beside the same seed.
function turn(way) {
  if (!current) return;
  at = at.map((n, i) => {
    const task = current.tasks[sides.length === 2 ? i : 0];
    return task ? (n + way + task.episodes.length) % task.episodes.length : 0;
  });
  showEpisodes();
}
