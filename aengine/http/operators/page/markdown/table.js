// Tables in GitHub's format: a header, a line of dashes with the columns' alignment, rows.

const DELIMITER = /^:?-+:?$/;
const ALIGNMENT = { ":-": "left", "-:": "right", "::": "center" };

/** Whether the line at `at` is a table's header: the next line has a delimiter for each cell. */
function opensTable(lines, at) {
  const [header, delimiters] = [lines[at], lines[at + 1] ?? ""];
  if (!header.includes("|") || !delimiters.includes("|") || !delimiters.includes("-")) return false;
  const cells = cellsOf(delimiters);
  return cells.every((cell) => DELIMITER.test(cell)) && cells.length === cellsOf(header).length;
}

/** The cells of a line. `\|` is not a border, even within code. */
function cellsOf(line) {
  const cells = line.trim().split(/(?<!\\)\|/);
  if (cells[0] === "") cells.shift();
  if (cells.at(-1) === "") cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

/** Short rows are not filled, because a text could then make many more cells than it has characters. */
function renderTable(source, markdown) {
  const [header, delimiters, ...rows] = source.split("\n").map(cellsOf);
  const classes = delimiters.map((cell) => ALIGNMENT[cell.at(0) + cell.at(-1)]);
  const row = (cells, tag, properties) =>
    make("tr", {}, ...cells.slice(0, header.length).map((cell, column) => {
      const className = classes[column] && { className: classes[column] };
      return make(tag, { ...properties, ...className }, ...inline(cell, markdown));
    }));
  const head = make("thead", {}, row(header, "th", { scope: "col" }));
  const table = make("table", {}, head, make("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
  return make("div", { className: "table" }, table);
}
