// -- curves -----------------------------------------------------------------------------------------------------------

const PHASES = ["environment", "generation", "logps", "advantage", "update"];
const PHASE_COLOURS = ["#4c9f70", "#3b7dd8", "#a86fd1", "#888888", "#e08a3c"];

function chart(title, series, { points = [], top = null, bars = null, colours = [] } = {}) {
  const width = Math.max(200, $("curves").clientWidth / 4 - 34), height = 130, left = 34, bottom = 16;
  const numbers = run.curves.map((c) => c.n);
  const last = Math.max(1, ...numbers, ...points.map((p) => p.x));
  const first = points.length ? 0 : 1;
  const sums = bars ? run.curves.map((c) => bars.reduce((sum, name) => sum + (c.times[name] || 0), 0)) : [];
  const values = [...series.flatMap((s) => s.values), ...points.map((p) => p.y), ...sums].filter(Number.isFinite);
  const highest = top ?? (Math.max(0, ...values) || 1) * 1.05;
  const margin = bars ? ((width - left - 8) / last) * 0.5 : 0;
  const x = (n) => left + margin + ((n - first) / Math.max(1, last - first)) * (width - left - 8 - 2 * margin);
  const y = (v) => 6 + (1 - v / highest) * (height - bottom - 6);
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  for (const part of [0, 0.5, 1]) {
    const at = y(part * highest);
    svg.append(drawn("line", { x1: left, x2: width - 8, y1: at, y2: at, stroke: css("--line"), "stroke-width": 1 }));
    const label = drawn("text", { x: left - 5, y: at + 4, "text-anchor": "end", "font-size": 10, fill: css("--soft") });
    label.textContent = Number((part * highest).toPrecision(2));
    svg.append(label);
  }
  for (const n of [first, last]) {
    const anchor = n === last ? "end" : "start";
    const label = drawn("text", { x: x(n), y: height - 3, "text-anchor": anchor, "font-size": 10, fill: css("--soft") });
    label.textContent = n;
    svg.append(label);
  }
  if (bars) {
    const wide = Math.max(0.5, 1.6 * margin);
    run.curves.forEach((c) => {
      let under = 0;
      bars.forEach((name, i) => {
        const value = c.times[name] || 0;
        const tall = y(under) - y(under + value);
        svg.append(drawn("rect", { x: x(c.n) - wide / 2, y: y(under + value), width: wide, height: tall,
          fill: PHASE_COLOURS[i] }));
        under += value;
      });
    });
  }
  series.forEach(({ values: line }, i) => {
    const path = line.map((v, k) => (Number.isFinite(v) ? `${x(numbers[k])},${y(v)}` : null)).filter(Boolean).join(" ");
    svg.append(drawn("polyline", { points: path, fill: "none", stroke: colours[i] || css("--accent"),
      "stroke-width": 1.8, "vector-effect": "non-scaling-stroke" }));
  });
  points.forEach((p) => {
    const title = drawn("title");
    title.textContent = p.title;
    svg.append(drawn("circle", { cx: x(p.x), cy: y(p.y), r: 4, fill: p.hollow ? css("--card") : css("--up"),
      stroke: css("--up"), "stroke-width": 1.5 }, title));
  });
  if (shown) svg.append(drawn("line", { class: "now", x1: x(shown.n), x2: x(shown.n), y1: 4, y2: height - bottom,
    stroke: css("--accent"), "stroke-dasharray": "3 3" }));
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    choose(Math.round(first + ((at - left) / (width - left - 8)) * (last - first)));
  });
  return make("figure", {}, make("figcaption", {}, title), svg);
}

function drawCurves() {
  $("curves").hidden = !(run.curves.length || run.evaluations.length);  // neither of a log, nor before a checkpoint
  if ($("curves").hidden) return;
  const of = (name, scale = 1) => run.curves.map((c) => (c[name] === undefined ? NaN : c[name] * scale));
  const last = Math.max(...run.evaluations.map((e) => e.step), 1);  // older runs do not say how long an iteration is
  const steps = run.optimizer_steps_per_iteration || last / (run.curves.length || 1);
  const points = run.evaluations.filter((e) => Number.isFinite(e.success_rate))
    .map((e) => ({ x: e.step / steps, y: e.success_rate * 100, hollow: e.name === "report",
      title: `${e.name || "eval"}, step ${e.step}: ${(e.success_rate * 100).toFixed(1)} %` }));
  const reported = points.some((p) => p.hollow) ? ", circles: reported panel" : "";
  const charts = [chart(`success of training (%), dots: held-out panel${reported}`,
    [{ values: of("success", 100) }], { top: 100, points })];
  if (run.curves.length) {
    charts.push(chart("turns of an episode", [{ values: of("turns") }]));
    const listed = run.curves.some((c) => c.admissible !== undefined);
    charts.push(chart(`valid completions${listed ? ", dark: admissible actions" : ""} (%)`,
      [{ values: of("valid", 100) }, { values: of("admissible", 100) }], { top: 100, colours: [null, css("--text")] }));
    const bars = chart("seconds of an iteration, by phase", [], { bars: PHASES });
    const key = make("div", { class: "key" });
    PHASES.forEach((name, i) => key.append(make("span", {}, make("i", { style: `background:${PHASE_COLOURS[i]}` }), name), " "));
    bars.append(key);
    charts.push(bars);
  }
  $("curves").replaceChildren(...charts);
}

