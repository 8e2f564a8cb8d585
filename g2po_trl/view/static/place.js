// -- the place in the page, kept in its address -----------------------------------------------------------------------
// #iteration=3&group=2&episode=5&step=4, or …&state=7; #view=tasks; #evaluation=0-eval-40&beside=…&task=ID&episode=2

let following = true;  // a live page goes to the newest iteration until its reader has chosen something

function addressOf(place) {
  const known = Object.entries(place).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return `#${new URLSearchParams(known)}`;
}

let lastPlace = {};  // in the training

function mark(place) {
  following = false;
  if (place.iteration) lastPlace = place;
  try {
    history.replaceState(null, "", addressOf(place));
  } catch { /* a page inside a notebook has no address of its own */ }
}

function follow() {
  try {
    history.replaceState(null, "", location.pathname + location.search);
  } catch { /* as above */ }
  following = true;
}

function readPlace() {
  const place = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  for (const name of ["iteration", "group", "episode", "step", "state"]) {
    if (name in place) place[name] = parseInt(place[name], 10) || 1;
  }
  return place;
}

// What the address names, if the page has it.
async function openPlace(place) {
  if (run && place.iteration) {
    await show("training", false);
    await choose(place.iteration, (place.group || 1) - 1);
    if (group && place.state && group.nodes[place.state - 1]) showNode(place.state - 1);
    else if (group && place.episode && group.trajectories[place.episode - 1]) showTrajectory(place.episode - 1, (place.step || 1) - 1);
    return true;
  }
  if (run && place.view === "tasks") {
    await show("failures");
    return true;
  }
  const has = (id) => page.sets.some((set) => set.id === id);
  if (!has(place.evaluation)) return false;
  await show("evaluations", false);
  await compare(place.evaluation, has(place.beside) ? place.beside : "");
  const found = listed.findIndex((row) => row.id === place.task);
  if (found >= 0) {
    pick(found);
    if (place.episode) showEpisode(place.episode - 1);
  }
  return true;
}

const linkTo = (place) => make("a", { class: "link", href: addressOf(place), title: "a link to this episode" }, "link");
