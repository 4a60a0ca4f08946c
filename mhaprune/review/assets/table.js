// Tables that sort by a click on a column's name.

/**
 * Make a table. A column has a `name`, a `value` of a row (null where there is none), and may have
 * `text`, from value and row to what is shown, string or node. Numbers stand to the right and tell
 * all their digits in the title. The first column names the row. Returns the `box` to show, the
 * `lines` by row and `mark(isChosen)`.
 */
function dataTable(caption, columns, rows) {
  const body = element("tbody");
  const lines = rows.map((row) => ({ row, line: tableLine(columns, row) }));
  const headers = columns.map((column) => {
    const button = element("button", { type: "button" }, column.name);
    const header = element(
      "th",
      { scope: "col", class: isNumeric(column, rows) ? "number" : null },
      button,
    );
    button.addEventListener("click", () => sortBy(column, header));
    return header;
  });

  function sortBy(column, header) {
    const ascending = header.getAttribute("aria-sort") !== "ascending";
    for (const other of headers) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const compare = comparison(column, ascending ? 1 : -1);
    body.append(...lines.toSorted((a, b) => compare(a.row, b.row)).map(({ line }) => line));
  }

  body.append(...lines.map(({ line }) => line));
  const head = element("thead", {}, element("tr", {}, headers));
  const table = element("table", {}, element("caption", {}, caption), head, body);
  const attributes = { class: "scroll table", tabindex: 0, role: "region", "aria-label": caption };
  const box = element("div", attributes, table);
  return { box, lines, mark: (isChosen) => markLine(box, lines, isChosen) };
}

/** Mark the row that is chosen and scroll to it, inside the table's box. */
function markLine(box, lines, isChosen) {
  for (const { row, line } of lines) {
    line.classList.toggle("selected", isChosen(row));
    if (isChosen(row)) box.scrollTop = line.offsetTop - box.clientHeight / 2;
  }
}

const isNumeric = (column, rows) => rows.some((row) => typeof column.value(row) === "number");

function tableLine(columns, row) {
  return element(
    "tr",
    {},
    columns.map((column, n) => {
      const value = column.value(row);
      const shown = value === null ? "" : column.text ? column.text(value, row) : String(value);
      const isNumber = typeof value === "number";
      const attributes = {
        class: isNumber ? "number" : null,
        title: isNumber ? String(value) : null,
      };
      return n
        ? element("td", attributes, shown)
        : element("th", { scope: "row", ...attributes }, shown);
    }),
  );
}

/** Order rows by a column; those without a value come last either way. */
function comparison({ value }, sign) {
  return (one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === null || b === null) return (a === null) - (b === null);
    return sign * (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
  };
}
