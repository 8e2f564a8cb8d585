// -- curves -----------------------------------------------------------------------------------------------------------

const PHASES = ["environment", "generation", "logps", "advantage", "update"];
const PHASE_COLOURS = ["#4c9f70", "#3b7dd8", "#a86fd1", "#888888", "#e08a3c"];
const SMOOTHED = 5;

// Means over the last SMOOTHED points, over fewer at the start.
const smooth = (line) => line.map(([x], i) => [x, mean(line.slice(Math.max(0, i - SMOOTHED + 1), i + 1).map(([, y]) => y))]);

// The next number at or above v whose half is round, too.
function roundTop(v) {
  const unit = 10 ** Math.floor(Math.log10(v));
  return unit * [1, 2, 4, 5, 6, 8, 10].find((m) => m * unit >= v * (1 - 1e-9));
}
const short = (v) => Number(v.toPrecision(3)).toString();

// Standard errors of these means, of a line's points; null where one is not known.
const smoothErrors = (errors) => errors.map((_, i) => {
  const some = errors.slice(Math.max(0, i - SMOOTHED + 1), i + 1);
  return some.every(Number.isFinite) ? Math.sqrt(some.reduce((sum, e) => sum + e * e, 0)) / some.length : null;
});

/* A chart: `lines` of points [x, y], each drawn faintly and smoothed, with a band of the mean's standard error if there are
   `errors`; `points`, single ones; `bars`, parts of a sum by x. Pointing at it shows the values of the nearest x. */
function fillCharts(into, charts) {
  const figures = charts.map(([title]) => make("figure", {}, make("figcaption", {}, make("span", {}, title), make("span", { class: "at" }))));
  into.replaceChildren(...figures);
  charts.forEach(([title, content], i) => drawChart(figures[i], title, content));  // as wide as their places are
}

