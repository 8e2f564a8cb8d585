// -- start ------------------------------------------------------------------------------------------------------------

const VIEWS = ["training", "failures", "evaluations"];
const visible = () => VIEWS.find((name) => !$(name).hidden);

function theme(name) {
  document.documentElement.dataset.theme = name;
  redrawAll();
}
const otherTheme = () => theme(dark() ? "light" : "dark");

// What is drawn by size and colours, again; what is open stays open.
function redrawAll() {
  if (visible() === "evaluations") showRuns();
  if (visible() === "failures") showTasks();
  if (visible() !== "training" || !shown) return;
  drawCurves();
  if (!group) return;
  const [place, follows] = [lastPlace, following];
  drawGroup(groupNumber() - 1);
  if (place.state && group.nodes[place.state - 1]) outline({ nodes: [place.state - 1] });
  if (place.episode && group.trajectories[place.episode - 1]) showTrajectory(place.episode - 1, (place.step || 1) - 1);
  if (follows) follow();
}

// Each view is filled when it is first looked at: the graph must be drawn where it is seen.
const filled = new Set();
async function show(name, fill = true) {
  VIEWS.forEach((view) => {
    $(view).hidden = view !== name;
    $(`tab-${view}`).setAttribute("aria-pressed", view === name);
  });
  scrollTo(0, 0);
  if (name === "failures") {
    showTasks();
    mark({ view: "tasks" });
  } else if (fill && filled.has(name)) {
    redrawAll();
    if (name === "training" && group) mark(lastPlace);
  } else if (fill && name === "training") await choose(newest());
  else if (fill && name === "evaluations") {
    if (page.sets.length) await compare(...page.pair);
    $("tasks").focus({ preventScroll: true });
  }
  if (name === "evaluations") showRuns();
  filled.add(name);
}

const TRAINING_KEYS = {
  ArrowLeft: () => run.log || step(-1), ArrowRight: () => run.log || step(1),
  n: () => group && showGroup(groupNumber() % shown.groups.length),
  p: () => group && showGroup((groupNumber() + shown.groups.length - 2) % shown.groups.length),
};
const step = (way) => shown && choose(run.iterations[Math.min(run.iterations.length - 1, Math.max(0, run.iterations.indexOf(shown.n) + way))]);
const go = (way) => pick(listed.indexOf(current) + way);
const EVALUATION_KEYS = {
  ArrowDown: () => go(1), ArrowUp: () => go(-1), PageDown: () => go(10), PageUp: () => go(-10),
  Home: () => pick(0), End: () => pick(listed.length - 1), j: () => go(1), k: () => go(-1),
  ArrowLeft: () => turn(-1), ArrowRight: () => turn(1), s: toggleApart, "/": () => $("search").focus(),
};
const SCROLLING = ["ArrowDown", "ArrowUp", "PageDown", "PageUp", "Home", "End"];

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const on = event.target;
  if (event.key === "Enter" && on.matches("tr[tabindex]")) return on.click();
  if (on === $("search") && event.key === "Escape") return $("tasks").focus();
  if (on.matches("input, select, textarea")) return;
  if (event.key === "t") return otherTheme();
  if (visible() === "training" && shown && TRAINING_KEYS[event.key]) TRAINING_KEYS[event.key]();
  else if (visible() === "evaluations" && EVALUATION_KEYS[event.key]) {
    // Elsewhere than in the list these keys scroll, as they do on any page.
    if (SCROLLING.includes(event.key) && ![document.body, $("tasks")].includes(on)) return;
    EVALUATION_KEYS[event.key]();
    event.preventDefault();
  } else if (visible() === "evaluations" && /^[1-9]$/.test(event.key)) {
    const button = $("filters").querySelectorAll("button")[event.key - 1];
    if (button) button.click();
  }
}

async function start() {
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  window.addEventListener("unhandledrejection", ({ reason }) => {
    $("problem").hidden = false;
    $("problem").textContent = String((reason && reason.message) || reason);
  });
  const here = $("overview");
  if ($("files")) files = await unpack($("files").textContent);
  page = here ? await unpack(here.textContent) : await ask("overview");
  version = page.version;
  run = page.training ? page.sources[0] : null;
  document.title = `${page.name} – g2po-trl`;
  $("name").textContent = page.sources.length > 1 ? "Evaluations side by side" : page.name;
  $("about").hidden = page.sources.length > 1;
  if (page.sources.length === 1) $("settings").replaceChildren(...settingsOf(page.sources[0], []));
  $("theme").addEventListener("click", otherTheme);
  showTabs();
  VIEWS.forEach((name) => $(`tab-${name}`).addEventListener("click", () => show(name)));
  document.addEventListener("keydown", pressed);
  $("search").addEventListener("input", listTasks);
  ["input", "change"].forEach((what) => $("query").addEventListener(what, () => index && search()));
  $("query").addEventListener("submit", (event) => event.preventDefault());
  $("newest").addEventListener("click", () => choose(newest()).then(follow));
  $("iteration").addEventListener("input", () => { $("iteration-number").textContent = run.iterations[$("iteration").value]; });
  $("iteration").addEventListener("change", () => choose(run.iterations[$("iteration").value]));
  window.addEventListener("hashchange", () => openPlace(readPlace()));
  if (run && run.log) {
    document.title = `${run.log.name}, logged runs – g2po-trl`;
    $("name").textContent = `Logged runs: ${run.log.name}`;
    $("tab-failures").hidden = true;
    ["choose-iteration", "iteration-keys"].forEach((part) => { $(part).hidden = true; });
  } else if (run) setUpSlider();
  try {
    if (!(await openPlace(readPlace()))) {
      if ($("waiting").hidden) await show(run ? "training" : "evaluations");
      follow();
    }
  } finally {
    if (!here) listen();
  }
  document.body.dataset.ready = "yes";
  await readIndex();
  document.body.dataset.index = "yes";
}

function showTabs() {
  $("tabs").hidden = !run || (run.log && !page.sets.length);
  $("tab-evaluations").hidden = !page.sets.length;
  $("waiting").hidden = Boolean(run || page.sets.length || page.sources.length > 1);
  $("evaluations").classList.toggle("no-sets", !page.sets.length);
}

function setUpSlider() {
  $("iteration").max = run.iterations.length - 1;
  if (!shown) return;
  $("iteration").value = run.iterations.indexOf(shown.n);
  $("newest").hidden = shown.n === newest();
  $("newest").textContent = `newest: ${newest()}`;
}

let redraw = null;
window.addEventListener("resize", () => {
  clearTimeout(redraw);
  redraw = setTimeout(redrawAll, 200);
});
start();
