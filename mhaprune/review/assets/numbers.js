// Numbers as text, and numbers as places on an axis.

const MINUS = "\u2212";

const unsigned = (value, digits = 4) => value.toFixed(digits).replace("-", MINUS);

const signed = (value, digits = 4) => (value < 0 ? MINUS : "+") + Math.abs(value).toFixed(digits);

const percent = (value, digits = 1) => `${signed(100 * value, digits)}%`;

const grouped = (value) => Math.round(value).toLocaleString("en");

const interval = (low, high, format = signed) => `${format(low)} to ${format(high)}`;

/** A number as short as it can be said: ticks of axes. */
const brief = (value) => String(Number(value.toPrecision(3))).replace("-", MINUS);

const signedBrief = (value) => (value > 0 ? "+" : "") + brief(value);

/** Where `value` lies on an axis that runs from `from` to `to` over the pixels `start` to `end`. */
function axis(from, to, start, end, shape = (value) => value) {
  const [low, high] = [shape(from), shape(to)];
  const scale = (end - start) / (high - low || 1);
  return (value) => start + (shape(value) - low) * scale;
}

/**
 * The shape of an axis that is linear up to the threshold and logarithmic beyond, on both sides.
 * The linear part is as long as a factor of ten, as in the pictures that the program draws.
 */
function symlog(threshold) {
  const linear = 1 / (1 - 1 / 10);
  return (value) => {
    const size = Math.abs(value) / threshold;
    return Math.sign(value) * (size <= 1 ? size * linear : linear + Math.log10(size));
  };
}

/** Zero, the threshold and the powers of ten well beyond it, between `low` and `high`. */
function symlogTicks(threshold, low, high) {
  const sizes = [threshold];
  const reach = Math.max(-low, high);
  for (let power = Math.ceil(Math.log10(2.0001 * threshold)); 10 ** power <= reach; power++)
    sizes.push(Number(`1e${power}`));
  const ticks = [...sizes.map((size) => -size).reverse(), 0, ...sizes];
  return ticks.filter((tick) => tick >= low && tick <= high);
}

/** Four to eight round numbers between `low` and `high`. */
function evenTicks(low, high, wanted = 5) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.ceil(low / step);
  const count = Math.floor(high / step) - first + 1;
  return Array.from({ length: Math.max(count, 0) }, (_, n) =>
    Number(((first + n) * step).toPrecision(12)),
  );
}

/** 1, 2 and 5 times the powers of ten; powers alone over many decades, even ticks within one. */
function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const factor of decades > 3.5 ? [1] : [1, 2, 5]) ticks.push(Number(`${factor}e${power}`));
  const within = ticks.filter((tick) => tick >= low && tick <= high);
  return within.length >= 3 ? within : evenTicks(low, high);
}
