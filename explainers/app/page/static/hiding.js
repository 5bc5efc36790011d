// Test by hand: patches are hidden in the order of heatmaps, or by clicks, and the model is asked again

let cursor = null, stroke = null, asking = false, asked = false;

/** The pictures that are tested: label and colour, and the patches that are hidden. */
function tested() {
  if (state.test === "painted") return [{ label: "your patches", colour: "var(--accent)", hidden: [...state.painted] }];
  const orders = state.methods.map((label, i) => ({ label, colour: COLOURS[i], order: maps.get(keyOf(label))?.order }));
  const all = [{ label: "chance", colour: GREY, order: view.chance }, ...orders];
  const first = ({ order }) => (state.test === "most" ? order.slice(0, state.amount) : order.slice(order.length - state.amount));
  return all.filter(({ order }) => order).map((each) => ({ ...each, hidden: first(each) }));
}

/** Draw all tested pictures, then ask for their scores. */
function test() {
  const parts = tested(), total = view.rows * view.columns;
  const figures = sameNumber($(".tests"), parts.length, testFigure);
  parts.forEach(({ label, colour, hidden }, i) => {
    const [canvas, caption] = figures[i].children;
    figures[i].hiddenPatches = hidden;
    canvas.setAttribute("aria-label", `${label}, ${hidden.length} patches hidden; arrow keys and space hide others`);
    paintHidden(canvas, view, hidden, document.activeElement === canvas ? cursor : null);
    caption.querySelector(".name").textContent = label;
    caption.style.setProperty("--colour", colour);
  });
  const painting = state.test === "painted";
  $(".clear").hidden = !painting || !state.painted.size;
  $(".amount").hidden = painting;
  Object.assign($(".hidden-count"), { max: total, value: state.amount });
  $(".amount output").textContent = `${state.amount} of ${total} patches`;
  measure();
}

/** Ask for the scores of what is shown; while an answer is awaited, only the latest question is kept. */
async function measure() {
  asked = true;
  if (asking) return;
  asking = true;
  while (asked && view) {
    asked = false;
    const parts = tested(), { subject, test } = state;
    const reply = await ask("scores", { ...subject, hidden: parts.map(({ hidden }) => hidden) });
    if (reply && subject === state.subject && test === state.test) numbers(parts, reply);
  }
  asking = false;
}

/** Write scores below the pictures, and points into the curves. */
function numbers(parts, { values, whole }) {
  [...$(".tests").children].forEach((figure, i) => {
    if (i in values) figure.querySelector(".number").innerHTML = `${written(values[i], 3)} <small>from ${written(whole, 3)}</small>`;
  });
  $(".tests").dataset.measured = parts[0]?.hidden.length;
  state.points = parts.map(({ colour, hidden }, i) => ({ colour, at: hidden.length / (view.rows * view.columns), value: values[i] }));
  points();
}

/** Draw what is tested now as points into the figure of curves. */
function points() {
  const figure = $(".curve svg");
  if (!figure) return;
  const { left, top, width, height, lowest, highest } = Object.fromEntries(Object.entries(figure.dataset).map(([k, v]) => [k, +v]));
  figure.querySelector(".points").innerHTML = (state.points ?? [])
    .map(({ colour, at, value }) => {
      const y = top + height * Math.min(Math.max((highest - value) / (highest - lowest), -0.02), 1.02);
      return `<circle cx="${left + width * at}" cy="${y}" r="5" style="fill: ${colour}"></circle>`;
    })
    .join("");
}

/** A picture whose patches can be hidden with the pointer or the keys. */
function testFigure() {
  const figure = document.createElement("figure");
  figure.innerHTML =
    '<canvas tabindex="0" role="application"></canvas><figcaption><span class="dot"></span><span class="name"></span><span class="number">…</span></figcaption>';
  const canvas = figure.firstChild;
  canvas.onpointerdown = (event) => {
    const patch = patchAt(canvas, view, event);
    if (patch === null) return;
    stroke = { hide: !figure.hiddenPatches.includes(patch) };
    toggle(figure, patch, stroke.hide);
  };
  canvas.onpointermove = (event) => {
    const patch = patchAt(canvas, view, event);
    if (stroke && patch !== null && event.buttons && event.pointerType !== "touch") toggle(figure, patch, stroke.hide);
  };
  canvas.onpointerup = canvas.onpointerleave = () => (stroke = null);
  canvas.onfocus = () => canvas.matches(":focus-visible") && ((cursor ??= 0), test());
  canvas.onblur = () => test();
  canvas.onkeydown = (event) => {
    if (event.key === " ") toggle(figure, (cursor ??= 0));
    else if (event.key.startsWith("Arrow")) cursor = neighbour((cursor ??= 0), view, event.key);
    else return;
    event.preventDefault();
    test();
  };
  return figure;
}

/** Hide or show a patch; what a heatmap had hidden stays hidden, and becomes the visitor's own choice. */
function toggle(figure, patch, hide = !figure.hiddenPatches.includes(patch)) {
  if (state.test !== "painted") {
    state.painted = new Set(figure.hiddenPatches);
    state.test = "painted";
    $('[name="side"][value="painted"]').checked = true;
    $(".tests").replaceChildren();
  }
  if (hide) state.painted.add(patch);
  else state.painted.delete(patch);
  test();
}
