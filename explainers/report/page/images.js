// Images: a card of figures for each, painted only while it is near the window

const LIME = [0, 255, 0];
const views = new Map(); // card -> what it shows
const observer = new IntersectionObserver(
  (entries) => entries.forEach(({ target, isIntersecting }) => show(views.get(target), isIntersecting)),
  { rootMargin: "50%" },
);

function renderImages() {
  observer.disconnect();
  views.clear();
  const cards = state.task ? state.task.pictures.map(card) : [];
  $("images").replaceChildren(...(cards.length ? cards : [el("p", { class: "hint" }, "No images of this task.")]));
  cards.forEach((element) => observer.observe(element));
}

function card(picture) {
  const view = { picture, chosen: 0, visible: false, pixels: null };
  view.figures = [null, ...picture.heatmaps].map((heatmap) => figure(view, heatmap));
  const head = el("header", {}, el("h2", {}, picture.name));
  if (picture.label !== null) head.append(el("span", { class: "label" }, `label: ${picture.label}`));
  if (picture.classes.length) head.append(classPicker(view));
  const element = el("article", {}, head, el("div", { class: "pictures" }, ...view.figures.map((each) => each.element)));
  views.set(element, view);
  describe(view);
  return element;
}

function classPicker(view) {
  const buttons = view.picture.classes.map(({ name, probability }, index) => {
    const text = probability === null ? name : `${name} ${probability.toFixed(2)}`;
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

/** A canvas with its caption; `heatmap` is null for the image itself. */
function figure(view, heatmap) {
  const { width, height } = view.picture;
  const name = heatmap ? data.explainers[heatmap.explainer].name : "image";
  const canvas = el("canvas", { style: `aspect-ratio: ${width} / ${height}`, class: width <= 160 ? "coarse" : "" });
  const button = el("button", { type: "button", "aria-label": `Enlarge ${name} of ${view.picture.name}` }, canvas);
  const note = el("small");
  const element = el("figure", {}, button, el("figcaption", {}, name, note));
  if (heatmap) element.dataset.explainer = heatmap.explainer;
  const result = { element, canvas, note, name, explainer: heatmap?.explainer, maps: heatmap?.maps.map(decode) };
  button.onclick = () => enlarge(view, result);
  return result;
}

const decode = (text) => text && Int8Array.from(atob(text), (byte) => byte.charCodeAt(0));
const shownMap = (view, { maps }) => maps && (maps[view.chosen] ?? maps.find(Boolean));

/** Say which figures cannot show the chosen class. */
function describe(view) {
  for (const { element, note, maps } of view.figures) {
    const other = Boolean(maps && !maps[view.chosen]);
    const names = view.picture.classes.filter((_, index) => maps?.[index]).map(({ name }) => name);
    element.classList.toggle("other", other);
    note.textContent = other ? `explains ${names.join(", ")} only` : "";
  }
}

function show(view, visible) {
  if (!view) return; // of a task that is no longer shown
  view.visible = visible;
  if (visible) return void draw(view);
  view.pixels = null;
  for (const { canvas } of view.figures) canvas.width = canvas.height = 0; // frees its memory
}

async function draw(view) {
  view.pixels ??= load(view.picture);
  const pixels = await view.pixels;
  if (!view.visible) return;
  for (const each of view.figures) if (!state.hidden.has(each.explainer)) paint(each.canvas, pixels, shownMap(view, each));
}

let waiting = 0;
function redraw() {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => views.forEach((view) => view.visible && draw(view)));
}

const load = ({ image, truth }) => Promise.all([pixelsOf(image), truth && pixelsOf(truth)]);

async function pixelsOf(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  const canvas = el("canvas", { width: image.naturalWidth, height: image.naturalHeight });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  return context.getImageData(0, 0, canvas.width, canvas.height);
}

function paint(canvas, [image, truth], heatmap) {
  const { width, height } = image;
  const out = new ImageData(new Uint8ClampedArray(image.data), width, height);
  if (heatmap) blend(out, heatmap);
  if (truth && state.outline) outline(out, truth.data);
  Object.assign(canvas, { width, height });
  canvas.getContext("2d").putImageData(out, 0, 0);
}

/** Colour the grey image by the formula of explainers/report/overlays.py. */
function blend({ data: out, width, height }, heatmap) {
  const { red, blue, steps } = data;
  const side = Math.sqrt(heatmap.length);
  const [rows, columns] = [samples(height, side), samples(width, side)];
  for (let row = 0, at = 0; row < height; row++) {
    const [upper, lower, down] = [side * rows.low[row], side * rows.high[row], rows.between[row]];
    for (let column = 0; column < width; column++, at += 4) {
      const left = columns.low[column], right = columns.high[column], along = columns.between[column];
      const above = (1 - along) * heatmap[upper + left] + along * heatmap[upper + right];
      const below = (1 - along) * heatmap[lower + left] + along * heatmap[lower + right];
      const value = ((1 - down) * above + down * below) / steps;
      const strength = state.opacity * Math.abs(value);
      const colour = value > 0 ? red : blue;
      const grey = (out[at] + out[at + 1] + out[at + 2]) / 3;
      for (let channel = 0; channel < 3; channel++) out[at + channel] = grey + strength * (colour[channel] - grey);
    }
  }
}

/** The two patches that each of `size` pixels lies between, and its position between them, from 0 to 1. */
function samples(size, side) {
  const [low, high, between] = [new Int32Array(size), new Int32Array(size), new Float64Array(size)];
  for (let pixel = 0; pixel < size; pixel++) {
    const centre = Math.min(Math.max(((pixel + 0.5) * side) / size - 0.5, 0), side - 1);
    low[pixel] = Math.floor(state.smooth ? centre : (pixel * side) / size);
    high[pixel] = Math.min(low[pixel] + 1, side - 1);
    between[pixel] = state.smooth ? centre - low[pixel] : 0;
  }
  return { low, high, between };
}

/** Draw the pixels of the object that have a neighbour outside it. */
function outline({ data: out, width, height }, truth) {
  const reach = Math.ceil(width / 160);
  const inside = (row, column) =>
    row >= 0 && column >= 0 && row < height && column < width && truth[4 * (row * width + column)] > 0;
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      if (!inside(row, column)) continue;
      const around = [[-reach, 0], [reach, 0], [0, -reach], [0, reach]];
      if (!around.every(([down, along]) => inside(row + down, column + along))) out.set(LIME, 4 * (row * width + column));
    }
  }
}

/** Show a figure in the dialog; the arrow keys go to the other figures of the image. */
async function enlarge(view, shown) {
  const canvas = $("dialog").querySelector("canvas");
  view.pixels ??= load(view.picture);
  paint(canvas, await view.pixels, shownMap(view, shown));
  canvas.className = shown.canvas.className;
  const which = [view.picture.name, shown.name, shown.note.textContent || view.picture.classes[view.chosen]?.name];
  $("dialog").querySelector("span").textContent = which.filter(Boolean).join(" \u00b7 ");
  $("dialog").onkeydown = ({ key }) => {
    const figures = view.figures.filter(({ explainer }) => !state.hidden.has(explainer));
    const next = figures[figures.indexOf(shown) + { ArrowLeft: -1, ArrowRight: 1 }[key]];
    if (next) enlarge(view, next);
  };
  if (!$("dialog").open) $("dialog").showModal();
}
