// Draw the sections that this page has.

const DRAW = {
  effects: drawEffects,
  heads: drawHeads,
  scores: drawScores,
  agreement: drawAgreement,
  pruning: drawPruning,
  interactions: drawInteractions,
  savings: drawSavings,
  attention: drawAttention,
  about: offerCopy,
};

/** Copy the command; where the browser does not allow that, select it for Ctrl-C. */
function offerCopy() {
  const button = document.getElementById("copy");
  button?.addEventListener("click", async () => {
    const command = document.getElementById("command");
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command);
      button.textContent = "Press Ctrl-C";
    }
  });
}

for (const section of document.querySelectorAll("main > section")) DRAW[section.id](section);
