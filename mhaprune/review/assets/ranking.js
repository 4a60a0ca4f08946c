// Verdicts as marks, and all heads by rank with their intervals.

const VERDICTS = ["critical", "useful", "redundant", "harmful", "undetermined"];

/** The mark of a verdict, told by its shape as well as by its colour. */
function verdictMark(verdict, x, y, size = 4.5) {
  const at = { class: `mark ${verdict}` };
  const path = (d) => drawn("path", { ...at, d });
  const up = size * 1.1;
  switch (verdict) {
    case "critical":
      return drawn("circle", { ...at, cx: x, cy: y, r: size });
    case "redundant":
      return drawn("circle", { ...at, cx: x, cy: y, r: size - 0.5 });
    case "useful":
      return path(`M${x - up} ${y + up}L${x + up} ${y + up}L${x} ${y - up}Z`);
    case "harmful":
      return path(`M${x - up} ${y - up}L${x + up} ${y - up}L${x} ${y + up}Z`);
    default:
      return path(
        `M${x - up} ${y - up}L${x + up} ${y + up}M${x - up} ${y + up}L${x + up} ${y - up}`,
      );
  }
}

/** A verdict in a line of text: its mark and its name. */
const verdictText = (verdict) =>
  element(
    "span",
    { class: "verdict" },
    drawn("svg", { width: 14, height: 14, "aria-hidden": "true" }, verdictMark(verdict, 7, 7)),
    verdict,
  );

/** The marks of the verdicts that occur, with counts. */
function verdictLegend(effects) {
  const counted = VERDICTS.map((verdict) => [
    verdict,
    effects.filter((row) => row.verdict === verdict).length,
  ]);
  return element(
    "ul",
    { class: "legend" },
    counted
      .filter(([, count]) => count)
      .map(([verdict, count]) =>
        element("li", {}, verdictText(verdict), element("span", { class: "count" }, String(count))),
      ),
  );
}

/** The plot in a box that scrolls where heads are many. */
function rankingBox(effects, tipOf) {
  const box = responsive((width) => rankingPlot(effects, width, tipOf));
  box.classList.add("ranking");
  box.tabIndex = 0;
  onSelect((layer, head) => {
    for (const row of box.querySelectorAll(".row"))
      row.classList.toggle("selected", row.dataset.name === headName(layer, head));
  });
  return box;
}

/** Draw every head's effect and interval, most important first, over the thresholds. */
function rankingPlot(effects, width, tipOf) {
  const rowHeight = effects.length > 60 ? 14 : 18;
  const height = effects.length * rowHeight + 8;
  const low = effects.reduce((least, row) => Math.min(least, row.ci_low), -2 * page.tolerance_nats);
  const high = effects.reduce((most, row) => Math.max(most, row.ci_high), 2 * page.critical_nats);
  const x = axis(low, high, 64, width - 14, symlog(page.tolerance_nats));
  const y = (place) => 4 + (place + 0.5) * rowHeight;
  const rows = effects.map((row, place) => rankingRow(row, x, y(place), width, rowHeight));
  const plot = drawn(
    "svg",
    {
      width,
      height,
      role: "img",
      class: "ranking-rows",
      "aria-label":
        "Effect of every head with its interval, by rank; the table below has the numbers",
    },
    rankingThresholds(x, height),
    rows,
  );
  tipsInside(plot, (node) => {
    const name = node.closest(".row")?.dataset.name;
    return name && tipOf(name);
  });
  return element("div", {}, rankingAxis(x, low, high, width), plot);
}

function rankingRow(row, x, y, width, height) {
  const name = headName(row.layer, row.head);
  return drawn(
    "g",
    { class: "row", "data-name": name, click: () => selectHead(row.layer, row.head) },
    drawn("rect", { class: "ground", x: 0, y: y - height / 2, width, height }),
    drawn("text", { x: 52, y: y + 4, "text-anchor": "end" }, name),
    drawn("line", {
      class: `reach ${row.verdict}`,
      x1: x(row.ci_low),
      x2: x(row.ci_high),
      y1: y,
      y2: y,
    }),
    verdictMark(row.verdict, x(row.effect_nats), y, height > 15 ? 4.5 : 3.5),
  );
}

function rankingThresholds(x, height) {
  const [low, high] = [x(-page.tolerance_nats), x(page.tolerance_nats)];
  const upright = (value, kind) =>
    drawn("line", { class: kind, x1: x(value), x2: x(value), y1: 0, y2: height });
  return [
    drawn("rect", { class: "tolerance", x: low, y: 0, width: high - low, height }),
    upright(0, "zero"),
    upright(page.critical_nats, "threshold"),
  ];
}

/** The axis, in a picture of its own that stays on top while the rows scroll. */
function rankingAxis(x, low, high, width) {
  const critical = x(page.critical_nats);
  const ticks = symlogTicks(page.tolerance_nats, low, high).flatMap((tick) => [
    drawn("line", { class: "tick", x1: x(tick), x2: x(tick), y1: 33, y2: 38 }),
    drawn("text", { x: x(tick), y: 29, "text-anchor": "middle" }, signedBrief(tick)),
  ]);
  return drawn(
    "svg",
    { class: "ranking-axis", width, height: 39, "aria-hidden": "true" },
    ticks,
    drawn("text", { x: x(0), y: 12, "text-anchor": "middle", class: "soft" }, "tolerance"),
    drawn("text", { x: critical + 4, y: 12, class: "soft" }, "critical"),
    drawn("line", { class: "threshold", x1: critical, x2: critical, y1: 2, y2: 39 }),
    drawn("line", { class: "tick", x1: 64, x2: width - 14, y1: 38.5, y2: 38.5 }),
  );
}
