// What each head is worth: heat map and ranking, and all that is known of a head.

const effects = records(page.effects).sort((a, b) => a.rank - b.rank);
const effectOf = byHead(effects);
const roleOf = byHead(records(page.roles).filter((row) => row.role !== null));
const confidence = `${brief(100 * page.confidence)}%`;

const roleText = ({ role, score }) => (score === null ? role : `${role} (${unsigned(score, 2)})`);

/** All that is known of a head, as pairs of term and value. */
function knownOf(name) {
  const [effect, role] = [effectOf.get(name), roleOf.get(name)];
  const measured = effect
    ? [
        ["effect", `${signed(effect.effect_nats)} nats/token`],
        [`${confidence} interval`, interval(effect.ci_low, effect.ci_high)],
        ["change of perplexity", signed(effect.delta_ppl)],
        ["verdict", effect.verdict],
        ["rank", `${effect.rank} of ${effects.length}`],
      ]
    : effects.length
      ? [["effect", "not measured"]]
      : [];
  const named = role ? roleText(role) : "none";
  return roleOf.size ? [...measured, ["role", named]] : measured;
}

const tipOfHead = (name) => ({ title: name, pairs: knownOf(name) });

function drawEffects(section) {
  const scale = divergingScale(
    effects.map((row) => row.effect_nats),
    page.tolerance_nats,
  );
  const map = effectMap(scale);
  onSelect(map.mark);
  section.append(
    note(
      "Loss with the head ablated less loss of the intact model, in nats per token: green, ",
      "the head was useful; brown, the model is better without it.",
    ),
    map.box,
    element(
      "div",
      { class: "beside" },
      divergingBar(scale, "effect, nats/token; linear to the tolerance, then logarithmic"),
      heatmapLegend(),
    ),
    chosenHead(),
    element("h3", {}, "By rank"),
    note(
      `Each head with its ${confidence} interval. Verdicts come from wider intervals, which hold `,
      "for all heads at once.",
    ),
    verdictLegend(effects),
    rankingBox(effects, tipOfHead),
  );
}

const effectMap = (scale) =>
  heatmap({
    numLayers: page.num_layers,
    numHeads: page.num_heads,
    label: "Effects by layer and head",
    onPick: selectHead,
    cellOf: (layer, head) => {
      const name = headName(layer, head);
      const row = effectOf.get(name);
      const colour = row && scale.colour(row.effect_nats);
      return row && { colour, mark: row.verdict, tip: tipOfHead(name) };
    },
  });

function heatmapLegend() {
  const entry = (kind, text) =>
    element("li", {}, element("span", { class: `swatch ${kind}` }), text);
  const allMeasured = effects.length === page.num_layers * page.num_heads;
  return element(
    "ul",
    { class: "legend" },
    entry("critical", "critical"),
    entry("redundant", "redundant"),
    allMeasured ? [] : entry("unmeasured", "not measured"),
  );
}

/** A line about the head that is selected, with the way to its row and to its pattern. */
function chosenHead() {
  const box = element(
    "p",
    { class: "chosen", "aria-live": "polite" },
    "Select a head to follow it through the page.",
  );
  onSelect((layer, head) => {
    const name = headName(layer, head);
    const known = knownOf(name)
      .map((pair) => pair.join(" "))
      .join(", ");
    const links = [["#heads", "Table"], ...(page.viewer ? [["#attention", "Attention"]] : [])].map(
      ([href, text]) => element("a", { href }, text),
    );
    box.replaceChildren(element("strong", {}, name), ` ${known} `, ...links);
  });
  return box;
}
