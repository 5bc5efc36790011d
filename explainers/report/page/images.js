// Images: a card of figures for each, painted while it is near the window, and for printing

const ENLARGED = 3; // pixels of the enlarged picture for each pixel of the image
const COARSE = 160; // width up to which images are enlarged without smoothing, as in overlays.py
const views = new Map(); // card -> what it shows
const observer = new IntersectionObserver(
  (entries) => entries.forEach(({ target, isIntersecting }) => show(views.get(target), isIntersecting)),
  { rootMargin: "50%" },
);

function renderImages() {
  observer.disconnect();
  views.clear();
  const pictures = state.task?.pictures ?? [];
  const cards = pictures.map((picture, index) => card(picture, linkName(pictures, index)));
  $("cards").replaceChildren(...(cards.length ? cards : [el("p", { class: "hint" }, "No images of this task.")]));
  cards.forEach((element) => observer.observe(element));
  search();
}

function card(picture, name) {
  const view = { picture, name, chosen: 0, visible: false, images: null, pixels: null };
  view.figures = [null, ...picture.heatmaps].map((heatmap) => figure(view, heatmap));
  const link = el("a", { href: linkTo(name), title: "Link to this image" }, picture.name);
  const head = el("header", {}, el("h2", {}, link));
  if (picture.label !== null) head.append(el("span", { class: "label" }, `label: ${picture.label}`));
  if (picture.classes.length) head.append(classPicker(view));
  view.pictures = el("div", { class: "pictures" }, ...view.figures.map((each) => each.element));
  view.element = el("article", {}, head, view.pictures);
  views.set(view.element, view);
  describe(view);
  load(picture).then((images) => { view.images = images; draw(view); });
  return view.element;
}

function classPicker(view) {
  const buttons = view.picture.classes.map(({ name, probability }, index) => {
    const text = probability === null ? name : `${name} ${written(probability)}`;
    const button = el("button", { type: "button", "aria-pressed": index === 0 }, text);
    button.onclick = () => {
      view.chosen = index;
      buttons.forEach((each) => each.setAttribute("aria-pressed", each === button));
      describe(view);
      draw(view);
    };
    return button;
  });
  return el("span", { class: "classes", role: "group", "aria-label": "Explained class" }, ...buttons);
}

const written = (probability) => (probability >= 0 && probability < 0.005 ? "<0.01" : probability.toFixed(2));

/** A canvas with its caption; `heatmap` is null for the image itself. */
function figure(view, heatmap) {
  const { width, height } = view.picture;
  const name = heatmap ? data.explainers[heatmap.explainer].name : "image";
  const canvas = el("canvas", { style: `aspect-ratio: ${width} / ${height}`, class: width <= COARSE ? "coarse" : "" });
  const button = el("button", { type: "button", "aria-label": `Enlarge ${name} of ${view.picture.name}` }, canvas);
  const note = el("small");
  const element = el("figure", {}, button, el("figcaption", {}, name, note));
  if (heatmap) element.dataset.explainer = heatmap.explainer;
  const maps = heatmap?.maps.map((text) => text && { shades: decode(text), columns: heatmap.columns });
  const result = { element, button, canvas, note, name, explainer: heatmap?.explainer, maps, signed: heatmap?.signed };
  button.onclick = () => enlarge(view, result);
  return result;
}

const decode = (text) => Int8Array.from(atob(text), (byte) => byte.charCodeAt(0));
const shownMap = (view, { maps }) => maps && (maps[view.chosen] ?? maps.find(Boolean));
const shownFigures = (view) => view.figures.filter(({ explainer }) => !state.hidden.has(explainer));

/** Say which figures cannot show the chosen class, and which heatmaps are constant. */
function describe(view) {
  for (const { element, note, maps } of view.figures) {
    const constant = shownMap(view, { maps })?.shades.every((shade) => shade === 0);
    const other = Boolean(maps && !maps[view.chosen]);
    const names = view.picture.classes.filter((_, index) => maps?.[index]).map(({ name }) => name);
    element.classList.toggle("other", other);
    note.textContent = [other && `explains ${names.join(", ")} only`, constant && data.constant].filter(Boolean).join("; ");
  }
}

function show(view, visible) {
  if (!view) return; // of a task that is no longer shown
  view.visible = visible;
  if (visible) draw(view);
  else free(view);
}

function free(view) {
  view.pixels = null;
  for (const { canvas } of view.figures) canvas.width = canvas.height = 0; // frees its memory
}

function draw(view, printing = false) {
  if (!view.images || !(view.visible || printing)) return;
  view.pixels ??= allPixels(view.images);
  for (const each of shownFigures(view)) paint(each.canvas, view.pixels, shownMap(view, each));
}

let waiting = 0;
function redraw() {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => views.forEach((view) => draw(view)));
}

/** Paint all cards that the search has found, however far from the window, while they are printed. */
const drawForPrinting = () => views.forEach((view) => view.element.hidden || draw(view, true));
const freeAfterPrinting = () => views.forEach((view) => view.visible || free(view));

/** Show a figure in the dialog. */
async function enlarge(view, shown) {
  const canvas = $("dialog").querySelector("canvas");
  const coarse = view.picture.width <= COARSE;
  const pixels = allPixels(view.images ?? (await load(view.picture)), coarse ? 1 : ENLARGED);
  paint(canvas, pixels, shownMap(view, shown));
  canvas.className = shown.canvas.className;
  const which = [view.picture.name, shown.name, shown.note.textContent || view.picture.classes[view.chosen]?.name];
  $("dialog").querySelector("span").textContent = which.filter(Boolean).join(" \u00b7 ");
  $("dialog").onkeydown = (event) => go(event, neighbour(view, shown, event.key), enlarge);
  $("dialog").onclose = () => shown.button.focus();
  if (!$("dialog").open) $("dialog").showModal();
}
