// One tooltip for the whole page: a title and pairs of term and value.

const tooltip = document.body.appendChild(
  element("div", { id: "tooltip", role: "tooltip", hidden: true }),
);

/** Show a tip of `title` and `pairs` beside a rectangle, inside the window. */
function showTooltip({ title, pairs = [] }, beside) {
  tooltip.replaceChildren(element("strong", {}, title), ...(pairs.length ? [pairList(pairs)] : []));
  tooltip.hidden = false;
  const [width, height] = [tooltip.offsetWidth, tooltip.offsetHeight];
  const right = beside.right + 12 + width <= innerWidth;
  const left = right ? beside.right + 12 : Math.max(beside.left - 12 - width, 4);
  const top = Math.min(Math.max(beside.top - 4, 4), Math.max(innerHeight - height - 4, 4));
  tooltip.style.left = `${Math.min(left, Math.max(innerWidth - width - 4, 4))}px`;
  tooltip.style.top = `${top}px`;
}

function hideTooltip() {
  tooltip.hidden = true;
}

/** The place of a pointer as a rectangle. */
const pointOf = (event) => new DOMRect(event.clientX, event.clientY, 0, 0);

/** Show the tip that `tipOf(node)` gives for what is hovered or focused inside a container. */
function tipsInside(container, tipOf) {
  const show = (event) => {
    const tip = tipOf(event.target);
    if (tip) showTooltip(tip, event.target.getBoundingClientRect());
    else hideTooltip();
  };
  container.addEventListener("pointerover", show);
  container.addEventListener("focusin", show);
  container.addEventListener("pointerleave", hideTooltip);
  container.addEventListener("focusout", hideTooltip);
}

/**
 * Make a picture readable: `point(event)` by pointer, `step(event)` by keys once it has the focus,
 * which returns what to say aloud; `leave()` when done. A finger reads by a tap.
 */
function readable(picture, name, { point, step, leave }) {
  picture.tabIndex = 0;
  picture.setAttribute("aria-label", name);
  picture.addEventListener("pointermove", point);
  picture.addEventListener("click", point);
  picture.addEventListener("pointerleave", (event) => event.pointerType === "touch" || leave());
  picture.addEventListener("blur", leave);
  picture.addEventListener("keydown", (event) => {
    if (!/^(Arrow|Home|End)/.test(event.key)) return;
    event.preventDefault();
    announce(step(event));
  });
}

document.addEventListener("keydown", (event) => event.key === "Escape" && hideTooltip());

document.addEventListener("wheel", hideTooltip, { passive: true });
document.addEventListener("touchmove", hideTooltip, { passive: true });

// Arrow keys may scroll the cell that they lead to into view, after its tip was placed.
function followFocus() {
  const focused = document.querySelector(":focus-visible");
  if (focused?.tip && !tooltip.hidden) showTooltip(focused.tip, focused.getBoundingClientRect());
}
document.addEventListener("scroll", followFocus, { capture: true, passive: true });
