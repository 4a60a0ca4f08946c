// Perplexity over heads removed, as a picture that can be read point by point.

const INCREASES = [0.01, 0.05, 0.1];
const SHAPES = ["circle", "square", "up", "down", "diamond"];

/**
 * Draw lines of `points` by count (a Map), each with `colour`, `shape` and `dashed`; `band` is the
 * range of random orders as rows of count, low, high. `reach` caps the perplexity, as a share above
 * the intact one; null shows all of it.
 */
function curvePlot({ lines, band, intact, reach, width }) {
  const frame = {
    left: 58,
    right: width - 46,
    top: 12,
    bottom: Math.min(Math.max(width * 0.5, 300), 460),
  };
  const { left, right, top, bottom } = frame;
  const rows = lines.flatMap((line) => [...line.points.values()]);
  const counts = [1, ...rows.map((row) => row.num_removed), ...band.map((row) => row.count)];
  const last = Math.max(...counts);
  const [least, most] = perplexityRange(rows, band, intact, reach);
  const x = axis(0, last, left, right);
  const y = axis(least, most, bottom, top, Math.log10);
  const inside = drawn(
    "g",
    { "clip-path": "url(#curve-frame)" },
    area(
      "band",
      band.map((row) => [x(row.count), y(row.low), y(row.high)]),
    ),
    lines.map((line) => curveLine(line, x, y)),
  );
  const plot = drawn(
    "svg",
    { width, height: bottom + 44, role: "img" },
    drawn(
      "clipPath",
      { id: "curve-frame" },
      drawn("rect", { x: left, y: top - 6, width: right - left + 8, height: bottom - top + 6 }),
    ),
    acrossAxis(x, evenTicks(0, last, width < 500 ? 4 : 8).filter(Number.isInteger), top, bottom),
    upAxis(y, logTicks(least, most), left, right),
    increaseLines(intact, most, y, left, right),
    inside,
    axisNames("heads removed", "perplexity", frame),
  );
  return { plot, x, y, frame };
}

/** Least and most perplexity to show. */
function perplexityRange(rows, band, intact, reach) {
  const all = [
    intact,
    ...rows.flatMap((row) => [row.ci_low, row.ci_high, row.perplexity]),
    ...band.flatMap((row) => [row.low, row.high]),
  ];
  const least = all.reduce((a, b) => Math.min(a, b));
  if (reach === null) return [0.97 * least, 1.05 * all.reduce((a, b) => Math.max(a, b))];
  return [Math.max(0.995 * least, intact / (1 + reach)), intact * (1 + reach)];
}

const axisNames = (across, up, { left, right, top, bottom }) => [
  textAt(across, (left + right) / 2, bottom + 38, { class: "soft", "text-anchor": "middle" }),
  textAt(up, 0, 0, {
    class: "soft",
    "text-anchor": "middle",
    transform: `translate(13 ${(top + bottom) / 2}) rotate(-90)`,
  }),
];

/** Dotted lines at more perplexity than intact, named where there is room for it. */
function increaseLines(intact, most, y, left, right) {
  let free = -Infinity;
  return INCREASES.filter((more) => intact * (1 + more) <= most)
    .toReversed()
    .map((more) => {
      const at = y(intact * (1 + more));
      const named = at - free >= 12;
      if (named) free = at;
      return drawn(
        "g",
        {},
        drawn("line", { class: "increase", x1: left, x2: right, y1: at, y2: at }),
        named ? drawn("text", { class: "soft", x: right + 8, y: at + 4 }, percent(more, 0)) : [],
      );
    });
}

/** A filled stretch between lows and highs. */
function area(kind, places, colour) {
  if (!places.length) return [];
  const there = places.map(([x, low]) => `${x} ${low}`);
  const back = places.toReversed().map(([x, , high]) => `${x} ${high}`);
  return drawn("path", { class: kind, fill: colour, d: `M${[...there, ...back].join("L")}Z` });
}

function curveLine({ points, colour, shape, dashed, offset }, x, y) {
  const rows = [...points.values()];
  const every = Math.max(Math.ceil(rows.length / 6), 1);
  const marked = rows.filter((row, n) => (n + offset) % every === 0);
  return drawn(
    "g",
    {},
    area(
      "interval",
      rows.map((row) => [x(row.num_removed), y(row.ci_low), y(row.ci_high)]),
      colour,
    ),
    drawn("path", {
      class: dashed ? "curve dashed" : "curve",
      stroke: colour,
      d: `M${rows.map((row) => `${x(row.num_removed)} ${y(row.perplexity)}`).join("L")}`,
    }),
    marked.map((row) => pointMark(shape, x(row.num_removed), y(row.perplexity), colour)),
  );
}

/** A mark of a shape around a point. */
function pointMark(shape, x, y, colour, size = 4) {
  const more = size + 1;
  const round = `a${size} ${size} 0 1 0`;
  const d = {
    circle: `M${x - size} ${y}${round} ${2 * size} 0${round} ${-2 * size} 0`,
    square: `M${x - size} ${y - size}h${2 * size}v${2 * size}h${-2 * size}`,
    up: `M${x} ${y - more}l${more} ${2 * size}h${-2 * more}`,
    down: `M${x} ${y + more}l${more} ${-2 * size}h${-2 * more}`,
    diamond: `M${x} ${y - more}l${more} ${more}l${-more} ${more}l${-more} ${-more}`,
  }[shape];
  return drawn("path", { class: "point", d: `${d}Z`, fill: colour });
}
