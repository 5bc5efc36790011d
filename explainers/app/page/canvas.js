// Pictures on canvases: heatmaps over the grey image, and the image with hidden patches

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

/** A heatmap as a picture with one pixel for each patch, from the bytes of its RGBA colours. */
function tile(colours, { rows, columns }) {
  const canvas = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
  canvas.getContext("2d").putImageData(new ImageData(colours, columns, rows), 0, 0);
  return canvas;
}

/** Draw an image, and if there is one, the tile of a heatmap over it. */
function paint(canvas, image, heatmap, { opacity, smooth }) {
  Object.assign(canvas, { width: image.naturalWidth, height: image.naturalHeight });
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0);
  if (!heatmap) return;
  context.globalAlpha = opacity;
  context.imageSmoothingEnabled = smooth;
  context.drawImage(heatmap, 0, 0, canvas.width, canvas.height);
}

/** Show what the colours of a heatmap mean, a bar above words; nothing without a legend. */
function showLegend(element, legend) {
  element.replaceChildren(...(legend?.words ?? []).map((word) => Object.assign(document.createElement("span"), { textContent: word })));
  element.removeAttribute("style");
  if (legend?.colours.length) element.style.setProperty("--colours", legend.colours.map((colour) => `rgb(${colour})`).join(", "));
}

/** Draw an image whose hidden patches have the colour that the model sees there; `cursor` is the patch of the keys. */
function paintHidden(canvas, image, hidden, { columns, hiding }, cursor) {
  Object.assign(canvas, { width: image.naturalWidth, height: image.naturalHeight });
  const context = canvas.getContext("2d"), step = canvas.width / columns;
  const corner = (patch) => [(patch % columns) * step, Math.floor(patch / columns) * step];
  context.drawImage(image, 0, 0);
  context.fillStyle = hiding;
  for (const patch of hidden) context.fillRect(...corner(patch), step, step);
  if (cursor === null) return;
  for (const [colour, inset] of [["#fff", 1.5], ["#000", 4]]) {
    const [left, top] = corner(cursor);
    Object.assign(context, { strokeStyle: colour, lineWidth: 2.5 });
    context.strokeRect(left + inset, top + inset, step - 2 * inset, step - 2 * inset);
  }
}

/** The patch below a pointer. */
function patchAt(canvas, { rows, columns }, { clientX, clientY }) {
  const box = canvas.getBoundingClientRect();
  const cell = (at, size, count) => Math.min(Math.max(Math.floor((at * count) / size), 0), count - 1);
  return cell(clientY - box.top, box.height, rows) * columns + cell(clientX - box.left, box.width, columns);
}

/** The patch beside another one in the direction of an arrow key; the same one at the rim. */
function neighbour(patch, { rows, columns }, key) {
  const row = Math.floor(patch / columns) + ({ ArrowUp: -1, ArrowDown: 1 }[key] ?? 0);
  const column = (patch % columns) + ({ ArrowLeft: -1, ArrowRight: 1 }[key] ?? 0);
  return Math.min(Math.max(row, 0), rows - 1) * columns + Math.min(Math.max(column, 0), columns - 1);
}
