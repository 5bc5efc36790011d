// Pictures on canvases: heatmaps over the photo, and the image with hidden patches

/** Decode an image from its URL. */
async function decoded(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return image;
}

/** The bytes of a base64 text. */
function bytes(text) {
  return Uint8ClampedArray.from(atob(text), (letter) => letter.charCodeAt(0));
}

/** The colours of a heatmap as pictures: one pixel for each patch, or smooth ones, from RGBA bytes and their width. */
function tilesOf({ patches, smooth }) {
  return { patches: tile(bytes(patches[0]), patches[1]), smooth: tile(bytes(smooth[0]), smooth[1]) };
}

function tile(colours, width) {
  const data = new ImageData(colours, width), canvas = Object.assign(document.createElement("canvas"), { width, height: data.height });
  canvas.getContext("2d").putImageData(data, 0, 0);
  return canvas;
}

/** Draw an image, and if there is one, a heatmap into its box. */
function paint(canvas, image, tiles, [left, top, right, bottom] = []) {
  Object.assign(canvas, { width: image.naturalWidth, height: image.naturalHeight });
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  context.imageSmoothingEnabled = smooth();
  if (tiles) context.drawImage(smooth() ? tiles.smooth : tiles.patches, left, top, right - left, bottom - top);
}

/** Show what the colours of a heatmap mean, a bar above words; nothing without a legend. */
function showLegend(element, legend) {
  element.replaceChildren(...(legend?.words ?? []).map((word) => Object.assign(document.createElement("span"), { textContent: word })));
  element.removeAttribute("style");
  if (legend?.colours.length) element.style.setProperty("--colours", legend.colours.map((colour) => `rgb(${colour})`).join(", "));
}

/** Left, top, width and height of a patch in the picture of an opened image. */
function place(patch, { rows, columns, box: [left, top, right, bottom] }) {
  const width = (right - left) / columns, height = (bottom - top) / rows;
  return [left + (patch % columns) * width, top + Math.floor(patch / columns) * height, width, height];
}

/** Draw an opened image whose hidden patches have the colour that the model sees there; `cursor` is the patch of the keys. */
function paintHidden(canvas, view, hidden, cursor) {
  paint(canvas, view.image);
  const context = canvas.getContext("2d");
  context.fillStyle = view.hiding;
  for (const patch of hidden) context.fillRect(...place(patch, view));
  if (cursor === null) return;
  for (const [colour, inset] of [["#fff", 1.5], ["#000", 4]]) {
    const [left, top, width, height] = place(cursor, view);
    Object.assign(context, { strokeStyle: colour, lineWidth: 2.5 });
    context.strokeRect(left + inset, top + inset, width - 2 * inset, height - 2 * inset);
  }
}

/** The patch below a pointer; none outside of the box. */
function patchAt(canvas, { rows, columns, box: [left, top, right, bottom] }, { clientX, clientY }) {
  const shown = canvas.getBoundingClientRect();
  const column = Math.floor((columns * (((clientX - shown.left) / shown.width) * canvas.width - left)) / (right - left));
  const row = Math.floor((rows * (((clientY - shown.top) / shown.height) * canvas.height - top)) / (bottom - top));
  return row >= 0 && row < rows && column >= 0 && column < columns ? row * columns + column : null;
}

/** The patch beside another one in the direction of an arrow key; the same one at the rim. */
function neighbour(patch, { rows, columns }, key) {
  const row = Math.floor(patch / columns) + ({ ArrowUp: -1, ArrowDown: 1 }[key] ?? 0);
  const column = (patch % columns) + ({ ArrowLeft: -1, ArrowRight: 1 }[key] ?? 0);
  return Math.min(Math.max(row, 0), rows - 1) * columns + Math.min(Math.max(column, 0), columns - 1);
}
