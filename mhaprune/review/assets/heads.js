// The heads in a table that can be sorted and searched, and their roles.

function drawHeads(section) {
  const table = headTable();
  const count = element("output", { class: "count" });
  const search = element("input", {
    type: "search",
    id: "search",
    placeholder: "L4, H11, induction",
  });
  const verdict = element(
    "select",
    { id: "verdict" },
    element("option", { value: "" }, "all"),
    VERDICTS.map((name) => element("option", {}, name)),
  );
  const filter = () => {
    let shown = 0;
    for (const { row, line } of table.lines) {
      line.hidden = !matches(row, search.value) || (verdict.value && row.verdict !== verdict.value);
      shown += !line.hidden;
    }
    count.textContent = `${shown} of ${effects.length} heads`;
  };
  search.addEventListener("input", filter);
  verdict.addEventListener("input", filter);
  filter();
  section.append(
    element(
      "div",
      { class: "controls" },
      element("label", {}, "Find", search),
      element("label", {}, "Verdict", verdict),
      count,
    ),
    table.box,
    ...roleTable(),
  );
}

/** Whether a head has every word of the search: a layer (L4), a head (H11) or part of its text. */
function matches(row, search) {
  const text = [
    headName(row.layer, row.head),
    row.verdict,
    roleOf.get(headName(row.layer, row.head))?.role ?? "",
  ]
    .join(" ")
    .toLowerCase();
  return search
    .toLowerCase()
    .split(/\s+/)
    .every((word) => {
      const whole = word.match(/^([lh])(\d+)$/);
      return whole
        ? (whole[1] === "l" ? row.layer : row.head) === Number(whole[2])
        : text.includes(word);
    });
}

function headTable() {
  const nats = (key, name) => ({ name, value: (row) => row[key], text: (value) => signed(value) });
  const roleIn = (row) => roleOf.get(headName(row.layer, row.head));
  const roles = [
    { name: "role", value: (row) => roleIn(row)?.role ?? null },
    {
      name: "role score",
      value: (row) => roleIn(row)?.score ?? null,
      text: (value) => unsigned(value),
    },
  ];
  const columns = [
    { name: "head", value: (row) => headName(row.layer, row.head) },
    { name: "rank", value: (row) => row.rank },
    nats("effect_nats", "effect, nats/token"),
    nats("ci_low", `${confidence} low`),
    nats("ci_high", `${confidence} high`),
    nats("delta_ppl", "change of perplexity"),
    { name: "verdict", value: (row) => row.verdict, text: verdictText },
    { name: "windows", value: (row) => row.num_windows },
    ...(roleOf.size ? roles : []),
  ];
  const table = dataTable("Heads, most important first", columns, effects);
  onSelect((layer, head) => table.mark((row) => row.layer === layer && row.head === head));
  return table;
}

/** What heads of each role are worth, on average; nothing where no roles are known. */
function roleTable() {
  if (!roleOf.size) return [];
  const members = groups(
    effects,
    (row) => roleOf.get(headName(row.layer, row.head))?.role ?? "none",
  );
  const rows = [...members].map(([role, heads]) => ({
    role,
    count: heads.length,
    mean: heads.reduce((sum, row) => sum + row.effect_nats, 0) / heads.length,
    critical: heads.filter((row) => row.verdict === "critical").length,
    redundant: heads.filter((row) => row.verdict === "redundant").length,
  }));
  const columns = [
    { name: "role", value: (row) => row.role },
    { name: "heads", value: (row) => row.count },
    { name: "mean effect, nats/token", value: (row) => row.mean, text: (value) => signed(value) },
    { name: "critical", value: (row) => row.critical },
    { name: "redundant", value: (row) => row.redundant },
  ];
  rows.sort((a, b) => b.mean - a.mean);
  return [element("h3", {}, "Effect by role"), dataTable("Effect by role", columns, rows).box];
}
