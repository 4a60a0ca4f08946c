// Making nodes. Text goes in as text, always: no string is ever parsed as HTML.

/** Make an HTML element; functions among the attributes become listeners. */
function element(tag, attributes = {}, ...children) {
  return furnish(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
function drawn(tag, attributes = {}, ...children) {
  return furnish(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined)
      node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity));
  return node;
}

/** Text in a picture. */
const textAt = (text, x, y, attributes = {}) => drawn("text", { x, y, ...attributes }, text);

/** About how wide a text in a picture is. */
const textWidth = (text) => 6.9 * [...text].length;

/** A paragraph beside a plot that says how to read it. */
const note = (...words) => element("p", { class: "note" }, ...words);

/** A box that scrolls by itself where its content is wide; the page never does. */
const scrollBox = (...children) => element("div", { class: "scroll" }, ...children);

/** Terms and what they are, as a description list. */
const pairList = (pairs) =>
  element(
    "dl",
    { class: "pairs" },
    pairs.map(([term, text]) =>
      element("div", {}, element("dt", {}, term), element("dd", {}, text)),
    ),
  );

/** A box whose content `draw(width)` makes, again whenever its width changes. */
function responsive(draw) {
  const box = element("div", { class: "plot" });
  let width = 0;
  box.redraw = () => width && box.replaceChildren(draw(width));
  new ResizeObserver(() => {
    if (box.clientWidth === width) return;
    width = box.clientWidth;
    box.redraw();
  }).observe(box);
  return box;
}

/** Say something to people who listen to the page. */
function announce(text) {
  announce.place ??= document.body.appendChild(
    element("div", { class: "unseen", "aria-live": "polite" }),
  );
  announce.place.textContent = text;
}

/** Where the arrow keys lead from place `at` of `count`; undefined for any other key. */
function stepOf(key, at, count) {
  const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: count - 1 }[key];
  return to === undefined ? undefined : Math.min(Math.max(to, 0), count - 1);
}
