// Elements. Text stays text: nothing here takes HTML.

// Attributes whose names begin with "on" are listeners; null, undefined and false leave one out. Content may be lists.
export const make = (name, attributes = {}, ...content) => {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, value);
  }
  for (const each of content.flat()) element.append(each);
  return element;
};

export const button = (text, onclick, attributes = {}) => make("button", { type: "button", onclick, ...attributes }, text);

// Browsers offer the clipboard to pages of this machine and of https alone; the old command works elsewhere, too.
const copy = async (text) => {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = make("textarea", { readonly: true, class: "unseen" }, text);
  const before = document.activeElement;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  if (!done) throw new Error("the browser does not copy");
};

// A button that copies what `text` returns.
export const copyButton = (text, label = "Copy") => {
  const made = button("Copy", async () => {
    made.textContent = await copy(text()).then(() => "Copied", () => "Not copied");
    setTimeout(() => { made.textContent = "Copy"; }, 2000);
  }, { "aria-label": label === "Copy" ? null : label });
  return made;
};

// Content that scrolls sideways, and that the keyboard reaches.
export const scrolling = (content, label) => make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": label }, content);