function drawChart(figure, title, { lines = [], points = [], bars = null, top = null, now = null, onpick = null, begin = 1, unit = "iteration", height = 130 }) {
  const says = figure.querySelector(".at");
  const width = Math.max(200, figure.clientWidth - 18), left = 34, bottom = 16;
  const xs = [...new Set([...lines.flatMap(({ line }) => line.map(([x]) => x)), ...(bars || []).map(([x]) => x),
    ...points.map((p) => p.x)])].sort((a, b) => a - b);
  const last = Math.max(begin, ...xs), first = Math.min(begin, ...xs);
  const ys = [...lines.flatMap(({ line }) => line.map(([, y]) => y)), ...points.map((p) => p.y),
    ...(bars || []).map(([, parts]) => parts.reduce((sum, part) => sum + part, 0))];
  const highest = top ?? roundTop(Math.max(1e-9, ...ys));
  const margin = bars ? Math.min(24, ((width - left - 8) / Math.max(1, last)) * 0.5) : 4;
  const x = (n) => left + margin + ((n - first) / Math.max(1, last - first)) * (width - left - 8 - 2 * margin);
  const y = (v) => 6 + (1 - v / highest) * (height - bottom - 6);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const text = (content, attributes) => {
    svg.append(drawn("text", { "font-size": 10, fill: css("--soft"), ...attributes }, document.createTextNode(content)));
  };
  for (const part of [0, 0.5, 1]) {
    const level = y(part * highest);
    svg.append(drawn("line", { x1: left, x2: width - 8, y1: level, y2: level, stroke: css("--line"), "stroke-width": 1 }));
    text(short(part * highest), { x: left - 5, y: level + 4, "text-anchor": "end" });
  }
  for (const n of new Set([first, last])) text(n, { x: x(n), y: height - 3, "text-anchor": n === last && n !== first ? "end" : "start" });
  const wide = Math.max(0.5, 1.6 * margin);
  for (const [n, parts] of bars || []) {
    let under = 0;
    parts.forEach((value, i) => {
      svg.append(drawn("rect", { x: x(n) - wide / 2, y: y(under + value), width: wide, height: y(under) - y(under + value),
        fill: PHASE_COLOURS[i] }));
      under += value;
    });
  }
  for (const { line, colour = css("--accent"), errors } of lines) {
    const path = (points_) => points_.map(([n, v]) => `${x(n)},${y(v)}`).join(" ");
    if (errors && errors.some(Number.isFinite)) {
      const wide = smoothErrors(errors), means = smooth(line);
      const rim = (way) => means.map(([n, v], i) => [n, Math.min(highest, Math.max(0, v + way * (wide[i] ?? 0)))]);
      svg.append(drawn("polygon", { class: "band", points: path([...rim(1), ...rim(-1).reverse()]), fill: colour, opacity: 0.18 }));
    }
    svg.append(drawn("polyline", { points: path(line), fill: "none", stroke: colour, "stroke-width": 1, opacity: 0.35 }),
      drawn("polyline", { class: "smooth", points: path(smooth(line)), fill: "none", stroke: colour, "stroke-width": 2 }));
    if (line.length === 1) svg.append(drawn("rect", { x: x(line[0][0]) - 2, y: y(line[0][1]) - 2, width: 4, height: 4, fill: colour }));
  }
  points.forEach((p) => svg.append(drawn("circle", { cx: x(p.x), cy: y(p.y), r: 4, fill: p.hollow ? css("--card") : p.colour || css("--up"),
    stroke: p.colour || css("--up"), "stroke-width": 1.5 }, drawn("title", {}, document.createTextNode(p.title)))));
  if (now !== null) svg.append(drawn("line", { class: "now", x1: x(now), x2: x(now), y1: 4, y2: height - bottom,
    stroke: css("--accent"), "stroke-dasharray": "3 3" }));
  const rule = drawn("line", { y1: 4, y2: height - bottom, stroke: css("--soft"), visibility: "hidden" });
  svg.append(rule);
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    return xs.reduce((best, n) => (Math.abs(x(n) - at) < Math.abs(x(best) - at) ? n : best), xs[0]);
  };
  svg.addEventListener("mousemove", (event) => {
    const n = nearest(event);
    if (n === undefined) return;
    rule.setAttribute("x1", x(n));
    rule.setAttribute("x2", x(n));
    rule.setAttribute("visibility", "visible");
    says.textContent = valuesAt(n, lines, points, bars, unit);
  });
  svg.addEventListener("mouseleave", () => {
    rule.setAttribute("visibility", "hidden");
    says.textContent = "";
  });
  if (onpick && xs.length) svg.addEventListener("click", (event) => onpick(nearest(event)));
  figure.append(svg);
  if (bars) figure.append(make("div", { class: "key" }, ...PHASES.flatMap((name, i) =>
    [make("span", {}, make("i", { style: `background:${PHASE_COLOURS[i]}` }), name), " "])));
}

function valuesAt(n, lines, points, bars, unit) {
  const parts = lines.flatMap(({ line, name, errors }) => {
    const i = line.findIndex(([x]) => x === n);
    if (i < 0) return [];
    const error = errors && smoothErrors(errors)[i];
    return [`${name ? `${name} ` : ""}${short(line[i][1])} (mean of ${Math.min(i + 1, SMOOTHED)}: ${short(smooth(line)[i][1])}${error ? ` ± ${short(error)}` : ""})`];
  });
  parts.push(...points.filter((p) => p.x === n).map((p) => p.title));
  const bar = (bars || []).find(([x]) => x === n);
  if (bar) parts.push(`${short(bar[1].reduce((a, b) => a + b, 0))}: ${PHASES.map((name, i) => `${name} ${short(bar[1][i])}`).join(", ")}`);
  return `${unit} ${short(n)}: ${parts.join(", ")}`;
}

// A metric over the iterations that have it.
const lineOf = (curves, name, scale = 1) => curves.filter((c) => Number.isFinite(c[name])).map((c) => [c.n, c[name] * scale]);

