// Messages as elements.

import { button, copyButton, make } from "./dom.js";
import { Markdown } from "./markdown.js";

const rounded = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });
const speeds = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const whole = new Intl.NumberFormat("en");
const counted = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;

// What a reply took, in words. Counts of one that was not finished are those of its pieces.
const described = ({ tokens, speed, first, prompt, cached, about }) => {
  const words = [`${about ? "about " : ""}${counted(tokens, "token")}`];
  if (speed) words.push(`${speeds.format(speed)} tokens/s`);
  if (first !== undefined) words.push(`first after ${rounded.format(first)} s`);
  if (prompt !== undefined) words.push(`prompt of ${whole.format(prompt)}, ${whole.format(cached)} cached`);
  return words.join(" \u00b7 ");
};

// Returns the element of a reply, and what shows how far it has come.
export const replyView = (message, again) => {
  const text = make("div", { class: "text" });
  const thought = make("div", { class: "text" });
  const thinking = make("summary");
  const reasoning = make("details", { class: "reasoning", hidden: true }, thinking, thought);
  const ended = make("p", { class: "ended", hidden: true });
  const figures = make("span", { class: "figures" });
  const buttons = make("span", { class: "buttons" });
  const heading = make("h2", { class: "unseen" }, `Reply of ${message.model ?? "the model"}`);
  const element = make("article", { class: "reply" }, heading, reasoning, text, ended, make("footer", {}, figures, buttons));
  const markdown = { text: new Markdown(text), thought: new Markdown(thought) };

  const update = (running) => {
    reasoning.hidden = !message.reasoning;
    if (message.reasoning) {
      markdown.thought.show(message.reasoning);
      const wait = message.seconds === undefined ? "" : ` for ${counted(Math.max(1, Math.round(message.seconds)), "second")}`;
      thinking.textContent = running && !message.content ? "Thinking\u2026" : `Thought${wait}`;
    }
    markdown.text.show(message.content);
    element.classList.toggle("running", running);
    ended.hidden = !message.ended;
    ended.textContent = message.ended ?? "";
    figures.textContent = message.figures ? described(message.figures) : "";
    figures.title = message.model ?? "";
    if (running) buttons.replaceChildren();
    else if (!buttons.childNodes.length) {
      buttons.append(...(message.content ? [copyButton(() => message.content, "Copy reply")] : []));
      if (again) buttons.append(button("Ask again", again));
    }
  };
  return { element, update, text: () => text.textContent };
};

// Returns the element of what a user said; `change` gets the text that replaces it.
export const questionView = (message, change) => {
  const heading = make("h2", { class: "unseen" }, "Your message");
  const element = make("article", { class: "question" });

  const show = () => {
    const edit = button("Edit", ask, { "aria-label": "Edit message" });
    const footer = make("footer", {}, make("span", { class: "buttons" }, copyButton(() => message.content, "Copy message"), edit));
    element.replaceChildren(heading, make("div", { class: "said" }, message.content), footer);
    return edit;
  };
  const ask = () => {
    const area = make("textarea", { "aria-label": "Message to ask instead", rows: 2 });
    area.value = message.content;
    const cancel = () => show().focus();
    const send = () => {
      if (area.value.trim()) change(area.value);
    };
    area.addEventListener("input", () => fit(area));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.preventDefault();
        cancel();
      } else if (sends(event)) {
        event.preventDefault();
        send();
      }
    });
    const note = make("p", { class: "muted" }, "What follows this message is dropped.");
    const buttons = make("p", { class: "buttons" }, button("Cancel", cancel), button("Send", send, { class: "main" }));
    element.replaceChildren(heading, make("div", { class: "said" }, area, note, buttons));
    fit(area);
    area.focus();
  };
  show();
  return { element };
};

// Makes a field as high as its text.
export const fit = (area) => {
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + area.offsetHeight - area.clientHeight}px`;
};

const noKeyboard = matchMedia("(hover: none) and (pointer: coarse)");

// Whether a key sends what is written. Keyboards on a screen have no Shift+Enter, and a button is near.
export const sends = (event) => {
  if (event.key !== "Enter" || event.isComposing || event.shiftKey) return false;
  return event.ctrlKey || event.metaKey || !noKeyboard.matches;
};
