// Painting: the pixels of an image, coloured by a heatmap

const LIME = [0, 255, 0];

/** The elements of an image and of its object; an image that is not decoded yet has no pixels. */
const load = ({ image, truth }) => Promise.all([loaded(image), truth && loaded(truth)]);

async function loaded(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return image;
}

/** The pixels of an image, enlarged `scale` times; those of an object keep sharp edges. */
function pixelsOf(image, scale, sharp) {
  const canvas = new OffscreenCanvas(image.naturalWidth * scale, image.naturalHeight * scale);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  Object.assign(context, { imageSmoothingEnabled: !sharp, imageSmoothingQuality: "high" });
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return context.getImageData(0, 0, canvas.width, canvas.height);
}

const allPixels = ([image, truth], scale = 1) => [pixelsOf(image, scale), truth && pixelsOf(truth, scale, true)];

function paint(canvas, [image, truth], heatmap, signed) {
  const { width, height } = image;
  const out = new ImageData(new Uint8ClampedArray(image.data), width, height);
  if (heatmap) blend(out, heatmap, signed);
  if (truth && state.outline) outline(out, truth.data);
  Object.assign(canvas, { width, height });
  canvas.getContext("2d").putImageData(out, 0, 0);
}

/** Colour the grey image by the formula of explainers/report/overlays.py. */
function blend({ data: out, width, height }, heatmap, signed) {
  const { steps } = data;
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
      const colour = tint(value, signed);
      const grey = (out[at] + out[at + 1] + out[at + 2]) / 3;
      for (let channel = 0; channel < 3; channel++) out[at + channel] = grey + strength * (colour[channel] - grey);
    }
  }
}

/** The full colour of a shade: from -1 to 1 of signed heatmaps, from 0 to 1 of others. */
function tint(shade, signed) {
  if (signed) return shade > 0 ? data.red : data.blue;
  const stops = data.sequential, at = shade * (stops.length - 1);
  const lower = Math.min(Math.floor(at), stops.length - 2);
  return stops[lower].map((channel, i) => channel + (at - lower) * (stops[lower + 1][i] - channel));
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
