// The one head that all sections of the page talk about.

const selection = { layer: null, head: null, listeners: [] };

/** Call `listener(layer, head)` whenever a head is selected. */
const onSelect = (listener) => selection.listeners.push(listener);

function selectHead(layer, head) {
  Object.assign(selection, { layer, head });
  for (const listener of selection.listeners) listener(layer, head);
}
