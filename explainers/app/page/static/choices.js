// What a visitor chooses: an image, one to compare it with, a class of all, and the explainers side by side

/** The name that somebody means: the one that is typed, one that has it as a word, one that begins so, the shortest. */
function meant(names, typed) {
  const wanted = typed.trim().toLowerCase();
  const rank = (name) => {
    const known = name.toLowerCase();
    return known === wanted ? 0 : known.split(/\W+/).includes(wanted) ? 1 : known.startsWith(wanted) ? 2 : 3;
  };
  const found = wanted ? names.filter((name) => name.toLowerCase().includes(wanted)) : [];
  return found.sort((one, other) => rank(one) - rank(other) || one.length - other.length)[0];
}

/** Suggest names below an input; one that is picked, or meant when Enter is pressed, is chosen. */
function suggest(field, names, notes, choose) {
  const input = field.querySelector("input"), list = field.querySelector("datalist");
  list.replaceChildren(...names.map((value, i) => Object.assign(document.createElement("option"), { value, label: notes[i] ?? "" })));
  const take = (name) => ((input.value = ""), choose(name));
  input.oninput = ({ inputType }) => inputType?.startsWith("insertText") || inputType?.startsWith("delete") || (names.includes(input.value) && take(input.value));
  input.onkeydown = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    const name = meant(names, input.value);
    if (name) take(name);
  };
}

/** Send a file to the server; the reply is that of `open_image`. */
async function upload(file) {
  if (file.size > props.largest) return { error: `${file.name}: expected a file of at most ${props.largest >> 20} MB` };
  const url = await new Promise((done) => {
    const reader = Object.assign(new FileReader(), { onloadend: () => done(reader.result ?? "") });
    reader.readAsDataURL(file);
  });
  return call("open_image", { name: file.name, data: url.split(",")[1] ?? "" });
}

/** Show the chosen explainers as buttons that remove them. */
function listMethods() {
  const buttons = sameNumber($("#methods .chosen"), state.methods.length, newButton);
  state.methods.forEach((method, i) => {
    buttons[i].textContent = `${method} ✕`;
    buttons[i].setAttribute("aria-label", `Remove ${method}`);
    buttons[i].onclick = () => compareMethods(state.methods.filter((each) => each !== method));
  });
  $("#methods input").disabled = state.methods.length >= props.most;
}

function compareMethods(methods) {
  state.methods = methods;
  listMethods();
  if (view && state.chosen) explain(state.chosen, state.subject.against);
}

function listenToChoices() {
  $(".example").onclick = () => open(call("open_image", {}));
  [[".photo", open], [".second", openOther]].forEach(([place, show]) => {
    const input = $(`${place} input`);
    input.onchange = () => {
      const [file] = input.files;
      if (file) show(upload(file));
      input.value = ""; // the same file can be chosen again
    };
  });
  addEventListener("paste", ({ clipboardData }) => clipboardData.files.length && open(upload(clipboardData.files[0])));
  const known = new Set(), labels = props.classes.map((name, i) => (known.has(name) ? `${name} (${i})` : (known.add(name), name)));
  $("#search").hidden = !labels.length;
  $("#search span").textContent = `Search all ${labels.length} classes`;
  suggest($("#search"), labels, [], (name) => view && explain([labels.indexOf(name), "…", null]));
  const names = props.explainers.map(([name]) => name);
  suggest($("#methods"), names, props.explainers.map(([, note]) => note), (name) => state.methods.includes(name) || compareMethods([...state.methods, name]));
  listMethods();
}
