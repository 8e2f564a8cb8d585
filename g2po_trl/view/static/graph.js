// -- the graph of a group ---------------------------------------------------------------------------------------------

function mix(low, high, part) {
  const read = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const [a, b] = [read(low), read(high)];
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * Math.min(1, Math.max(0, part)))).join(",")})`;
}
// Green means the same in every group: an episode that came through this state won. Its strength is the value, on one scale
// for the iteration: from the lowest reward of an episode, or 0, to the highest.
const valueColour = (part, won) => mix(...(won ? (dark() ? ["#23443c", "#35c48d"] : ["#d9efe5", "#15905f"])
  : (dark() ? ["#2a3442", "#8b98a9"] : ["#eef1f5", "#7d8998"])), part);
function valueScale(one) {
  const rewards = one.groups.flatMap(({ trajectories }) => trajectories.filter(({ outcome }) => !["error", "lost"].includes(outcome))
    .map(({ reward }) => reward));
  return [Math.min(0, ...rewards), Math.max(0, ...rewards)];
}
const wonThrough = (one) => new Set(one.trajectories.filter(({ outcome }) => outcome === "success")
  .flatMap(({ steps }) => steps.map(({ node }) => node)));
function advantageColour(x) {
  if (x === null || Math.abs(x) < 0.005) return dark() ? "#56616f" : "#b9c0ca";
  const part = Math.min(1, Math.abs(x) / 2);
  return mix(dark() ? "#56616f" : "#b9c0ca", x > 0 ? css("--up") : css("--down"), 0.25 + 0.75 * part);
}

function edgesOf(one) {
  const edges = new Map();
  one.trajectories.forEach((trajectory) => trajectory.steps.forEach((step, s) => {
    if (step.node < 0) return;
    const ends = s === trajectory.steps.length - 1;
    const to = ends ? trajectory.outcome : step.next;
    const key = `${step.node}>${to}`;
    if (!edges.has(key)) edges.set(key, { from: step.node, to, count: 0, advantage: 0, faults: 0, actions: new Map() });
    const edge = edges.get(key);
    edge.count += 1;
    edge.advantage += total(step) ?? NaN;
    const fault = faultOf(step);
    edge.faults += fault ? 1 : 0;
    edge.actions.set(step.a, { count: (edge.actions.get(step.a)?.count || 0) + 1, fault });
  }));
  edges.forEach((edge) => { edge.advantage = Number.isFinite(edge.advantage) ? edge.advantage / edge.count : null; });
  return [...edges.values()];
}

// Columns by distance from where episodes begin; rows so that neighbours are near each other.
function places(one, edges) {
  const level = new Map();
  let front = [...new Set(one.trajectories.filter((t) => t.steps.length && t.steps[0].node >= 0)
    .map((t) => t.steps[0].node))];
  front.forEach((n) => level.set(n, 0));
  while (front.length) {
    const next = [];
    for (const edge of edges) {
      if (front.includes(edge.from) && typeof edge.to === "number" && !level.has(edge.to)) {
        level.set(edge.to, level.get(edge.from) + 1);
        next.push(edge.to);
      }
    }
    front = next;
  }
  const columns = [];
  for (const [node, at] of level) (columns[at] = columns[at] || []).push(node);
  const row = new Map();
  columns.forEach((column) => column.forEach((node, i) => row.set(node, i - (column.length - 1) / 2)));
  for (let sweep = 0; sweep < 4; sweep++) {
    for (const column of columns) {
      const wanted = new Map(column.map((node) => {
        const near = edges.filter((e) => e.from === node || e.to === node)
          .map((e) => row.get(e.from === node ? e.to : e.from)).filter((r) => r !== undefined);
        return [node, near.length ? near.reduce((a, b) => a + b, 0) / near.length : row.get(node)];
      }));
      column.sort((a, b) => wanted.get(a) - wanted.get(b));
      column.forEach((node, i) => row.set(node, i - (column.length - 1) / 2));
    }
  }
  // Wide enough for a label and as tall as the canvas is, so that fitting it shrinks nothing more than it must.
  const tallest = Math.max(2, ...columns.map((column) => column.length));
  const across = columns.length > 8 ? 80 : 105;
  const down = Math.max(64, Math.min(190, (columns.length * across * 0.62) / tallest));
  const at = new Map();
  for (const [node, l] of level) at.set(node, { x: l * across, y: row.get(node) * down + (l % 2 ? down / 4 : 0) });
  const ends = [...new Set(edges.map((e) => e.to).filter((to) => typeof to === "string"))];
  ends.forEach((end, i) => at.set(end, { x: columns.length * across, y: (i - (ends.length - 1) / 2) * 2 * down }));
  return at;
}

