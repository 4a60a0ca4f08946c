// The sentence of the attention viewer, each token shaded by how much the chosen one looks at it.

/** Tokens as buttons. One is in the tab order; arrow keys go to the others. */
function sentenceView(tokens, weightOf) {
  const chips = tokens.map(tokenChip);
  let kept = tokens.length - 1;
  const shade = (query) =>
    chips.forEach((chip, key) =>
      shadeChip(chip, key <= query ? weightOf(query, key) : null, key === query),
    );
  const placeOf = (event) => Number(event.target.closest(".token")?.dataset.token ?? kept);
  const keep = (place) => {
    chips[kept].tabIndex = -1;
    chips[place].tabIndex = 0;
    kept = place;
    shade(kept);
  };
  const walk = (event) => {
    const to = stepOf(event.key, placeOf(event), chips.length);
    if (to === undefined) return;
    event.preventDefault();
    keep(to);
    chips[to].focus();
  };
  keep(kept);
  return element(
    "div",
    {
      class: "sentence",
      role: "group",
      "aria-label": "Tokens; the chosen one is the query",
      pointerover: (event) => shade(placeOf(event)),
      pointerleave: () => shade(kept),
      click: (event) => keep(placeOf(event)),
      keydown: walk,
    },
    chips,
  );
}

/** A token and, below it, a weight. One that does not start a word stands close to the last. */
function tokenChip(token, place) {
  const startsWord = place === 0 || /^\s/.test(token);
  return element(
    "button",
    {
      type: "button",
      class: startsWord ? "token" : "token joined",
      tabindex: -1,
      title: JSON.stringify(token),
      "data-token": place,
    },
    element("span", { class: "text" }, legible(token)),
    element("span", { class: "weight" }),
  );
}

/** Shade a token by its weight; null is that of a token after the query. */
function shadeChip(chip, weight, isQuery) {
  const [text, number] = chip.children;
  const colour = weight === null ? null : sequential(weight);
  text.style.backgroundColor = colour ? css(colour) : "";
  text.style.color = colour ? inkOn(colour) : "";
  number.textContent = weight !== null && weight >= 0.005 ? weight.toFixed(2) : "";
  chip.classList.toggle("query", isQuery);
  chip.setAttribute("aria-pressed", isQuery);
}
