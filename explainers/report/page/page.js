// What all parts of the page share: what the user has chosen; then the controls

const state = { task: data.tasks[0], opacity: data.opacity, smooth: true, outline: false, hidden: new Set() };
const PRINTED = 7; // most figures beside each other on paper
const DASHES = ["none", "7 3", "2 3"]; // colours repeat after 20 explainers

/** The colour and dashes of an explainer's lines. */
const stroke = (explainer) => ({
  stroke: data.explainers[explainer].colour,
  "stroke-dasharray": DASHES[Math.floor(explainer / 20) % DASHES.length],
});

/** An explainer's name behind a sample of its line. */
function key(explainer) {
  const line = svg("line", { x1: 1, x2: 21, y1: 5, y2: 5, "stroke-width": 3, ...stroke(explainer) });
  const sample = svg("svg", { width: 22, height: 10, "aria-hidden": true }, line);
  return [sample, data.explainers[explainer].name];
}

function checkbox(explainer) {
  const box = el("input", { type: "checkbox", checked: "" });
  box.onchange = () => hide([explainer], !box.checked);
  return el("label", {}, box, ...key(explainer));
}

/** Hide or show explainers everywhere on the page. */
function hide(explainers, hidden) {
  for (const explainer of explainers) {
    state.hidden[hidden ? "add" : "delete"](explainer);
    $("boxes").children[explainer].querySelector("input").checked = !hidden;
  }
  showExplainers();
  renderResults();
  redraw();
}

function showExplainers() {
  const total = data.explainers.length;
  $("count").textContent = `${total - state.hidden.size} of ${total}`;
  for (const view of views.values()) {
    for (const { element, explainer } of view.figures) element.hidden = state.hidden.has(explainer);
    const count = shownFigures(view).length;
    const lines = Math.ceil(count / PRINTED);
    view.pictures.style.setProperty("--figures", count);
    view.pictures.style.setProperty("--printed", Math.ceil(count / lines)); // lines of equal length
  }
}

function render() {
  renderImages();
  showExplainers();
  renderResults();
}

function showTask(index) {
  state.task = data.tasks[index];
  $("task").value = index;
  render();
}

function start() {
  document.title = $("title").textContent = data.title;
  $("notes").append(...data.notes.map((note) => el("p", {}, note)));
  const everyone = data.explainers.map((_, explainer) => explainer);
  $("boxes").append(...everyone.map(checkbox));
  $("all").onclick = () => hide(everyone, false);
  $("none").onclick = () => hide(everyone, true);
  $("task").append(...data.tasks.map(({ name }, index) => el("option", { value: index }, name)));
  const drawn = data.tasks.flatMap(({ pictures }) => pictures).flatMap(({ heatmaps }) => heatmaps);
  const used = data.legends.filter((legend) => drawn.some(({ signed }) => signed === legend.signed));
  $("bar").append(...used.map(legendBar));
  hideUnused();
  follow("opacity", "input", ({ value }) => { state.opacity = Number(value); redraw(); });
  follow("smooth", "change", ({ checked }) => { state.smooth = checked; redraw(); });
  follow("outline", "change", ({ checked }) => { state.outline = checked; redraw(); });
  follow("task", "change", ({ value }) => showTask(value));
  follow("search", "input", search);
  $("base").onchange = ({ target }) => { base = Number(target.value); renderDifferences(); };
  startTools();
  window.onbeforeprint = drawForPrinting;
  window.onafterprint = freeAfterPrinting;
  document.onkeydown = onArrow;
  window.onhashchange = visit;
  visit();
}

/** A bar with the colours of signed or unsigned heatmaps, and what its ends mean. */
function legendBar({ colours, ends }) {
  const bar = el("span", { class: "scale" }, ...ends.map((end) => el("span", {}, end)));
  bar.style.setProperty("--colours", colours.map((colour) => `rgb(${colour})`).join(", "));
  return bar;
}

/** Hide the parts of the page that have nothing to show. */
function hideUnused() {
  const pictures = data.tasks.flatMap((task) => task.pictures);
  const used = {
    "task-label": data.tasks.length > 1,
    explainers: data.explainers.length > 1,
    images: pictures.length,
    looks: pictures.some(({ heatmaps }) => heatmaps.length),
    "outline-label": pictures.some(({ truth }) => truth),
    find: pictures.length > 1,
    notes: data.notes.length,
    corners: data.explainers.some(({ name }) => name.includes("DecompX")),
    table: data.columns.length,
    differences: data.tasks.some(({ differences }) => differences.some((pairs) => pairs)),
    curves: data.curves.length,
  };
  for (const [id, shown] of Object.entries(used)) {
    $(id).hidden = !shown;
    const link = document.querySelector(`a[href="#${id}"]`);
    if (link) link.hidden = !shown;
  }
  $("links").hidden = document.querySelectorAll("#links a:not([hidden])").length < 2;
}

start();
