// What scores say of heads, one score at a time as a heat map, all of them in a table.

function drawScores(section) {
  const rows = records(page.scores);
  const names = [...new Set(rows.map((row) => row.score))];
  const values = new Map(
    names.map((name) => [name, byHead(rows.filter((row) => row.score === name))]),
  );
  const place = element("div");
  let map;
  const show = (name) => {
    const scale = scoreScale(values.get(name));
    map = scoreMap(name, values.get(name), scale);
    if (selection.head !== null) map.mark(selection.layer, selection.head);
    const words = `${name}; linear to a tenth of the largest, then logarithmic`;
    place.replaceChildren(map.box, divergingBar(scale, words));
  };
  onSelect((layer, head) => map.mark(layer, head));
  section.append(
    note("What an estimate says of each head; white is zero, and each score has its own scale."),
  );
  if (names.length > 1) section.append(scoreChoice(names, show));
  show(names[0]);
  section.append(place, scoreTable(names, values));
}

function scoreChoice(names, show) {
  const choice = element(
    "select",
    { id: "score", input: () => show(choice.value) },
    names.map((name) => element("option", {}, name)),
  );
  return element("div", { class: "controls" }, element("label", {}, "Score", choice));
}

function scoreScale(byName) {
  const numbers = [...byName.values()].map((row) => row.value);
  const largest = numbers.reduce((most, value) => Math.max(most, Math.abs(value)), 0) || 1;
  return divergingScale(numbers, largest / 10);
}

const scoreMap = (name, byName, scale) =>
  heatmap({
    numLayers: page.num_layers,
    numHeads: page.num_heads,
    label: `${name} by layer and head`,
    onPick: selectHead,
    cellOf: (layer, head) => {
      const row = byName.get(headName(layer, head));
      return row && { colour: scale.colour(row.value), tip: scoreTip(name, row) };
    },
  });

const scoreTip = (name, row) => ({
  title: headName(row.layer, row.head),
  pairs: [
    [name, row.value.toPrecision(4).replace("-", MINUS)],
    ...(row.standard_error === null ? [] : [["standard error", row.standard_error.toPrecision(2)]]),
    ...knownOf(headName(row.layer, row.head)),
  ],
});

function scoreTable(names, values) {
  const heads = [...new Set(names.flatMap((name) => [...values.get(name).keys()]))];
  const valueOf = (name, head, key = "value") => values.get(name).get(head)?.[key] ?? null;
  const columns = [
    { name: "head", value: (head) => head },
    ...names.map((name) => ({
      name,
      value: (head) => valueOf(name, head),
      text: signedBrief,
    })),
  ];
  if (names.length === 1)
    columns.push({
      name: "standard error",
      value: (head) => valueOf(names[0], head, "standard_error"),
      text: brief,
    });
  if (roleOf.size) columns.push({ name: "role", value: (head) => roleOf.get(head)?.role ?? null });
  const sorted = heads.toSorted(
    (a, b) => (valueOf(names[0], b) ?? -Infinity) - (valueOf(names[0], a) ?? -Infinity),
  );
  const table = dataTable(`Scores of heads, by ${names[0]}`, columns, sorted);
  onSelect((layer, head) => table.mark((name) => name === headName(layer, head)));
  return table.box;
}
