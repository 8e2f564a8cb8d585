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

/* A chart: `lines` of points [x, y], each drawn faintly and smoothed; `points`, single ones; `bars`, parts of a sum by x.
   Pointing at it shows the values of the nearest x. */
function fillCharts(into, charts) {
  const figures = charts.map(([title]) => make("figure", {}, make("figcaption", {}, make("span", {}, title), make("span", { class: "at" }))));
  into.replaceChildren(...figures);
  charts.forEach(([title, content], i) => drawChart(figures[i], title, content));  // as wide as their places are
}

function drawChart(figure, title, { lines = [], points = [], bars = null, top = null, now = null, onpick = null, begin = 1 }) {
  const says = figure.querySelector(".at");
  const width = Math.max(200, figure.clientWidth - 18), height = 130, left = 34, bottom = 16;
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
  for (const { line, colour = css("--accent") } of lines) {
    const path = (points_) => points_.map(([n, v]) => `${x(n)},${y(v)}`).join(" ");
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
    says.textContent = valuesAt(n, lines, points, bars);
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

function valuesAt(n, lines, points, bars) {
  const parts = lines.flatMap(({ line, name }) => {
    const i = line.findIndex(([x]) => x === n);
    return i < 0 ? [] : [`${name ? `${name} ` : ""}${short(line[i][1])} (mean of ${Math.min(i + 1, SMOOTHED)}: ${short(smooth(line)[i][1])})`];
  });
  parts.push(...points.filter((p) => p.x === n).map((p) => p.title));
  const bar = (bars || []).find(([x]) => x === n);
  if (bar) parts.push(`${short(bar[1].reduce((a, b) => a + b, 0))}: ${PHASES.map((name, i) => `${name} ${short(bar[1][i])}`).join(", ")}`);
  return `iteration ${short(n)}: ${parts.join(", ")}`;
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
  const steps = one.optimizer_steps_per_iteration || last / (one.curves.length || 1);
  return one.evaluations.filter((e) => Number.isFinite(e.success_rate) && !isFurther(e)).map((e) => ({ x: e.step / steps, y: e.success_rate * 100,
    hollow: e.name === "report", title: `${e.name || "eval"}, step ${e.step}: ${(e.success_rate * 100).toFixed(1)} %`, ...facts }));
}

function drawCurves() {
  $("curves").hidden = !(run.curves.length || run.evaluations.length);  // neither of a log, nor before a checkpoint
  if ($("curves").hidden) return;
  const points = evaluationPoints(run);
  const reported = points.some((p) => p.hollow) ? ", circles: reported panel" : "";
  const charts = [[`Success (%)${points.length ? `, dots: held-out panel${reported}` : ""}`,
    { lines: [{ line: lineOf(run.curves, "success", 100) }], points, top: 100, begin: points.length ? 0 : 1 }]];
  if (run.curves.length) {
    const admissible = lineOf(run.curves, "admissible", 100);
    charts.push(["Turns of an episode", { lines: [{ line: lineOf(run.curves, "turns") }] }],
      [`Valid completions${admissible.length ? ", dark: admissible actions" : ""} (%)`, { top: 100, lines: [
        { name: admissible.length ? "valid" : "", line: lineOf(run.curves, "valid", 100) },
        ...(admissible.length ? [{ name: "admissible", line: admissible, colour: css("--text") }] : [])] }],
      ["Seconds of an iteration", { bars: run.curves.map((c) => [c.n, PHASES.map((name) => c.times[name] || 0)]) }]);
  }
  const shared = { now: shown ? shown.n : null, onpick: (n) => choose(Math.max(1, Math.round(n))) };
  $("curves").classList.toggle("alone", charts.length === 1);
  fillCharts($("curves"), charts.map(([title, content]) => [title, { ...shared, ...content }]));
}
