// -- a run that goes on: the page asks its server for news ------------------------------------------------------------

const EVERY = 3000;  // milliseconds
let version = null;

const newest = () => run.iterations[run.iterations.length - 1];

function sayLive(text, is = "") {
  $("live").hidden = false;
  $("live").className = is;
  $("live").textContent = text;
}

async function listen() {
  let answered = true;
  try {
    const now = await ask("version");
    if (now !== version) await refresh();
    const trained = run && run.curves.length ? run.curves.at(-1).n : 0;  // as the curves: the one that is played is not done
    const planned = run && run.planned ? `${trained} of ${run.planned} iterations, ` : "";
    sayLive(`live: ${planned}${new Date().toLocaleTimeString()}`);
  } catch (error) {
    answered = !error.offline;
    sayLive(answered ? `not read: ${error.message}` : `the server has ended: g2po view ${page.name} opens the run again`, "gone");
  }
  setTimeout(listen, answered ? EVERY : 3 * EVERY);
}

// Take what is new and leave the reader where he is; who has chosen nothing yet is shown the newest iteration.
async function refresh() {
  const next = await ask("overview");
  const began = !page.training && next.training;
  kept.clear();
  page = next;
  run = page.training ? page.sources[0] : null;
  showTabs();
  if (began) setUpSlider();
  if (following && (began || !visible())) {
    if ($("waiting").hidden) await show(run ? "training" : "evaluations");
    follow();
  } else if (run && visible() === "training") await refreshTraining();
  else if (visible() === "evaluations") await refreshEvaluations();
  version = next.version;
  $("problem").hidden = true;
  indexes = [];
  await readIndex();
}

async function refreshTraining() {
  if (following && (!shown || shown.n !== newest())) return choose(newest()).then(follow);
  setUpSlider();
  drawCurves();
  if (!shown || shown.n < newest() - 1) return;
  const again = await load("iteration", shown.n);  // it may have been half written
  if (JSON.stringify(again) === JSON.stringify(shown)) return;
  const [place, follows] = [readPlace(), following];
  await choose(shown.n, (place.group || 1) - 1);
  if (follows) follow();
  else await openPlace(place);
}

function refreshEvaluations() {
  showRuns();
  if (!sides.length && page.sets.length) return compare(...page.pair);
  if (sides.length && sides.every(({ set }) => page.sets.some(({ id }) => id === set.id))) showSides();
}
