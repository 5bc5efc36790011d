// Finding images: search, links, and arrow keys

const SIDEWAYS = { ArrowLeft: -1, ArrowRight: 1 }; // to another explainer
const ALONG = { ArrowUp: -1, ArrowDown: 1 }; // to another image

/** Show the images whose name, label and classes contain all words that the user typed. */
function search() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const { element, picture } of views.values()) {
    const text = [picture.name, picture.label ?? "", ...picture.classes.map(({ name }) => name)].join("\n").toLowerCase();
    element.hidden = !words.every((word) => text.includes(word));
  }
  const count = foundViews().length;
  $("found").textContent = words.length ? `${count || "none"} of ${views.size}` : "";
}

const foundViews = () => [...views.values()].filter(({ element }) => !element.hidden);

/** A picture's name, with a number if pictures before it have the same. */
function linkName(pictures, index) {
  const { name } = pictures[index];
  const earlier = pictures.slice(0, index).filter((other) => other.name === name).length;
  return earlier ? `${name} (${earlier + 1})` : name;
}

function linkTo(name) {
  const task = data.tasks.length > 1 ? `&task=${encodeURIComponent(state.task.name)}` : "";
  return `#image=${encodeURIComponent(name)}${task}`;
}

/** Scroll to the image that the address names. */
function visit() {
  const where = new URLSearchParams(location.hash.slice(1).replaceAll("+", "%2B"));
  if (!where.has("image")) return;
  const task = data.tasks.findIndex(({ name }) => name === where.get("task"));
  if (task >= 0 && data.tasks[task] !== state.task) showTask(task);
  const linked = [...views.values()].find(({ name }) => name === where.get("image"));
  views.forEach((view) => view.element.classList.toggle("linked", view === linked));
  if (!linked) return void ($("found").textContent = `no image ${where.get("image")}`);
  if (linked.element.hidden) {
    $("search").value = "";
    search();
  }
  linked.element.scrollIntoView();
}

/** The figure beside a figure in the direction of an arrow key, with its view. */
function neighbour(view, shown, key) {
  const figures = shownFigures(view);
  const beside = figures[figures.indexOf(shown) + SIDEWAYS[key]];
  if (beside) return [view, beside];
  const all = foundViews();
  const next = all[all.indexOf(view) + ALONG[key]];
  return next && [next, shownFigures(next).find(({ name }) => name === shown.name) ?? next.figures[0]];
}

/** Go to a neighbour, if there is one. */
function go(event, found, to) {
  if (!found || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  to(...found);
}

/** Arrow keys move the focus between figures; without a focus, the left and the right one start in the window. */
function onArrow(event) {
  if ($("dialog").open || event.target.matches("input, select")) return;
  const focus = (_, { button }) => button.focus();
  const view = views.get(event.target.closest("article"));
  const shown = view?.figures.find(({ button }) => button === event.target);
  if (shown) return go(event, neighbour(view, shown, event.key), focus);
  const first = foundViews().find(({ element }) => element.getBoundingClientRect().bottom > innerHeight / 4);
  if (event.key in SIDEWAYS && first && event.target === document.body) go(event, [first, first.figures[0]], focus);
}
