// -- the graph of a group, drawn ------------------------------------------------------------------------------------------

function mix(low, high, part) {
  const read = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  const [a, b] = [read(low), read(high)];
  return `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * Math.min(1, Math.max(0, part)))).join(",")})`;
}
// Green means the same in every group: an episode that came through this state succeeded. Its strength is the value, on one scale
// for the iteration: from the lowest reward of an episode, or 0, to the highest.
const valueColour = (part, won) => mix(...(won ? (dark() ? ["#23443c", "#35c48d"] : ["#d9efe5", "#15905f"])
  : (dark() ? ["#2a3442", "#8b98a9"] : ["#eef1f5", "#7d8998"])), part);
function valueScale(one) {
  const rewards = one.groups.flatMap(({ trajectories }) => trajectories.filter(({ outcome }) => !UNCOUNTED.includes(outcome))
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

// Where a step led: a node, or how the episode ended.
const ledTo = (trajectory, s) => (s === trajectory.steps.length - 1 ? trajectory.outcome : trajectory.steps[s].next);
const edgeKey = (trajectory, s) => `${trajectory.steps[s].node}>${ledTo(trajectory, s)}`;

function edgesOf(one) {
  const edges = new Map();
  one.trajectories.forEach((trajectory) => trajectory.steps.forEach((step, s) => {
    if (step.node < 0) return;
    const key = edgeKey(trajectory, s);
    if (!edges.has(key)) edges.set(key, { key, from: step.node, to: ledTo(trajectory, s), count: 0, advantage: 0, faults: 0, actions: new Map() });
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

// Columns by distance from where episodes begin; rows so that neighbours are near each other. In the given room as far as
// labels stay apart.
function places(one, edges, room) {
  const level = new Map();
  let front = [...new Set(one.trajectories.filter((t) => t.steps.length && t.steps[0].node >= 0).map((t) => t.steps[0].node))];
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
  const ends = [...new Set(edges.map((e) => e.to).filter((to) => typeof to === "string"))];
  const tallest = Math.max(1, ends.length, ...columns.map((column) => column.length));
  const within = (low, x, high) => Math.max(low, Math.min(high, x));
  // As far apart as the widest label, and the largest circle with the most lines below it.
  const labels = one.nodes.map((node) => wrapped(node.label)), largest = Math.max(9, ...one.nodes.map(radius));
  const wide = 10 + 6.6 * Math.max(0, ...labels.flat().map((line) => line.length));
  const tall = 16 + largest + Math.max(0, ...one.nodes.map((node, i) => radius(node) + 12 * (labels[i].length + 1)));
  const [fewest, least] = [Math.max(84, wide), Math.max(72, columns.length > 1 || tallest > 1 ? tall : 0)];
  const across = within(fewest, room.width / (columns.length + 0.9), Math.max(170, fewest));
  const down = within(least, room.height / (tallest + 0.5), Math.max(150, least));
  const middle = ((tallest - 1) / 2 + 0.45) * down + 14, at = new Map();
  for (const [node, l] of level) at.set(node, { x: (l + 0.5) * across, y: middle + row.get(node) * down + (l % 2 ? down / 5 : 0) });
  ends.forEach((end, i) => at.set(end, { x: (columns.length + 0.35) * across, y: middle + (i - (ends.length - 1) / 2) * down * 1.2 }));
  return { at, columns, width: (columns.length + 0.9) * across, height: middle + ((tallest - 1) / 2 + 0.75) * down + 26 };
}

// -- SVG --------------------------------------------------------------------------------------------------------------

const wordsIn = (text, attributes = {}) => drawn("text", attributes, document.createTextNode(text));
// A label in lines of a few letters, since states stand beside each other; "drawer 1" is not broken.
const wrapped = (label) => label.replace(/ (\d)/g, "\u00a0$1").match(/[^ ].{0,11}[^ ](?= |$)|[^ ]+/g) || [];
const radius = (node) => 9 + 3.2 * Math.sqrt(Math.min(node.visits, 36));

function drawNode(node, { x, y }, colour, text) {
  const r = radius(node), grid = gridOf(text);
  const shape = (grow, attributes) => (grid ? drawn("rect", { x: x - r - 8 - grow, y: y - r - 8 - grow, width: 2 * (r + 8 + grow),
    height: 2 * (r + 8 + grow), ...attributes }) : drawn("circle", { cx: x, cy: y, r: r + grow, ...attributes }));
  const parts = [shape(5, { class: "ring" }), shape(0, { class: "disc", fill: colour })];
  if (grid) {
    const board = drawGrid(grid.rows);
    for (const [name, value] of Object.entries({ x: x - r - 6, y: y - r - 6, width: 2 * r + 12, height: 2 * r + 12 })) board.setAttribute(name, value);
    parts.push(board);
  }
  const lines = [...(grid ? [] : wrapped(node.label)), node.v.toFixed(1)];
  lines.forEach((line, i) => parts.push(wordsIn(`${line} `, { x, y: y + r + (grid ? 20 : 13) + 12 * i, class: i === lines.length - 1 ? "value" : "" })));
  return parts;
}

// A curve from rim to rim that bends to its right, back edges more; or a loop. With it the place of its middle.
function curveOf(from, to, rimFrom, rimTo) {
  const along = (a, b, by) => {
    const far = Math.hypot(b.x - a.x, b.y - a.y) || 1;
    return { x: a.x + ((b.x - a.x) / far) * by, y: a.y + ((b.y - a.y) / far) * by };
  };
  if (from === to) {
    const [a, b, top] = [{ x: from.x - 5, y: from.y - rimFrom }, { x: from.x + 5, y: from.y - rimFrom }, from.y - rimFrom - 30];
    return { path: `M${a.x},${a.y} C${a.x - 18},${top} ${b.x + 18},${top} ${b.x},${b.y}`, tip: b, angle: 105, middle: { x: from.x, y: from.y - rimFrom - 23 } };
  }
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const bend = dx <= 0 ? 0.3 : 0.13;
  const control = { x: (from.x + to.x) / 2 - dy * bend, y: (from.y + to.y) / 2 + dx * bend };
  const a = along(from, control, rimFrom), b = along(to, control, rimTo + 5), tip = along(to, control, rimTo);
  return { path: `M${a.x},${a.y} Q${control.x},${control.y} ${b.x},${b.y}`, tip,
    angle: (Math.atan2(to.y - control.y, to.x - control.x) * 180) / Math.PI,
    middle: { x: (a.x + 2 * control.x + b.x) / 4, y: (a.y + 2 * control.y + b.y) / 4 } };
}

function drawEdge(edge, { path, tip, angle, middle }, colour) {
  const width = 1 + 1.1 * Math.log2(edge.count + 1), head = 4 + width;
  return [drawn("path", { class: "outline", d: path, "stroke-width": width + 7 }),
    drawn("path", { class: "line", d: path, stroke: colour, "stroke-width": width }),
    drawn("polygon", { points: `0,0 ${-head * 1.6},${head * 0.7} ${-head * 1.6},${-head * 0.7}`, fill: colour,
      transform: `translate(${tip.x},${tip.y}) rotate(${angle})` }),
    drawn("path", { class: "hit", d: path }),
    wordsIn(edge.faults ? "✗" : "", { ...middle, class: "cross" }), wordsIn("", { x: middle.x, y: middle.y - 9, class: "turns" })];
}

// Draws a group; a click on a state or an edge, or Enter, opens it. What is drawn by key is in `drawing`.
let drawing = null;
function drawGraph(into, one, { colourOf, onnode, onedge, onnothing }) {
  const edges = edgesOf(one);
  into.style.height = "";  // as the window allows
  const layout = places(one, edges, { width: into.clientWidth - 4, height: into.clientHeight - 6 });
  const { at, width, height } = layout;
  const scale = Math.max(0.8, Math.min(1, (into.clientWidth - 4) / width, (into.clientHeight - 6) / height));
  const nodes = new Map(), lines = new Map();
  const rim = (id) => (typeof id === "number" ? radius(one.nodes[id]) + (gridOf(shown.texts[one.nodes[id].o]) ? 8 : 0) : 13) + 1;
  for (const edge of edges.filter((e) => at.has(e.from) && at.has(e.to))) {
    const told = `${ofEdge(edge)}\n` + [...edge.actions].map(([action, { count, fault }]) => `${count}× ${action}${fault ? ` (${fault})` : ""}`).join("\n");
    const part = drawn("g", { class: "edge" }, drawn("title", {}, told),
      ...drawEdge(edge, curveOf(at.get(edge.from), at.get(edge.to), rim(edge.from), rim(edge.to)), advantageColour(edge.advantage)));
    part.addEventListener("click", (event) => { event.stopPropagation(); onedge(edge); });
    lines.set(edge.key, part);
  }
  for (const [id, place] of at) {
    const isState = typeof id === "number", node = one.nodes[id];
    const name = isState ? `state ${id + 1}: ${node.label} ${node.v.toFixed(1)}, ${amountOf(node.visits, "visit")}\n` +
      shown.texts[node.o].slice(0, 300) : `end: ${ENDS[id] || id}`;
    const part = drawn("g", { class: `node ${isState ? "" : `end ${id}`}`, ...(isState ? { role: "button", tabindex: nodes.size ? -1 : 0 } : { role: "img" }),
      "aria-label": name }, ...(isState ? [drawn("title", {}, name),
      ...drawNode(node, place, colourOf(node, id), shown.texts[node.o])]
      : [wordsIn(id === "success" ? "★" : "■", { x: place.x, y: place.y + 9, class: "mark" }), wordsIn(ENDS[id] || id, { x: place.x, y: place.y + 26 })]));
    if (isState) part.addEventListener("click", (event) => { event.stopPropagation(); onnode(id); });
    nodes.set(id, part);
  }
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, width: width * scale, height: height * scale, role: "group",
    "aria-label": `state graph: ${amountOf(one.nodes.length, "state")}` }, drawn("g", {}, ...lines.values()), drawn("g", {}, ...nodes.values()));
  svg.addEventListener("click", onnothing);
  svg.addEventListener("keydown", (event) => walk(event, edges));
  into.replaceChildren(svg);
  into.style.height = `${Math.min(into.clientHeight, Math.max(300, height * scale + 6))}px`;
  drawing = { nodes, lines, edges, columns: layout.columns };
}

// In the graph, arrow keys go along the edge taken most, or to the next state of the column.
function walk(event, edges) {
  const on = [...drawing.nodes].find(([, part]) => part === event.target);
  if (!on || event.ctrlKey || event.metaKey || event.altKey) return;
  const [id] = on;
  const most = (some) => some.sort((a, b) => b.count - a.count)[0];
  const column = drawing.columns.find((one) => one.includes(id)) || [id];
  const beside = (way) => column[(column.indexOf(id) + way + column.length) % column.length];
  const goes = { ArrowRight: () => most(edges.filter((e) => e.from === id && e.to !== id && typeof e.to === "number"))?.to,
    ArrowLeft: () => most(edges.filter((e) => e.to === id && e.from !== id))?.from, ArrowUp: () => beside(-1), ArrowDown: () => beside(1) };
  if (event.key === "Enter" || event.key === " ") event.target.dispatchEvent(new MouseEvent("click", { bubbles: true }));
  else if (goes[event.key]) focusNode(goes[event.key]() ?? id);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function focusNode(id) {
  drawing.nodes.forEach((part, other) => { if (typeof other === "number") part.setAttribute("tabindex", other === id ? 0 : -1); });
  drawing.nodes.get(id).focus();
}

// What is open, as outlines: states, edges, and the path of an episode with the numbers of its steps.
function outline({ nodes = [], edges = [], episode = null }) {
  if (!drawing) return;
  const path = new Map(), through = new Set();
  (episode ? episode.steps : []).forEach((step, s) => {
    if (step.node < 0) return;
    const key = edgeKey(episode, s);
    path.set(key, [...(path.get(key) || []), s]);
    through.add(step.node).add(ledTo(episode, s));
  });
  drawing.nodes.forEach((part, id) => {
    part.classList.toggle("selected", nodes.includes(id));
    part.classList.toggle("path", through.has(id));
  });
  drawing.lines.forEach((part, key) => {
    const taken = path.get(key) || [], turn = episode && episode.turns.length && taken.includes(episode.turns[0].step);
    part.classList.toggle("selected", edges.includes(key));
    part.classList.toggle("path", taken.length > 0);
    part.classList.toggle("turn", Boolean(turn));
    part.querySelector(".turns").textContent = taken.length > 3 ? `${taken[0] + 1}…${taken.at(-1) + 1}` : taken.map((s) => s + 1).join(",");
  });
  const first = nodes.length && drawing.nodes.get(nodes[0]);
  if (!first) return;
  const box = first.getBoundingClientRect(), frame = $("graph").getBoundingClientRect();
  if (box.left < frame.left || box.right > frame.right) $("graph").scrollLeft += box.left - frame.left - frame.width / 3;
  if (box.top < frame.top || box.bottom > frame.bottom) $("graph").scrollTop += box.top - frame.top - frame.height / 3;
}
