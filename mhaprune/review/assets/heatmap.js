// Layers by heads, a cell each. One cell is in the tab order; arrow keys go to the others.

/**
 * Make a heat map, layer 0 on top. `cellOf(layer, head)` gives `colour`, `mark` (a verdict that has
 * one) and `tip` of a head, or null for one that was not measured.
 */
function heatmap({ numLayers, numHeads, label, cellOf, onPick, small = false }) {
  const cells = [];
  const grid = element("div", {
    role: "grid",
    "aria-label": label,
    class: small ? "heatmap small" : "heatmap",
    style: `--heads: ${numHeads}; --layers: ${numLayers}`,
  });
  grid.append(headerRow(numHeads));
  for (let layer = 0; layer < numLayers; layer++) {
    const row = element(
      "div",
      { role: "row" },
      element("span", { role: "rowheader" }, `L${layer}`),
    );
    for (let head = 0; head < numHeads; head++)
      cells.push(heatCell(layer, head, cellOf(layer, head)));
    row.append(...cells.slice(-numHeads));
    grid.append(row);
  }
  const focusable = walkWithArrows(grid, cells, numHeads);
  const pick = (cell) => onPick?.(Number(cell.dataset.layer), Number(cell.dataset.head));
  grid.addEventListener("click", ({ target }) => cells.includes(target) && pick(target));
  grid.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    pick(event.target);
  });
  tipsInside(grid, (node) => node.tip);
  const mark = (layer, head) => {
    for (const cell of grid.querySelectorAll("[aria-selected=true]"))
      cell.setAttribute("aria-selected", "false");
    const cell = cells[layer * numHeads + head];
    cell.setAttribute("aria-selected", "true");
    focusable(cell);
  };
  return { box: scrollBox(grid), mark };
}

function headerRow(numHeads) {
  const names = Array.from({ length: numHeads }, (_, head) =>
    element("span", { role: "columnheader" }, `H${head}`),
  );
  const corner = element(
    "span",
    { role: "columnheader" },
    element("span", { class: "unseen" }, "layer"),
  );
  return element("div", { role: "row" }, corner, names);
}

function heatCell(layer, head, found) {
  const tip = found?.tip ?? { title: headName(layer, head), pairs: [["effect", "not measured"]] };
  const spoken = [tip.title, ...tip.pairs.map((pair) => pair.join(" "))].join(", ");
  const cell = element("div", {
    role: "gridcell",
    tabindex: -1,
    "aria-label": spoken,
    "aria-selected": "false",
    class: found ? found.mark : "unmeasured",
    style: found ? `background-color: ${css(found.colour)}` : null,
    "data-layer": layer,
    "data-head": head,
  });
  cell.tip = tip;
  return cell;
}

/** Keep one cell in the tab order and let arrow keys move it; returns what chooses the cell. */
function walkWithArrows(grid, cells, width) {
  let current = cells[0];
  const choose = (cell) => {
    current.tabIndex = -1;
    cell.tabIndex = 0;
    current = cell;
  };
  choose(current);
  grid.addEventListener("focusin", ({ target }) => cells.includes(target) && choose(target));
  grid.addEventListener("keydown", (event) => {
    const at = cells.indexOf(current);
    const column = at % width;
    const to =
      { ArrowUp: at - width, ArrowDown: at + width }[event.key] ??
      at - column + stepOf(event.key, column, width);
    if (Number.isNaN(to)) return;
    event.preventDefault();
    cells[to]?.focus();
  });
  return choose;
}
