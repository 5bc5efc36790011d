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

function paint(canvas, [image, truth], heatmap) {
  const { width, height } = image;
  const out = new ImageData(new Uint8ClampedArray(image.data), width, height);
  if (heatmap) blend(out, heatmap);
  if (truth && state.outline) outline(out, truth.data);
  Object.assign(canvas, { width, height });
  canvas.getContext("2d").putImageData(out, 0, 0);
}

/** Colour an image by the formula of explainers/report/overlays.py. */
function blend({ data: out, width, height }, { shades, columns }) {
  const { steps, colours, pale } = data;
  const rows = shades.length / columns, across = samples(width, columns), down = samples(height, rows);
  const lowest = Math.min(...shades), highest = Math.max(...shades);
  const line = new Float32Array(columns);
  for (let row = 0, at = 0; row < height; row++) {
    line.fill(0);
    for (const [index, weight] of down[row]) for (let i = 0; i < columns; i++) line[i] += weight * shades[index * columns + i];
    for (let column = 0; column < width; column++, at += 4) {
      let shade = 0;
      for (const [index, weight] of across[column]) shade += weight * line[index];
      const colour = colours[Math.round(Math.min(Math.max(shade, lowest), highest)) + steps];
      const strength = (state.opacity * colour[3]) / 255;
      const grey = (out[at] + out[at + 1] + out[at + 2]) / 3;
      for (let channel = 0; channel < 3; channel++) {
        const below = out[at + channel] + pale * (grey - out[at + channel]);
        out[at + channel] = below + strength * (colour[channel] - below);
      }
    }
  }
}

/** Of each of `size` pixels: the patches around it, and their weights, by Pillow's bicubic curve; or the one below it. */
function samples(size, side) {
  return Array.from({ length: size }, (_, pixel) => {
    const centre = ((pixel + 0.5) * side) / size;
    if (!state.smooth) return [[Math.floor(centre), 1]];
    const around = [-2, -1, 0, 1, 2].map((step) => Math.floor(centre) + step).filter((index) => index >= 0 && index < side);
    const weights = around.map((index) => cubic(Math.abs(index + 0.5 - centre)));
    const total = weights.reduce((sum, weight) => sum + weight);
    return around.map((index, i) => [index, weights[i] / total]);
  });
}

function cubic(x) {
  if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0;
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
