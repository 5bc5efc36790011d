// Crops: photos as SVG in units of patches, so that each is stored once however often it is cut

const [ROWS, COLUMNS] = data.shape;
const SMALLEST = 4; // side of a crop, in patches

const isWrong = ({ image }) => data.images[image].label !== null && data.images[image].label !== data.images[image].predicted;

/** What an example is, in words. */
function describe({ image }) {
  const { label, predicted } = data.images[image];
  if (label === null) return `predicted ${data.classes[predicted]}`;
  return label === predicted ? data.classes[label] : `${data.classes[label]}, taken for ${data.classes[predicted]}`;
}

/** The photo of an example, or a box [left, top, width, height] of it, its patches outlined and the others pale. */
function draw(example, box = [0, 0, COLUMNS, ROWS]) {
  const { name, url } = data.images[example.image];
  const photo = svg("image", { href: url, width: COLUMNS, height: ROWS, preserveAspectRatio: "none" });
  const view = { viewBox: box.join(" "), role: "img", "aria-label": `${name}: ${describe(example)}`, class: isWrong(example) ? "mistake" : "" };
  if (!example.patches.length) return svg("svg", view, photo);
  const squares = example.patches.map((patch) => `M${patch % COLUMNS} ${Math.floor(patch / COLUMNS)}h1v1h-1z`).join("");
  const others = svg("path", { class: "others", d: `M0 0h${COLUMNS}v${ROWS}h-${COLUMNS}z${squares}`, "fill-rule": "evenodd" });
  const rim = rimOf(example.patches);
  return svg("svg", view, photo, others, svg("path", { class: "rim dark", d: rim }), svg("path", { class: "rim", d: rim }));
}

/** The sides of patches that have no neighbour among them, as a path. */
function rimOf(patches) {
  const members = new Set(patches);
  return patches.flatMap((patch) => {
    const [x, y] = [patch % COLUMNS, Math.floor(patch / COLUMNS)];
    return [
      (y === 0 || !members.has(patch - COLUMNS)) && `M${x} ${y}h1`,
      (y === ROWS - 1 || !members.has(patch + COLUMNS)) && `M${x} ${y + 1}h1`,
      (x === 0 || !members.has(patch - 1)) && `M${x} ${y}v1`,
      (x === COLUMNS - 1 || !members.has(patch + 1)) && `M${x + 1} ${y}v1`,
    ].filter(Boolean);
  }).join("");
}

/** A square box around the largest part of touching patches, with a margin. */
function cropBox(patches) {
  const part = partsOf(patches).reduce((largest, each) => (each.length > largest.length ? each : largest));
  const places = [part.map((patch) => patch % COLUMNS), part.map((patch) => Math.floor(patch / COLUMNS))];
  const spans = places.map((each) => [Math.min(...each), Math.max(...each) + 1]);
  const side = Math.min(Math.max(...spans.map(([low, high]) => high - low + 2), SMALLEST), ROWS, COLUMNS);
  const [left, top] = spans.map(([low, high], axis) => Math.min(Math.max((low + high - side) / 2, 0), [COLUMNS, ROWS][axis] - side));
  return [left, top, side, side];
}

/** Patches in parts that touch each other, also at corners; the part of the strongest patch first. */
function partsOf(patches) {
  const left = new Set(patches), parts = [];
  for (const start of left) { // those found are gone before they are reached
    const part = [start];
    left.delete(start);
    for (const patch of part) { // grows while it is read
      for (const other of left) {
        if (!touches(patch, other)) continue;
        part.push(other);
        left.delete(other);
      }
    }
    parts.push(part);
  }
  return parts;
}

const touches = (one, other) =>
  Math.abs((one % COLUMNS) - (other % COLUMNS)) <= 1 && Math.abs(Math.floor(one / COLUMNS) - Math.floor(other / COLUMNS)) <= 1;
