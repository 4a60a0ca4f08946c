// The runs of a sweep: their numbers in one table, their effects as small maps on one scale.

const runs = page.runs.map((run) => ({ ...run, rows: records(run.effects) }));

function drawRuns(section) {
  const link = (run) => element("a", { href: run.href }, run.name);
  const number = (value) => (Number.isInteger(value) ? grouped(value) : unsigned(value));
  const columns = [
    { name: "run", value: (run) => run.name, text: (_, run) => link(run) },
    ...page.setting_names.map((name) => ({ name, value: (run) => run.settings[name] ?? null })),
    ...page.number_names.map((name) => ({
      name,
      value: (run) => run.numbers[name] ?? null,
      text: number,
    })),
  ];
  section.append(
    dataTable("Runs of this sweep; each name leads to the run's own page", columns, runs).box,
  );
}

function drawMaps(section) {
  const measured = runs.filter((run) => run.rows.length);
  const threshold = measured.reduce((most, run) => Math.max(most, run.tolerance_nats), 0);
  const values = measured.flatMap((run) => run.rows.map((row) => row.effect_nats));
  const scale = divergingScale(values, threshold);
  section.append(
    note("One scale of colours for all runs. A dot marks a critical head, a ring a redundant one."),
    element(
      "div",
      { class: "small-maps" },
      measured.map((run) => smallMap(run, scale)),
    ),
    divergingBar(scale, "effect, nats/token; linear to the tolerance, then logarithmic"),
  );
}

function smallMap(run, scale) {
  const found = byHead(run.rows);
  const map = heatmap({
    numLayers: run.num_layers,
    numHeads: run.num_heads,
    label: `Effects of ${run.name}`,
    small: true,
    cellOf: (layer, head) => {
      const row = found.get(headName(layer, head));
      const pairs = row && [
        ["effect", `${signed(row.effect_nats)} nats/token`],
        ["interval", interval(row.ci_low, row.ci_high)],
        ["verdict", row.verdict],
      ];
      return (
        row && {
          colour: scale.colour(row.effect_nats),
          mark: row.verdict,
          tip: { title: headName(layer, head), pairs },
        }
      );
    },
  });
  return element(
    "figure",
    {},
    element("figcaption", {}, element("a", { href: run.href }, run.name)),
    map.box,
  );
}

const DRAW = { runs: drawRuns, maps: drawMaps };

for (const section of document.querySelectorAll("main > section")) DRAW[section.id]?.(section);
