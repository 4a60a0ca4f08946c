// The attention viewer: a slider through layers, all heads of one, and one head enlarged.

function drawAttention(section) {
  const { tokens, note: words } = page.viewer;
  const weight = unpackWeights(page.viewer);
  const view = {
    thumbnails: element("div", {
      class: "thumbnails",
      role: "group",
      "aria-label": "Heads of this layer",
    }),
    enlarged: element("div", { class: tokens.length > 24 ? "enlarged wide" : "enlarged" }),
    layer: null,
  };
  const first = effects[0] ?? { layer: 0, head: 0 };
  const slider = layerSlider((layer) => selectHead(layer, selection.head ?? first.head));
  section.append(
    note(
      "Each square is a head: a row for each token as query, a column for each token as key, ",
      "darker where it looks. Choose a head to enlarge it.",
    ),
    ...(words ? [element("p", { class: "note" }, words)] : []),
    element("div", { class: "controls" }, slider.label),
    view.thumbnails,
    sequentialBar("attention weight"),
    view.enlarged,
  );
  const show = (layer, head) => {
    if (layer !== view.layer)
      view.thumbnails.replaceChildren(...layerThumbnails(layer, tokens, weight));
    view.layer = layer;
    for (const button of view.thumbnails.children)
      button.setAttribute("aria-pressed", Number(button.dataset.head) === head);
    slider.set(layer);
    view.enlarged.replaceChildren(
      ...enlargedHead(layer, head, tokens, (query, key) => weight(layer, head, query, key)),
    );
  };
  onSelect(show);
  show(first.layer, first.head);
}

function layerSlider(onLayer) {
  const value = element("output", {});
  const input = element("input", {
    type: "range",
    id: "layer",
    min: 0,
    max: page.num_layers - 1,
    step: 1,
    input: () => onLayer(Number(input.value)),
  });
  const set = (layer) => {
    input.value = layer;
    value.textContent = `${layer} / ${page.num_layers - 1}`;
  };
  return { label: element("label", {}, "Layer", input, value), set };
}

/** All heads of a layer as buttons with small pictures. */
function layerThumbnails(layer, tokens, weight) {
  return Array.from({ length: page.num_heads }, (_, head) => {
    const name = headName(layer, head);
    const image = patternImage(tokens.length, (query, key) => weight(layer, head, query, key));
    image.addEventListener("pointermove", (event) => {
      const cell = cellUnder(event, image.getBoundingClientRect(), tokens.length);
      if (!cell) return hideTooltip();
      const title = pairTitle(
        tokens,
        cell.query,
        cell.key,
        weight(layer, head, cell.query, cell.key),
      );
      showTooltip({ title, pairs: [["head", name]] }, pointOf(event));
    });
    image.addEventListener("pointerleave", hideTooltip);
    const [effect, role] = [effectOf.get(name), roleOf.get(name)];
    return element(
      "button",
      {
        type: "button",
        "data-head": head,
        "aria-pressed": "false",
        click: () => selectHead(layer, head),
      },
      image,
      element("span", { class: "name" }, name, effect ? smallMark(effect.verdict) : []),
      element("span", { class: "role" }, role?.role ?? ""),
    );
  });
}

const smallMark = (verdict) =>
  drawn(
    "svg",
    { width: 14, height: 14, role: "img", "aria-label": verdict },
    verdictMark(verdict, 7, 7, 4),
  );

/** One head with tokens on both sides, what is known of it, and the sentence seen from a token. */
function enlargedHead(layer, head, tokens, weightOf) {
  const name = headName(layer, head);
  const map = responsive((width) => enlargedMap(name, tokens, weightOf, width));
  map.classList.add("scroll");
  const known = knownOf(name);
  return [
    element("div", { class: "map" }, map),
    element(
      "div",
      { class: "known" },
      element("h3", {}, name),
      known.length ? pairList(known) : note("Effects were not measured in this run."),
      element("h4", {}, "Where a token looks"),
      note("Point at a token, or walk with the arrow keys; a click keeps it."),
      sentenceView(tokens, weightOf),
    ),
  ];
}

/** The large picture with a cursor that reads one weight. */
function enlargedMap(name, tokens, weightOf, width) {
  const { picture, square, side, frame } = largePattern(tokens, weightOf, width);
  const at = { query: 0, key: 0 };
  const read = (query, key, beside) => {
    Object.assign(at, { query, key });
    frame.setAttribute("x", square.left + key * side);
    frame.setAttribute("y", square.top + query * side);
    frame.setAttribute("visibility", "visible");
    const title = pairTitle(tokens, query, key, weightOf(query, key));
    const positions = `${query} \u2192 ${key}`;
    const tip = { title, pairs: Object.entries({ head: name, positions }) };
    showTooltip(tip, beside ?? frame.getBoundingClientRect());
    return title;
  };
  const leave = () => {
    frame.setAttribute("visibility", "hidden");
    hideTooltip();
  };
  readable(picture, `Attention of ${name}; arrow keys read the weights`, {
    point: (event) => {
      const { left, top } = picture.getBoundingClientRect();
      const inside = new DOMRect(left + square.left, top + square.top, square.width, square.width);
      const cell = cellUnder(event, inside, tokens.length);
      if (cell) read(cell.query, cell.key, pointOf(event));
      else leave();
    },
    step: ({ key }) => {
      const down = { ArrowUp: -1, ArrowDown: 1 }[key] ?? 0;
      const query = Math.min(Math.max(at.query + down, 0), tokens.length - 1);
      return read(query, stepOf(key, at.key, query + 1) ?? Math.min(at.key, query));
    },
    leave,
  });
  return picture;
}