// Evaluations as points of a chart of success; the hollow ones are the reported panel's. Without those of a panel at
// further temperatures.
function evaluationPoints(one, facts = {}) {
  const names = new Set(one.evaluations.map((e) => e.name));
  const ending = /_t\d+(_\d+)?$/;  // temperature 0.7 is _t0_7
  const isFurther = ({ name = "" }) => ending.test(name) && names.has(name.replace(ending, ""));
  const last = Math.max(...one.evaluations.map((e) => e.step), 1);  // older runs do not say how long an iteration is
  const steps = one.optimizer_steps_per_iteration || (one.curves.length ? last / one.curves.length : 1);
  return one.evaluations.filter((e) => Number.isFinite(e.success_rate) && !isFurther(e)).map((e) => ({ x: e.step / steps, y: e.success_rate * 100,
    hollow: e.name === "report", title: `${e.name || "eval"}, step ${e.step}: ${(e.success_rate * 100).toFixed(1)} %`, ...facts }));
}

const colourOfRun = (i) => css(["--mine", "--other", "--up", "--good", "--bad", "--soft"][i % 6]);

// The charts of runs, a line of each; `indexes` have the standard errors of their success.
function chartsOf(sources, indexes) {
  const several = sources.length > 1, trained = sources.some(({ curves }) => curves.length);
  const facts = (i) => ({ name: several ? sources[i].name : "", colour: several ? colourOfRun(i) : css("--accent") });
  const points = sources.flatMap((source, i) => evaluationPoints(source, several ? { colour: facts(i).colour } : {})
    .map((point) => (several ? { ...point, title: `${source.name}, ${point.title}` } : point)));
  const success = sources.map(({ curves }, i) => {
    const errors = new Map(((indexes[i] || {}).iterations || []).map(({ n, error }) => [n, error]));
    const line = lineOf(curves, "success", 100);
    return { ...facts(i), line, errors: line.map(([n]) => (Number.isFinite(errors.get(n)) ? 100 * errors.get(n) : null)) };
  });
  const banded = success.some(({ errors }) => errors.some(Number.isFinite));
  const told = ["Success (%)", banded ? "band: ± one standard error, by groups" : "", points.length ? "dots: evaluations" : "",
    points.some((p) => p.hollow) ? "circles: reported evaluation set" : ""];
  const charts = [[told.filter(Boolean).join(", "), { lines: success, points, top: 100, begin: points.length || several ? 0 : 1,
    unit: trained ? "iteration" : "step" }]];
  for (const [name, title, scale] of page.charts) {
    const lines = sources.map(({ curves }, i) => ({ ...facts(i), line: lineOf(curves, name, scale) })).filter(({ line }) => line.length);
    if (lines.length) charts.push([scale === 100 ? `${title} (%)` : title, { lines, top: scale === 100 ? 100 : undefined }]);
  }
  return charts;
}

// The first and the last evaluation of the set "report", or else of the last set, of the same tasks at one temperature, as
// in runs/summary.py; `null`: fewer than two.
function evaluated() {
  const named = run.evaluations.filter((e) => Number.isFinite(e.success_rate));
  const last = named.findLast((e) => e.name === "report") || named.at(-1);
  const first = named.find((e) => ["name", "panel", "temperature"].every((key) => e[key] === last[key]));
  return first !== last ? [first, last] : null;
}

// The first and the last iterations, at most `SMOOTHED` at each end, with mean success.
function endsOfTraining() {
  const line = lineOf(run.curves, "success"), part = Math.min(SMOOTHED, Math.floor(line.length / 2));
  const [first, last] = [line.slice(0, part), line.slice(-part)];
  return part ? { part, first, last, from: mean(first.map(([, y]) => y)), to: mean(last.map(([, y]) => y)) } : null;
}

// Success before and after: of the evaluations, or else of the first and the last iterations.
function successes() {
  const pair = evaluated(), ends = endsOfTraining();
  if (pair) {
    const [first, last] = pair;
    return { from: first.success_rate, to: last.success_rate, of: `evaluations at step ${first.step} and ${last.step}${last.episodes ? `, ${last.episodes} episodes each` : ""}` };
  }
  const span = (some) => (some.length > 1 ? `${some[0][0]} to ${some.at(-1)[0]}` : some[0][0]);
  return ends && { from: ends.from, to: ends.to, of: `iterations ${span(ends.first)}, and ${span(ends.last)}` };
}

