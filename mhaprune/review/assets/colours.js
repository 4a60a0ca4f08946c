// Colours that mean numbers. They are the same in light and dark, and for any colour vision.

/** ColorBrewer's BrBG, brown over white to green: harmful, nothing, useful. */
const diverging = ramp([
  "#543005",
  "#8c510a",
  "#bf812d",
  "#dfc27d",
  "#f6e8c3",
  "#f5f5f5",
  "#c7eae5",
  "#80cdc1",
  "#35978f",
  "#01665e",
  "#003c30",
]);

/** White to dark blue: an attention weight from 0 to 1. */
const sequential = ramp([
  "#ffffff",
  "#deebf7",
  "#c6dbef",
  "#9ecae1",
  "#6baed6",
  "#4292c6",
  "#2171b5",
  "#08519c",
  "#08306b",
]);

/** Okabe and Ito's colours, without yellow and black, which vanish on one ground or the other. */
const CATEGORIES = [
  "#0072b2",
  "#d55e00",
  "#009e73",
  "#cc79a7",
  "#e69f00",
  "#56b4e9",
  "#8c6bb1",
  "#7f7f7f",
];

/** From a place between 0 and 1 to red, green, blue, by straight lines between the stops. */
function ramp(stops) {
  const colours = stops.map((stop) => [1, 3, 5].map((at) => parseInt(stop.slice(at, at + 2), 16)));
  return (place) => {
    const at = Math.min(Math.max(place, 0), 1) * (colours.length - 1);
    const left = Math.min(Math.floor(at), colours.length - 2);
    return colours[left].map((value, channel) =>
      Math.round(value + (at - left) * (colours[left + 1][channel] - value)),
    );
  };
}

const css = (rgb) => `rgb(${rgb.join(" ")})`;

/** Black or white, whichever is read more easily on the colour. */
const inkOn = ([red, green, blue]) =>
  0.299 * red + 0.587 * green + 0.114 * blue > 140 ? "#000" : "#fff";

/** A colour for each value, white at zero: linear up to the threshold, logarithmic beyond. */
function divergingScale(values, threshold) {
  const reach = values.reduce((most, value) => Math.max(most, Math.abs(value)), 2 * threshold);
  const place = axis(-reach, reach, 0, 1, symlog(threshold));
  return { threshold, reach, place, colour: (value) => diverging(place(value)) };
}

/** A bar that shows the colours of a scale, with ticks. */
function divergingBar({ threshold, reach, place }, label) {
  const ticks = symlogTicks(threshold, -reach, reach).map((tick) => [
    place(tick),
    signedBrief(tick),
  ]);
  return colourBar(diverging, ticks, label);
}

const sequentialBar = (label) =>
  colourBar(
    sequential,
    [0, 0.25, 0.5, 0.75, 1].map((tick) => [tick, brief(tick)]),
    label,
  );

function colourBar(colourAt, ticks, label) {
  const stops = Array.from({ length: 41 }, (_, n) => css(colourAt(n / 40)));
  const marks = ticks.map(([place, text]) =>
    element("span", { style: `left: ${100 * place}%` }, text),
  );
  return element(
    "div",
    { class: "colour-bar" },
    element("div", { class: "colours", style: `background: linear-gradient(to right, ${stops})` }),
    element("div", { class: "ticks" }, marks),
    element("div", { class: "label" }, label),
  );
}
