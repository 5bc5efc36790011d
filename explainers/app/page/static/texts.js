// Texts that a visitor types: they stay listed, also for the next image

let prompts = [];
const isText = (index) => typeof index === "string";

/** Score the texts that were typed for earlier images. */
async function scorePrompts() {
  const texts = prompts.map(([text]) => text);
  prompts = [];
  const reply = texts.length ? await ask("prompts", { texts }) : null;
  if (reply) prompts = reply.classes;
}

/** Explain a text, and list it beside the classes. */
async function explainText(text) {
  const reply = await ask("prompts", { texts: [text] });
  if (!reply) return;
  say("");
  prompts = [...reply.classes, ...prompts.filter(([known]) => known !== text)].slice(0, 50);
  $(".prompt").value = "";
  $(".explained").hidden = false;
  explain(reply.classes[0]);
}

function listenToTexts() {
  $(".ask").onsubmit = (event) => {
    event.preventDefault();
    if (view && $(".prompt").value.trim()) explainText($(".prompt").value.trim());
  };
}