// What happened, in one sentence: why there was nothing to learn from, or whether success changed, by the less noisy of
// training and evaluations, as in report/plain.py.
function diagnosis() {
  if (!index) return "Reading the run …";
  if (index.verdict) return index.verdict;
  const ends = endsOfTraining(), pair = evaluated();
  if (!ends) return "Too few iterations to tell whether it learns.";
  const errors = index.iterations.map(({ error }) => error), { part } = ends;
  const spread = [...errors.slice(0, part), ...errors.slice(-part)];
  let error = spread.every(Number.isFinite) ? Math.hypot(...spread) / part : NaN, points = 100 * (ends.to - ends.from);
  let [where, span] = ["training", ` between the first and the last ${amountOf(part, "iteration")}`];
  const ofEvaluations = pair && pair.every((e) => e.success_rate_error) ? Math.hypot(...pair.map((e) => e.success_rate_error)) : NaN;
  if (Number.isFinite(ofEvaluations) && !(error <= ofEvaluations)) {
    [error, points, where, span] = [ofEvaluations, 100 * (pair[1].success_rate - pair[0].success_rate), "evaluations", ""];
  }
  const what = Math.abs(points) > 200 * error ? (points > 0 ? "rose" : "fell") : "did not clearly change";
  return `Success in ${where} ${what}: ${signed(points, 1)}${Number.isFinite(error) ? ` ± ${(100 * error).toFixed(1)}` : ""} points${span}.`;
}

function drawSummary(success) {
  const change = run.curves.length || run.evaluations.length ? successes() : null;
  $("diagnosis").replaceChildren(...(change ? [make("p", { class: "change" }, `Success ${percent(change.from)} % → ${percent(change.to)} %`),
    make("p", { class: "note" }, change.of)] : []), make("p", {}, diagnosis()));
  fillCharts($("success"), [[success[0], { ...success[1], height: 90 }]]);
}

function drawCurves() {
  $("curves").hidden = !(run.curves.length || run.evaluations.length);  // neither of a log, nor before a checkpoint
  $("summary").hidden = $("curves").hidden;
  if ($("curves").hidden) return;
  const [success, ...charts] = chartsOf([run], [index]);
  if (run.curves.length) charts.push(["Seconds per iteration", { bars: run.curves.map((c) => [c.n, PHASES.map((name) => c.times[name] || 0)]) }]);
  const shared = { now: shown ? shown.n : null, onpick: (n) => choose(Math.max(1, Math.round(n))) };
  drawSummary([success[0], { ...shared, ...success[1] }]);
  $("curves").classList.toggle("alone", charts.length === 1);
  fillCharts($("curves"), charts.map(([title, content]) => [title, { ...shared, ...content }]));
}

// The curves of several runs in the same charts, or the validations of a model that was taught.
let indexes = [];
async function showRuns() {
  const sources = page.sources.filter(({ curves, evaluations }) => curves.length || evaluations.length);
  $("runs").hidden = Boolean(run) || !sources.length;
  if ($("runs").hidden) return;
  const draw = () => {
    fillCharts($("runs"), chartsOf(sources, sources.map((source) => indexes[page.sources.indexOf(source)])));
    if (sources.length > 1) $("runs").firstChild.append(make("div", { class: "key" }, ...sources.flatMap(({ name }, i) =>
      [make("span", {}, make("i", { style: `background:${colourOfRun(i)}` }), name), " "])));
  };
  draw();
  if (indexes.length || !sources.some(({ iterations }) => iterations && iterations.length)) return;
  indexes = await Promise.all(page.sources.map(({ iterations }, i) => (iterations && iterations.length ? load("index", i) : null)));
  draw();
}
