// -- start ------------------------------------------------------------------------------------------------------------

const visible = () => (["training", "evaluations"].find((name) => !$(name).hidden));

function theme(name) {
  document.documentElement.dataset.theme = name;
  if (!run || $("training").hidden || !shown) return;
  drawCurves();
  const [panel, selected] = [[...$("panel").childNodes], network.getSelectedNodes()];
  showGroup(shown.groups.indexOf(group));
  $("panel").replaceChildren(...panel);
  network.selectNodes(selected);
}
const otherTheme = () => theme(dark() ? "light" : "dark");

// Each view is filled when it is first looked at: the graph must be drawn where it is seen.
const filled = new Set();
async function show(name) {
  ["training", "evaluations"].forEach((view) => {
    $(view).hidden = view !== name;
    $(`tab-${view}`).setAttribute("aria-selected", view === name);
  });
  if (filled.has(name)) theme(document.documentElement.dataset.theme);
  else if (name === "training") await choose(run.iterations[run.iterations.length - 1]);
  else {
    await compare(...page.pair);
    $("tasks").focus({ preventScroll: true });
  }
  filled.add(name);
}

const TRAINING_KEYS = {
  ArrowLeft: () => run.log || step(-1), ArrowRight: () => run.log || step(1),
  n: () => showGroup((shown.groups.indexOf(group) + 1) % shown.groups.length),
  p: () => showGroup((shown.groups.indexOf(group) + shown.groups.length - 1) % shown.groups.length),
};
const step = (way) => choose(run.iterations[Math.min(run.iterations.length - 1, Math.max(0, run.iterations.indexOf(shown.n) + way))]);
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
  page = here ? await unpack(here.textContent) : await ask("overview");
  run = page.training;
  document.title = `${page.name} – g2po-trl`;
  $("name").textContent = page.sources.length > 1 ? "Two evaluations side by side" : page.name;
  if (page.sources.length === 1) $("settings").replaceChildren(...settingsOf(page.sources[0], []));
  $("theme").addEventListener("click", otherTheme);
  $("tabs").hidden = !(run && page.sets.length);
  ["training", "evaluations"].forEach((name) => $(`tab-${name}`).addEventListener("click", () => show(name)));
  document.addEventListener("keydown", pressed);
  $("search").addEventListener("input", listTasks);
  if (run && run.log) {
    document.title = `${run.log.name}, logged runs – g2po-trl`;
    $("name").textContent = `Logged runs: ${run.log.name}`;
    ["choose-iteration", "iteration-keys"].forEach((part) => { $(part).hidden = true; });
  } else if (run) {
    const slider = $("iteration");
    slider.max = run.iterations.length - 1;
    slider.addEventListener("input", () => { $("iteration-number").textContent = run.iterations[slider.value]; });
    slider.addEventListener("change", () => choose(run.iterations[slider.value]));
  }
  await show(run ? "training" : "evaluations");
  document.body.dataset.ready = "yes";
}
start();
