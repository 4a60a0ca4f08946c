// How well each score agrees with the measured effects, and what it costs.

function drawAgreement(section) {
  const rows = records(page.agreement).sort((a, b) => b.spearman - a.spearman);
  section.append(
    note(
      "Spearman correlation of each score, from calibration text, with the effects measured on ",
      `evaluation text, with its ${confidence} interval; and the same over what the score costs.`,
    ),
    element(
      "div",
      { class: "pair" },
      responsive((width) => spearmanPlot(rows, width)),
      responsive((width) => costPlot(rows, width)),
    ),
    agreementTable(rows),
  );
}

const agreementTip = (row) => ({
  title: row.score,
  pairs: [
    ["Spearman", unsigned(row.spearman, 3)],
    [`${confidence} interval`, interval(row.ci_low, row.ci_high, (value) => unsigned(value, 3))],
    ["cost", `${grouped(row.forward_equivalents)} forward passes`],
  ],
});

/** Tips for marks that carry the number of their row. */
function tipsOfRows(plot, rows, tipOf) {
  tipsInside(plot, (node) => {
    const at = node.closest("[data-row]")?.dataset.row;
    return at && tipOf(rows[at]);
  });
  return plot;
}

function spearmanPlot(rows, width) {
  const longest = rows.reduce((most, row) => Math.max(most, textWidth(row.score)), 0);
  const left = Math.min(longest + 18, width / 2);
  const bottom = rows.length * 26 + 12;
  const low = Math.min(0, ...rows.map((row) => row.ci_low));
  const x = axis(low, 1, left, width - 14);
  const marks = rows.map((row, n) => {
    const y = 20 + n * 26;
    return drawn(
      "g",
      { class: "row", "data-row": n },
      drawn("rect", { class: "ground", x: 0, y: y - 13, width, height: 26 }),
      drawn("text", { x: left - 12, y: y + 4, "text-anchor": "end" }, row.score),
      drawn("line", { class: "reach", x1: x(row.ci_low), x2: x(row.ci_high), y1: y, y2: y }),
      drawn("circle", { class: "dot", cx: x(row.spearman), cy: y, r: 4.5 }),
    );
  });
  const plot = drawn(
    "svg",
    { width, height: bottom + 44, role: "img", "aria-label": "Spearman correlation of each score" },
    acrossAxis(x, evenTicks(low, 1, width < 400 ? 3 : 5), 6, bottom),
    marks,
    drawn(
      "text",
      { class: "soft", x: (left + width - 14) / 2, y: bottom + 38, "text-anchor": "middle" },
      "Spearman correlation",
    ),
  );
  return tipsOfRows(plot, rows, agreementTip);
}

/** Upright grid lines with their numbers below, where there is room for them. */
function acrossAxis(x, ticks, top, bottom) {
  let free = -Infinity;
  return ticks.map((tick) => {
    const named = x(tick) - free >= 32;
    if (named) free = x(tick);
    return drawn(
      "g",
      {},
      drawn("line", {
        class: tick === 0 ? "zero" : "grid",
        x1: x(tick),
        x2: x(tick),
        y1: top,
        y2: bottom,
      }),
      named
        ? drawn("text", { x: x(tick), y: bottom + 18, "text-anchor": "middle" }, brief(tick))
        : [],
    );
  });
}

/** Level grid lines with their numbers to the left. */
function upAxis(y, ticks, left, right, text = brief) {
  return ticks.map((tick) =>
    drawn(
      "g",
      {},
      drawn("line", {
        class: tick === 0 ? "zero" : "grid",
        x1: left,
        x2: right,
        y1: y(tick),
        y2: y(tick),
      }),
      drawn("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, text(tick)),
    ),
  );
}

const shownCost = (row) => Math.max(row.forward_equivalents, 0.5); // nothing has no logarithm

function costPlot(rows, width) {
  const [left, top, height] = [52, 12, Math.max(rows.length * 26 + 12, 260)];
  const costs = rows.map(shownCost);
  const [least, most] = [Math.min(...costs) / 1.5, Math.max(...costs) * 1.5];
  const low = Math.min(0, ...rows.map((row) => row.ci_low));
  const x = axis(least, most, left, width - 14, Math.log10);
  const y = axis(low, 1, height, top);
  const marks = rows.map((row, n) =>
    drawn(
      "g",
      { "data-row": n },
      drawn("line", {
        class: "reach",
        x1: x(shownCost(row)),
        x2: x(shownCost(row)),
        y1: y(row.ci_low),
        y2: y(row.ci_high),
      }),
      drawn("circle", { class: "dot", cx: x(shownCost(row)), cy: y(row.spearman), r: 4.5 }),
    ),
  );
  const plot = drawn(
    "svg",
    { width, height: height + 44, role: "img", "aria-label": "Spearman correlation over cost" },
    acrossAxis(x, logTicks(least, most), top, height),
    upAxis(y, evenTicks(low, 1, 4), left, width - 14),
    marks,
    costNames(rows, x, y, width),
    drawn(
      "text",
      { class: "soft", x: (left + width - 14) / 2, y: height + 38, "text-anchor": "middle" },
      `forward passes over the text${costs.includes(0.5) ? " (0 drawn at 0.5)" : ""}`,
    ),
  );
  return tipsOfRows(plot, rows, agreementTip);
}

/** Names beside the points, from the top down, each low enough not to lie on another. */
function costNames(rows, x, y, width) {
  const taken = [];
  return rows.map((row) => {
    const at = x(shownCost(row));
    const long = textWidth(row.score);
    const toLeft = at > width * 0.6;
    const left = toLeft ? at - 9 - long : at + 9;
    const place = { left, right: left + long, y: y(row.spearman) + 4 };
    const isOn = (other) =>
      place.left < other.right && other.left < place.right && Math.abs(other.y - place.y) < 13;
    while (taken.some(isOn)) place.y += 1;
    taken.push(place);
    const anchor = toLeft ? "end" : "start";
    return textAt(row.score, toLeft ? at - 9 : at + 9, place.y, {
      class: "names",
      "text-anchor": anchor,
    });
  });
}

function agreementTable(rows) {
  const number = (key, name = key.replaceAll("_", " "), text = (value) => unsigned(value, 3)) => ({
    name,
    value: (row) => row[key],
    text,
  });
  return dataTable(
    "Agreement of scores with measured effects",
    [
      { name: "score", value: (row) => row.score },
      number("spearman", "Spearman"),
      number("ci_low", `${confidence} low`),
      number("ci_high", `${confidence} high`),
      number("kendall", "Kendall"),
      number("kendall_low", "Kendall low"),
      number("kendall_high", "Kendall high"),
      number("top_k_overlap", "top heads in common"),
      number("sign_agreement"),
      number("reliability"),
      number("forward_equivalents", "forward passes", grouped),
      number("seconds", "seconds", (value) => unsigned(value, 1)),
    ],
    rows,
  ).box;
}
