// -- grids ------------------------------------------------------------------------------------------------------------
// An observation that begins with a board is drawn: rows of single characters, with a space between two.

// The rows, and the text after them; null if there is no board.
function gridOf(text) {
  const lines = text.trim().split("\n");
  const cells = lines.map((line) => line.trim().split(" "));
  const other = cells.findIndex((row) => row.length !== cells[0].length || row.some((cell) => [...cell].length !== 1));
  const rows = other < 0 ? cells : cells.slice(0, other);
  return rows.length > 2 && rows[0].length > 2 ? { rows, rest: lines.slice(rows.length).join("\n") } : null;
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
    if (mark === "#") return [drawn("rect", { x: left, y: top, width: CELL, height: CELL, fill: css("--soft"),
      "shape-rendering": "crispEdges" })];
    if (walled && PIECES[mark]) return piecesOf(PIECES[mark], left, top);
    if (mark === "_" || mark === ".") return [];
    return [drawn("text", { x: left + CELL / 2, y: top + 7.5, "text-anchor": "middle", "font-size": 7,
      "font-family": "monospace", fill: css("--text") }, mark)];
  }));
  return drawn("svg", { viewBox: `0 0 ${width} ${height}`, width: 2 * width, height: 2 * height, class: "board" }, ...cells);
}

// What is seen: a board and the text after it, or the text.
function observed(text) {
  const grid = gridOf(text);
  if (!grid) return make("pre", {}, text);
  const picture = drawGrid(grid.rows);
  picture.append(drawn("title", {}, text));
  return grid.rest ? make("div", {}, picture, make("pre", {}, grid.rest)) : picture;
}
