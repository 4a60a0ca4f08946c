// Pruning curves with what can be chosen about them, and the tables that go with them.

function drawPruning(section) {
  const { lines, band, numRandom } = curveLines(records(page.curves));
  const shown = { hidden: new Set(), reach: null };
  const box = responsive((width) =>
    readableCurves({
      lines: lines.filter((line) => !shown.hidden.has(line.name)),
      band: shown.hidden.has("random") ? [] : band,
      reach: shown.reach,
      width,
    }),
  );
  const limit = (reach) => {
    shown.reach = reach;
    box.redraw();
  };
  const toggle = (name, visible) => {
    shown.hidden[visible ? "delete" : "add"](name);
    box.redraw();
  };
  section.append(
    note(
      "Solid lines remove the least important heads first, dashed lines the most important. ",
      "Bands are intervals; ",
      numRandom ? `grey is the range of ${numRandom} random orders; ` : "",
      "dotted lines stand at 1%, 5% and 10% more perplexity than the intact model's.",
    ),
    element("div", { class: "controls" }, rangeChoice(limit)),
    box,
    curveLegend(lines, numRandom, toggle),
    ...(page.removable.length ? removableTable() : []),
  );
}

/** Sort the points into lines, one per ordering and direction; random orders become a band. */
function curveLines(rows) {
  const isRandom = (row) => row.ordering.startsWith("random_");
  const random = groups(rows.filter(isRandom), (row) => row.ordering);
  const named = rows.filter((row) => !isRandom(row));
  const orderings = [...new Set(named.map((row) => row.ordering))];
  const lines = [
    ...groups(named, (row) => `${row.ordering}, ${row.direction} important first`),
  ].map(([name, points], n) => {
    const at = orderings.indexOf(points[0].ordering);
    return {
      name,
      points: byCount(points),
      dashed: points[0].direction === "most",
      offset: n,
      colour: CATEGORIES[at % CATEGORIES.length],
      shape: SHAPES[at % SHAPES.length],
    };
  });
  return { lines, band: randomBand([...random.values()].map(byCount)), numRandom: random.size };
}

const byCount = (rows) =>
  new Map(
    rows.toSorted((a, b) => a.num_removed - b.num_removed).map((row) => [row.num_removed, row]),
  );

/** Least and most perplexity of the random orders at every count that all of them have. */
function randomBand(orders) {
  const counts = orders.length
    ? [...orders[0].keys()].filter((count) => orders.every((order) => order.has(count)))
    : [];
  return counts.map((count) => {
    const values = orders.map((order) => order.get(count).perplexity);
    return { count, low: Math.min(...values), high: Math.max(...values) };
  });
}

function rangeChoice(onChoice) {
  const choices = [
    ["everything", null],
    ["up to +100%", 1],
    ["up to +20%", 0.2],
  ];
  const choice = element(
    "select",
    { id: "reach", input: () => onChoice(choices[choice.selectedIndex][1]) },
    choices.map(([text]) => element("option", {}, text)),
  );
  return element("label", {}, "Perplexity", choice);
}

function curveLegend(lines, numRandom, onToggle) {
  const entry = (name, picture) => {
    const box = element("input", {
      type: "checkbox",
      checked: true,
      change: () => onToggle(name, box.checked),
    });
    const text = name === "random" ? `${numRandom} random orders` : name;
    return element(
      "label",
      { class: "check" },
      box,
      drawn("svg", { width: 34, height: 14, "aria-hidden": "true" }, picture),
      text,
    );
  };
  return element(
    "fieldset",
    { class: "curve-legend" },
    element("legend", { class: "unseen" }, "Lines to show"),
    lines.map((line) =>
      entry(line.name, [
        drawn("path", {
          class: line.dashed ? "curve dashed" : "curve",
          stroke: line.colour,
          d: "M1 7H33",
        }),
        pointMark(line.shape, 17, 7, line.colour),
      ]),
    ),
    numRandom
      ? entry("random", drawn("rect", { class: "band", x: 1, y: 2, width: 32, height: 10 }))
      : [],
  );
}

