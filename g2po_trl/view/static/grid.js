// -- grids ------------------------------------------------------------------------------------------------------------
// An observation that is a board is drawn as one: rows of single characters, with a space between two.

function gridOf(text) {
  const rows = text.trim().split("\n").map((row) => row.trim().split(" "));
  const alike = (row) => row.length === rows[0].length && row.every((cell) => [...cell].length === 1);
  return rows.length > 2 && rows[0].length > 2 && rows.every(alike) ? rows : null;
}

const CELL = 10;
const PIECES = {
  o: { goal: true }, x: { box: true }, "*": { box: true, goal: true }, p: { player: true }, P: { player: true, goal: true },
};

function piecesOf({ box, goal, player }, left, top) {
  const [x, y] = [left + CELL / 2, top + CELL / 2];
  return [
    box ? drawn("rect", { x: left + 1.5, y: top + 1.5, width: CELL - 3, height: CELL - 3, rx: 1, fill: css("--up") }) : null,
    player ? drawn("circle", { cx: x, cy: y, r: 3.4, fill: css("--accent") }) : null,
    goal ? drawn("circle", { cx: x, cy: y, r: 1.9, fill: "none", stroke: css("--text"), "stroke-width": 1.1 }) : null,
  ].filter(Boolean);
}

// Walls, floor (nothing: the background shows) and pieces in a room with walls; in other grids the characters.
function drawGrid(rows) {
  const walled = rows.some((row) => row.includes("#"));
  const [width, height] = [rows[0].length * CELL, rows.length * CELL];
  const cells = rows.flatMap((row, r) => row.flatMap((mark, c) => {
    const [left, top] = [c * CELL, r * CELL];
    if (mark === "#") return [drawn("rect", { x: left, y: top, width: CELL, height: CELL, fill: css("--soft") })];
    if (walled && PIECES[mark]) return piecesOf(PIECES[mark], left, top);
    if (mark === "_" || mark === ".") return [];
    return [drawn("text", { x: left + CELL / 2, y: top + 7.5, "text-anchor": "middle", "font-size": 7,
      "font-family": "monospace", fill: css("--text") }, mark)];
  }));
  return drawn("svg", { viewBox: `0 0 ${width} ${height}`, width: 2 * width, height: 2 * height, class: "board" }, ...cells);
}

// What is seen: a board, or the text.
function observed(text) {
  const rows = gridOf(text);
  if (!rows) return make("pre", {}, text);
  const picture = drawGrid(rows);
  picture.append(drawn("title", {}, text));
  return picture;
}

// A state of a graph as a picture on the colour of its value; nothing where it is no board.
function boardNode(text, size) {
  const rows = gridOf(text);
  if (!rows) return {};
  const source = new XMLSerializer().serializeToString(drawGrid(rows));
  return { shape: "image", image: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(source)}`, size: size + 14,
    shapeProperties: { useBorderWithImage: true } };
}
