// Attention patterns: the packed weights, tokens as text, and pictures of one head.

/** The weights of `page.viewer`: `weight(layer, head, query, key)` from 0 to 1. */
function unpackWeights({ weights, tokens }) {
  const letters = atob(weights);
  const bytes = new Uint8Array(letters.length);
  for (let n = 0; n < bytes.length; n++) bytes[n] = letters.charCodeAt(n);
  const perHead = (tokens.length * (tokens.length + 1)) / 2;
  return (layer, head, query, key) =>
    bytes[(layer * page.num_heads + head) * perHead + (query * (query + 1)) / 2 + key] / 255;
}

/** A token as it can be read: blanks around words left out, what has no shape of its own named. */
function legible(token) {
  const shown = (text) =>
    text
      .replace(/\n/g, "\u21b5")
      .replace(/\t/g, "\u21e5")
      .replace(/[\u0000-\u001f]/g, (letter) => String.fromCharCode(0x2400 + letter.charCodeAt(0)))
      .replace(
        /[\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
        (letter) => `\\u${letter.charCodeAt(0).toString(16).padStart(4, "0")}`,
      );
  const word = token.replace(/^ +| +$/g, "");
  return word ? shown(word) : token.replace(/ /g, "\u2423") || "\u2205";
}

const shortened = (text, most) => {
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}\u2026` : text;
};

/** A head's pattern as a picture of one pixel a weight; above the diagonal it is clear. */
function patternImage(size, weightOf) {
  const canvas = element("canvas", { width: size, height: size, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  for (let query = 0; query < size; query++)
    for (let key = 0; key <= query; key++)
      image.data.set([...sequential(weightOf(query, key)), 255], 4 * (query * size + key));
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Query and key under a pointer over a square picture; null outside and above the diagonal. */
function cellUnder(event, square, size) {
  const query = Math.floor(((event.clientY - square.top) / square.height) * size);
  const key = Math.floor(((event.clientX - square.left) / square.width) * size);
  return 0 <= key && key <= query && query < size ? { query, key } : null;
}

const pairTitle = (tokens, query, key, weight) =>
  `query '${legible(tokens[query])}' \u2192 key '${legible(tokens[key])}': ${weight.toFixed(2)}`;

/** Draw one head large: a square a weight, tokens on both sides. Returns picture and measures. */
function largePattern(tokens, weightOf, width) {
  const names = tokens.map((token) => shortened(legible(token), 12));
  const margin = 16 + names.reduce((most, name) => Math.max(most, textWidth(name)), 0);
  const side = Math.min(Math.max(Math.floor((width - margin - 4) / names.length), 13), 40);
  const square = { left: margin, top: 4, width: side * names.length };
  const frame = drawn("rect", {
    class: "cell-frame",
    width: side,
    height: side,
    visibility: "hidden",
  });
  const ground = drawn("rect", {
    class: "tolerance",
    x: margin,
    y: 4,
    width: square.width,
    height: square.width,
  });
  const picture = drawn(
    "svg",
    { width: margin + square.width + 4, height: square.top + square.width + margin, role: "img" },
    ground,
    drawn("g", { class: "cells" }, patternCells(names.length, weightOf, square, side)),
    names.map((name, place) => tokenNames(name, place, square, side)),
    frame,
  );
  return { picture, square, side, frame };
}

/** A token's name twice: at its row as a query, under its column as a key. */
function tokenNames(name, place, { left, top, width }, side) {
  const middle = (place + 0.5) * side + 4;
  const turned = `translate(${left + middle} ${top + width + 8}) rotate(-90)`;
  return [
    textAt(name, left - 8, top + middle, { class: "query-name", "text-anchor": "end" }),
    textAt(name, 0, 0, { class: "key-name", "text-anchor": "end", transform: turned }),
  ];
}

/** The weights row by row, each with its number where there is room for it. */
function patternCells(size, weightOf, { left, top }, side) {
  const cells = [];
  for (let query = 0; query < size; query++)
    for (let key = 0; key <= query; key++)
      cells.push(patternCell(left + key * side, top + query * side, side, weightOf(query, key)));
  return cells;
}

function patternCell(x, y, side, weight) {
  const colour = sequential(weight);
  const cell = drawn("rect", { x, y, width: side - 0.5, height: side - 0.5, fill: css(colour) });
  if (side < 30 || weight < 0.005) return cell;
  const text = weight.toFixed(2).replace(/^0/, "");
  const look = { class: "weight", "text-anchor": "middle", style: `fill: ${inkOn(colour)}` };
  return [cell, textAt(text, x + side / 2, y + side / 2 + 4, look)];
}