/** The plot with a cursor: by pointer, or by arrow keys once it has the focus. */
function readableCurves({ lines, band, reach, width }) {
  const { plot, x, y, frame } = curvePlot({ lines, band, intact: page.ppl_intact, reach, width });
  const counts = [...new Set(lines.flatMap((line) => [...line.points.keys()]))].sort(
    (a, b) => a - b,
  );
  if (!counts.length) return plot;
  const cursor = plot.appendChild(drawn("g", { class: "cursor" }));
  let at = 0;
  const read = (place, beside) => {
    at = place;
    const tip = curveTip(lines, band, counts[at]);
    cursor.replaceChildren(...cursorMarks(lines, counts[at], x, y, frame));
    const corner = plot.getBoundingClientRect();
    showTooltip(tip, beside ?? new DOMRect(corner.left + x(counts[at]), corner.top + 40, 0, 0));
    return [tip.title, ...tip.pairs.map((pair) => pair.join(" "))].join(", ");
  };
  const nearest = (event) => {
    const pixel = event.clientX - plot.getBoundingClientRect().left;
    const distances = counts.map((count) => Math.abs(x(count) - pixel));
    return distances.indexOf(Math.min(...distances));
  };
  readable(
    plot,
    "Perplexity by number of heads removed; left and right arrow keys read the values",
    {
      point: (event) => read(nearest(event), pointOf(event)),
      step: ({ key }) => read(stepOf(key, at, counts.length) ?? at),
      leave: () => {
        cursor.replaceChildren();
        hideTooltip();
      },
    },
  );
  return plot;
}

function cursorMarks(lines, count, x, y, { top, bottom }) {
  const there = lines
    .filter((line) => line.points.has(count))
    .map((line) => ({ line, at: y(line.points.get(count).perplexity) }));
  return [
    drawn("line", { x1: x(count), x2: x(count), y1: top, y2: bottom }),
    ...there
      .filter(({ at }) => at >= top)
      .map(({ line, at }) => pointMark(line.shape, x(count), at, line.colour, 5)),
  ];
}

function curveTip(lines, band, count) {
  const there = lines
    .filter((line) => line.points.has(count))
    .map((line) => [line.name, line.points.get(count)]);
  const value = ({ perplexity, ci_low: low, ci_high: high }) => {
    const more = perplexity / page.ppl_intact - 1;
    const range = `[${unsigned(low, 2)}, ${unsigned(high, 2)}]`;
    return `${unsigned(perplexity, 2)} ${range} ${percent(more, more < 1 ? 1 : 0)}`;
  };
  const pairs = there
    .toSorted((a, b) => a[1].perplexity - b[1].perplexity)
    .map(([name, row]) => [name, value(row)]);
  const range = band.find((row) => row.count === count);
  if (range)
    pairs.push(["random orders", `${unsigned(range.low, 2)} to ${unsigned(range.high, 2)}`]);
  return { title: count === 1 ? "1 head removed" : `${count} heads removed`, pairs };
}

function removableTable() {
  const columns = [
    { name: "order", value: ([order]) => order },
    ...INCREASES.map((more, n) => ({
      name: percent(more, 0),
      value: ([, counts]) => numeric(counts[n]),
    })),
    { name: "area, nats", value: ([, , area]) => numeric(area), text: (_, [, , area]) => area },
  ];
  return [
    element("h3", {}, "Heads that can go"),
    note(
      "The most heads that can be removed while the upper end of the interval stays below ",
      "1%, 5% or 10% more perplexity; the area is that under the curve, in nats.",
    ),
    dataTable("Heads that can go at more perplexity", columns, page.removable).box,
  ];
}

/** "7" as a number, "0 to 3" as it is. */
const numeric = (text) => (text !== "" && Number.isFinite(Number(text)) ? Number(text) : text);

function drawInteractions(section) {
  const rows = records(page.interactions).sort((a, b) => b.interaction_nats - a.interaction_nats);
  const nats = (key, name) => ({ name, value: (row) => row[key], text: (value) => signed(value) });
  const yes = (key, name) => ({ name, value: (row) => (row[key] ? "yes" : "no") });
  section.append(
    note(
      "What heads cost when they go together, less what each costs alone: positive where they ",
      "stand in for each other.",
    ),
    dataTable(
      "Interactions, in nats per token",
      [
        { name: "heads", value: (row) => row.heads },
        nats("interaction_nats", "interaction"),
        nats("ci_low", `${confidence} low`),
        nats("ci_high", `${confidence} high`),
        nats("joint_nats", "together"),
        nats("sum_nats", "sum of each"),
        yes("redundant_alone", "redundant alone"),
        yes("needed_together", "needed together"),
      ],
      rows,
    ).box,
  );
}

function drawSavings(section) {
  const rows = records(page.savings);
  const count = (key, name) => ({ name, value: (row) => row[key], text: grouped });
  section.append(
    note(
      "What models that really lost the heads take, beside the intact one, on the machine that ",
      "ran this.",
    ),
    dataTable(
      "Savings",
      [
        count("num_removed", "heads removed"),
        count("num_parameters", "parameters"),
        count("kv_bytes_per_token", "KV cache, bytes/token"),
        count("prefill_tokens_per_second", "prefill, tokens/s"),
        count("decode_tokens_per_second", "decode, tokens/s"),
      ],
      rows,
    ).box,
  );
}
