// What pages share: the data, elements, and the behaviour of tools and the dialog

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function fill(element, attributes = {}, children = []) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children); // strings become text, never markup
  return element;
}

/** Call `changed` with a control at each `event`, and now, because browsers restore what the user chose before. */
function follow(id, event, changed) {
  const update = () => changed($(id));
  $(id).addEventListener(event, update);
  update();
}

/** Open panels of the tools close at a click elsewhere, and so does the dialog. */
function startTools() {
  for (const panel of document.querySelectorAll("#tools details")) {
    document.addEventListener("click", ({ target }) => { panel.open &&= panel.contains(target); });
  }
  $("close").onclick = () => $("dialog").close();
  $("dialog").onclick = ({ target }) => { if (target === $("dialog")) $("dialog").close(); }; // false would cancel clicks
  $("print").onclick = () => window.print();
  new ResizeObserver(leaveRoomForTools).observe($("tools"));
  leaveRoomForTools();
}

/** What is scrolled to must not lie below the tools, which stay at the top of wide windows. */
function leaveRoomForTools() {
  const sticky = getComputedStyle($("tools")).position === "sticky";
  document.documentElement.style.scrollPaddingTop = sticky ? `${$("tools").offsetHeight}px` : "0";
}
