// The page: what is chosen, and what the server is asked

const COLOURS = props.colours, GREY = props.grey;
const $ = (selector) => element.querySelector(selector);
const state = { index: null, chosen: null, methods: [...props.methods], test: "most", amount: 0, painted: new Set(), points: [] };
const smooth = () => $(".smooth").checked;
const keyOf = (method, index = state.index) => `${method} ${isText(index) ? [index, ...against(index)].map((text) => JSON.stringify(text)) : index}`;
let maps = new Map(), view = null, openings = 0, drawing = false, outdated = false;

/** Call a function of the server; its reply, or an error. */
async function call(name, question) {
  const reply = await server[name](question).catch(() => null);
  return reply ?? { error: "The server does not answer: is it still running?" };
}

/** Ask one of the views of views.py about the opened image; an error is shown, and nothing returned. */
async function ask(name, question) {
  const opened = view;
  const reply = await call(name, { key: opened.key, ...question });
  if (opened !== view) return null;
  if (!reply.error) return reply;
  say(reply.error, true);
  return null;
}

function say(text, error = false) {
  $(".message").textContent = text;
  $(".message").classList.toggle("error", error);
}

/** As many children as needed; those that are there stay. */
function sameNumber(parent, count, build) {
  while (parent.children.length > count) parent.lastChild.remove();
  while (parent.children.length < count) parent.append(build());
  return [...parent.children];
}

function mapFigure() {
  const figure = document.createElement("figure");
  figure.innerHTML = '<canvas role="img"></canvas><figcaption><span class="dot"></span><span class="name"></span><span class="legend"></span></figcaption>';
  return figure;
}

/** Show an image that the server opens, and explain its most probable class. */
async function open(reply) {
  const opening = ++openings;
  view = null;
  $(".opened").hidden = true;
  compare();
  say("Opening the image …");
  const opened = await reply;
  if (opening !== openings) return;
  if (opened.error) return say(opened.error, true);
  const [image, pale] = await Promise.all([decoded(opened.picture), decoded(opened.pale)]);
  if (opening !== openings) return;
  maps = new Map();
  view = { ...opened, image, pale };
  Object.assign(state, { test: "most", amount: Math.round(0.2 * view.rows * view.columns), painted: new Set(), points: [] });
  $('[name="side"]').checked = true;
  $(".opened").hidden = false;
  say("");
  compare();
  $(".ask").hidden = !view.prompts;
  await scorePrompts();
  const first = view?.classes[0] ?? prompts[0];
  $(".explained").hidden = !first;
  if (first) explain(first);
  else if (view) draw();
}

/** Explain a class [index, name, probability] by all chosen methods. */
async function explain(chosen) {
  Object.assign(state, { index: chosen[0], chosen, points: [] });
  listClasses();
  const index = state.index, methods = [...state.methods];
  await Promise.all(methods.map((method) => explainBy(method, index)));
  if (index === state.index && String(methods) === String(state.methods)) curve();
}

async function explainBy(method, index) {
  const key = keyOf(method, index), known = maps.get(key);
  draw();
  if (known) return;
  const reply = await ask("heatmap", { method, index, against: against(index) });
  if (!reply) return;
  maps.set(key, { tiles: tilesOf(reply.tiles), order: reply.order, legend: reply.legend });
  if (index !== state.index) return;
  state.chosen = reply.class;
  listClasses();
  draw();
  test();
}

function draw() {
  if (state.index === null) return;
  const columns = state.methods.length + 1;
  $(".opened").style.setProperty("--columns", Math.max(columns, 3));
  $(".opened").style.setProperty("--curve", columns > 2 ? 2 : 1);
  const figures = sameNumber($(".maps"), columns, mapFigure);
  paint(figures[0].firstChild, view.image);
  figures[0].firstChild.setAttribute("aria-label", view.name);
  figures[0].querySelector(".name").textContent = view.name;
  figures[0].querySelector(".dot").hidden = true;
  showLegend(figures[0].querySelector(".legend"), { colours: [], words: [view.unseen] });
  state.methods.forEach((method, i) => {
    const [canvas, caption] = figures[i + 1].children;
    const map = maps.get(keyOf(method));
    figures[i + 1].classList.toggle("waiting", !map);
    paint(canvas, view.pale, map?.tiles, view.box);
    canvas.setAttribute("aria-label", `heatmap of ${state.chosen[1]} by ${method}`);
    canvas.dataset.shown = map ? keyOf(method) : "";
    caption.querySelector(".name").textContent = map ? method : `${method} …`;
    showLegend(caption.querySelector(".legend"), map?.legend);
    caption.style.setProperty("--colour", COLOURS[i]);
  });
}

/** Ask for the curves of the chosen methods; while an answer is awaited, only the latest question is kept. */
async function curve() {
  state.points = [];
  points();
  $(".curve").classList.add("waiting");
  test();
  outdated = true;
  if (drawing) return;
  drawing = true;
  while (outdated && view) {
    outdated = false;
    const side = state.test === "least" ? "least" : "most", { index, methods } = state;
    const reply = await ask("curves", { methods, index, side, against: against(index) });
    if (!reply || index !== state.index || methods !== state.methods || (state.test === "least") !== (side === "least")) continue;
    $(".curve").classList.remove("waiting");
    $(".curve div").innerHTML = reply.svg;
    points();
  }
  drawing = false;
}

function listClasses() {
  $(".contrast").hidden = !isText(state.index) || prompts.length < 2;
  const shown = [...prompts].sort((one, other) => other[2] - one[2]).concat(view.classes);
  if (!shown.some(([index]) => index === state.index)) shown.push(state.chosen);
  sameNumber($(".classes"), shown.length, () => Object.assign(document.createElement("button"), { type: "button" })).forEach((button, i) => {
    const [index, name, probability] = shown[i];
    const value = document.createElement("b");
    value.textContent = probability === null ? "" : probability.toFixed(2);
    button.replaceChildren(name, value);
    button.style.setProperty("--probability", Math.min(Math.max(probability ?? 0, 0), 1));
    button.dataset.index = index;
    button.setAttribute("aria-pressed", index === state.index);
    button.onclick = () => explain(shown[i]);
  });
}

async function save() {
  const reply = await ask("picture", { methods: state.methods, index: state.index, against: against(), smooth: smooth() });
  if (reply) Object.assign(document.createElement("a"), { href: reply.url, download: reply.file }).click();
}

$(".smooth").onchange = () => view && (draw(), drawAlike());
listenToTexts();
$(".save").onclick = save;
$(".hidden-count").oninput = () => ((state.amount = +$(".hidden-count").value), test());
$(".clear").onclick = () => (state.painted.clear(), test());
element.querySelectorAll('[name="side"]').forEach((radio) => {
  radio.onchange = () => ((state.test = radio.value), $(".tests").replaceChildren(), curve());
});
listenToChoices();
