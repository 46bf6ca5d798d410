/* Elements and their texts. Everything that is shown goes in as text, never as markup. */

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    if (name === "class") made.className = value;
    else if (name === "hidden") made.hidden = true;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((child) => child != null && child !== false));
  return made;
}

export function byId(id) {
  return document.getElementById(id);
}

/* Text of a stranger's choice: its direction cannot change the order of what is around it. */
export function foreign(text, attributes = {}) {
  return element("bdi", attributes, text);
}

export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/* Returns a function that calls `render(value)` only where the value is not what it was, so that what did
   not change keeps its selection and its focus. */
export function onChange(render) {
  let last;
  return (value) => {
    const key = JSON.stringify(value);
    if (key === last) return;
    last = key;
    render(value);
  };
}

export function press(buttons, chosen) {
  for (const button of buttons) button.setAttribute("aria-pressed", String(button === chosen));
}

export function stored(name, otherwise) {
  try {
    return localStorage.getItem(`growcache.${name}`) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function store(name, value) {
  try {
    if (value == null) localStorage.removeItem(`growcache.${name}`);
    else localStorage.setItem(`growcache.${name}`, value);
  } catch {
    // Storage is forbidden; the choice holds until the page is left.
  }
}
