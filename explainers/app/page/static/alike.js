// A second image beside the first: heatmaps of what makes them alike, and the patches that match one patch

const TIE_COLOURS = ["#facc15", "#22c55e", "#06b6d4", "#f97316", "#e879f9"];
let other = null, alike = null, pointed = null, pinned = false;

/** Show a second image that the server opens. */
async function openOther(reply) {
  const waiting = (other = {});
  const opened = await reply;
  if (waiting !== other) return;
  other = null;
  if (opened.error) say(opened.error, true);
  else other = { ...opened, pale: await decoded(opened.pale), image: await decoded(opened.picture) };
  compare();
}

/** Ask why both images are alike. */
async function compare() {
  Object.assign($(".alike"), { hidden: true });
  alike = pointed = null;
  pinned = false;
  if (!view || !other?.key) return;
  const key = other.key;
  const reply = await ask("alike", { other: key });
  if (!reply || key !== other?.key) return;
  const pairs = new Int16Array(bytes(reply.pairs).buffer);
  alike = { ...reply, pairs, tiles: reply.tiles.map(tilesOf) };
  $(".alike").hidden = false;
  drawAlike();
}

/** What all patches of the other image add to the similarity together with one patch. */
function matches(side, patch) {
  const total = view.rows * view.columns;
  const at = side === 0 ? (i) => patch * total + i : (i) => i * total + patch;
  return Float32Array.from({ length: total }, (_, i) => alike.pairs[at(i)] * alike.scale);
}

/** Colours of values, as a heatmap of patches: the strongest has the full colour. */
function lit(values) {
  const strongest = Math.max(...values.map(Math.abs)) || 1;
  const middle = (alike.shades.length - 1) / 2;
  const patches = tile(Uint8ClampedArray.from([...values].flatMap((value) => alike.shades[Math.round(middle * (1 + value / strongest))])), view.columns);
  return { patches, smooth: patches };
}

/** Draw both images: heatmaps at rest; with a patch that is pointed at, those that match it. */
function drawAlike() {
  if (!alike) return;
  const figures = sameNumber($(".pair"), 2, () => mapFigure());
  const values = pointed && matches(pointed.side, pointed.patch);
  [view, other].forEach((shown, side) => {
    const [canvas, caption] = figures[side].children;
    const own = pointed?.side === side;
    paint(canvas, shown.pale, pointed ? (own ? null : lit(values)) : alike.tiles[side], shown.box);
    if (own) mark(canvas, shown, pointed.patch, "#fff");
    if (!pointed) alike.ties.forEach((tie, i) => mark(canvas, shown, tie[side], TIE_COLOURS[i % TIE_COLOURS.length], i + 1));
    caption.querySelector(".name").textContent = shown.name;
    caption.querySelector(".dot").hidden = true;
    showLegend(caption.querySelector(".legend"), own ? null : alike.legends[side]);
    Object.assign(canvas, { tabIndex: 0, onpointermove: (event) => pinned || point(side, patchAt(canvas, shown, event)) });
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-label", `${shown.name}; arrow keys choose a patch, whose matches light up in the other image`);
    canvas.dataset.lit = pointed && !own ? pointed.patch : "";
    canvas.onpointerleave = () => pinned || rest();
    canvas.onblur = () => ((pinned = false), rest());
    canvas.onclick = (event) => {
      const patch = patchAt(canvas, shown, event);
      if (patch === null) return;
      pinned = !(pinned && pointed?.side === side && pointed.patch === patch);
      point(side, patch);
    };
    canvas.onkeydown = (event) => {
      if (!event.key.startsWith("Arrow")) return;
      event.preventDefault();
      pinned = true;
      point(side, pointed?.side === side ? neighbour(pointed.patch, shown, event.key) : 0);
    };
  });
  const sum = values?.reduce((total, value) => total + value, 0);
  $(".likeness").textContent = pointed
    ? `This patch adds ${sum.toFixed(4)} to the similarity of ${alike.similarity.toFixed(2)}; the patches that match it are coloured.`
    : `Similarity ${alike.similarity.toFixed(2)}, explained by ${alike.method}. Numbers: the patches that match best.`;
}

function point(side, patch) {
  if (patch === null || (pointed?.side === side && pointed.patch === patch)) return;
  pointed = { side, patch };
  drawAlike();
}

function rest() {
  pointed = null;
  drawAlike();
}

/** Frame a patch, and write its number beside it. */
function mark(canvas, shown, patch, colour, number = "") {
  const context = canvas.getContext("2d"), [left, top, width, height] = place(patch, shown);
  for (const [stroke, thick] of [["#000", 5], [colour, 2.5]]) {
    Object.assign(context, { strokeStyle: stroke, lineWidth: thick });
    context.strokeRect(left, top, width, height);
  }
  Object.assign(context, { font: "bold 20px sans-serif", textAlign: "center", textBaseline: "middle", lineWidth: 4, strokeStyle: "#000", fillStyle: colour });
  context.strokeText(number, left + width / 2, top + height / 2);
  context.fillText(number, left + width / 2, top + height / 2);
}
