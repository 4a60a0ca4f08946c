// The numbers of the page, as the program wrote them.

const page = JSON.parse(document.getElementById("data").textContent);

/** Rows of a table as objects with the columns as names. */
const records = (table) =>
  table.rows.map((row) => Object.fromEntries(table.columns.map((name, n) => [name, row[n]])));

const headName = (layer, head) => `L${layer}H${head}`;

/** Rows by the name of their head. */
const byHead = (rows) => new Map(rows.map((row) => [headName(row.layer, row.head), row]));

/** Rows in groups, by what `keyOf(row)` gives. */
function groups(rows, keyOf) {
  const found = new Map();
  for (const row of rows) found.set(keyOf(row), [...(found.get(keyOf(row)) ?? []), row]);
  return found;
}
