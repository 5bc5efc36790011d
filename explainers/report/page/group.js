// A group as a row: crops, reasons and numbers

const CROPS = 8; // at most half of them of images predicted wrong, if there are others
const percent = (share) => (share === null ? "\u2013" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`);
const isSuspicious = ({ alarm }) => alarm;
const nameOf = ({ index, class_index }) => `Group ${index}: ${data.classes[class_index]}`;

/** A box that puts a group among `marks`, those to take out, and calls `changed`. */
function takeBox({ index }, marks, changed) {
  const box = el("input", { type: "checkbox" });
  box.checked = marks.has(index);
  box.onchange = () => { marks[box.checked ? "add" : "delete"](index); changed(); };
  return el("label", { class: "take" }, box, "take this out");
}

/** The row of a group; `take` is its box. */
function row(group, take) {
  const photos = group.examples.length + group.without.length > 0;
  const title = photos ? el("a", { href: `#group=${group.index}` }, nameOf(group)) : nameOf(group);
  const head = el("header", {}, el("h2", {}, title), badge(group), take);
  const crops = chooseCrops(group.examples).map((example) => draw(example, cropBox(example.patches)));
  const left = el("div", { class: "what" }, el("div", { class: "crops" }, ...crops), reasonsOf(group));
  const classes = [isSuspicious(group) && "suspicious", photos && "opens"].filter(Boolean).join(" ");
  const element = el("article", { class: classes, "data-group": group.index }, head, left, numbersOf(group));
  if (photos) element.onclick = ({ target }) => { if (!target.closest("a, label, input") && !String(getSelection())) title.click(); };
  return element;
}

function chooseCrops(examples) {
  const [wrong, right] = [examples.filter(isWrong), examples.filter((example) => !isWrong(example))];
  return [...wrong.slice(0, Math.max(CROPS / 2, CROPS - right.length)), ...right].slice(0, CROPS);
}

const badge = (group) => el("span", { class: "badge" }, `${isSuspicious(group) ? "suspicious" : "suspicion"} ${group.suspicion.toFixed(2)}`);
const reasonsOf = ({ reasons }) => el("ul", { class: "reasons" }, ...reasons.map((reason) => el("li", {}, reason)));

function numbersOf(group) {
  const { share, images, image_share, accuracy_with, accuracy_without, images_without, exclusive, flipped, off_object, sources, texts, effects } = group;
  const similar = Object.entries(texts).map(([text, similarity]) => `${text} ${similarity.toFixed(2)}`).join(", ");
  const lines = [
    ["Share of evidence", percent(share)],
    ["Images with it", `${images.toLocaleString("en")} (${percent(image_share)})`],
    (accuracy_with ?? accuracy_without) !== null && ["Right with / without", `${percent(accuracy_with)} / ${percent(accuracy_without)} of ${images_without.toLocaleString("en")}`],
    ["Only in this class", percent(exclusive)],
    ["Hiding it", effects[0] ? bar(effects[0]) : "not measured"],
    effects[1] && ["Hiding others", bar(effects[1])],
    flipped !== null && ["Flips predictions", percent(flipped)],
    off_object !== null && ["Off the object", percent(off_object)],
    sources !== null && ["From one source", percent(sources)],
    similar && ["Looks like", similar],
  ].filter(Boolean);
  const list = el("dl", {}, ...lines.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
  return el("div", { class: "numbers" }, map(group), list);
}

/** Where the patches of a group lie, on the grid of patches. */
function map({ positions, places }) {
  const canvas = el("canvas", { width: COLUMNS, height: ROWS, "aria-hidden": true });
  const pixels = new ImageData(COLUMNS, ROWS);
  for (const [place, byte] of [...atob(positions)].entries()) pixels.data.set([217, 95, 2, byte.charCodeAt(0)], 4 * place);
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  const [name, times] = Object.entries(places).reduce((most, each) => (each[1] > most[1] ? each : most), ["", 0]);
  return el("figure", {}, canvas, el("figcaption", {}, times >= 1.5 ? `${name} ${times.toFixed(1)}\u00d7` : "where"));
}

const ends = data.groups.flatMap(({ effects }) => effects).filter(Boolean).flatMap(({ mean, error }) => [mean - error, mean + error]);
const [LOWEST, HIGHEST] = [Math.min(0, ...ends), Math.max(0, ...ends) || 1];

/** An effect with its standard error, on the scale of all groups. */
function bar({ mean, error }) {
  const at = (value) => (100 * (value - LOWEST)) / (HIGHEST - LOWEST);
  const body = svg("rect", { x: at(Math.min(mean, 0)), width: Math.abs(at(mean) - at(0)), y: 2, height: 8 });
  const whisker = svg("path", { d: `M${at(mean - error)} 6H${at(mean + error)}` });
  const picture = svg("svg", { viewBox: "0 0 100 12", preserveAspectRatio: "none", "aria-hidden": true, class: "effect" }, body, whisker);
  return el("span", {}, picture, `${mean.toFixed(2).replace("-", "\u2212")} \u00b1 ${(error ?? 0).toFixed(2)}`);
}
