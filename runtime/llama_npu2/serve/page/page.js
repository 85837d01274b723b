// The page: which conversation is shown, and what is asked for it.

import { models, Problem, reply, whenKeyIsWanted } from "./api.js";
import { button, make } from "./dom.js";
import { fit, questionView, replyView, sends } from "./messages.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const scroller = $("scroller");
const prompt = $("prompt");

let current = store.create("");
const running = new Map();  // the replies that come, by the id of their conversation

const say = (words) => { $("status").textContent = words; };

const complain = (words, again) => {
  $("problem").hidden = !words;
  $("problem").querySelector("span").textContent = words;
  $("problem").querySelector("button").hidden = !again;
};

const keep = (conversation) => {
  if (!store.keep(conversation)) complain("The browser's storage is full or closed: conversations are lost with this tab. Delete some.");
};

// dialogs

const closed = (dialog) => new Promise((resolve) => {
  dialog.returnValue = "";
  dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
  dialog.showModal();
});

const isSure = async (question) => {
  $("question").textContent = question;
  return (await closed($("sure"))) === "yes";
};

whenKeyIsWanted(async (refused) => {
  const form = $("key").querySelector("form");
  $("key-said").textContent = refused ? "The server does not take this key." : "This server wants a key.";
  form.reset();
  return (await closed($("key"))) ? form.elements.key.value : null;
});

// models

const loadModels = async () => {
  try {
    const found = await models();
    $("model").replaceChildren(...found.map(({ id }) => make("option", { value: id }, id)));
    pickModel();
    if (!$("problem").querySelector("button").hidden) complain("");
  } catch (error) {
    complain(said(error), true);
  }
  return $("model").value;
};

// Shows the model of the conversation; the first where that is no more.
const pickModel = () => {
  const names = [...$("model").options].map((each) => each.value);
  $("model").value = names.includes(current.model) ? current.model : names[0] ?? "";
};

const said = (error) => {
  if (error instanceof Problem) return error.message;
  console.error(error);
  return `The page has failed: ${error.message}`;
};

// what is shown

const atEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
const toEnd = () => { scroller.scrollTop = scroller.scrollHeight; };

const showList = () => {
  const focused = document.activeElement?.closest?.("#list [data-id]")?.dataset.id;
  const entries = store.conversations().map(({ id, title }) => {
    const link = make("a", { href: `#${id}`, "data-id": id, "aria-current": id === current.id ? "page" : null }, title);
    return make("li", {}, link, button("\u00d7", () => remove(id), { "aria-label": `Delete ${title}` }));
  });
  $("list").replaceChildren(...entries);
  if (focused) $("list").querySelector(`[data-id="${focused}"]`)?.focus();
};

const showTitle = () => {
  $("title").textContent = current.title || "New conversation";
  document.title = current.title ? `${current.title} - llama-npu2` : "llama-npu2";
};

const showButtons = () => {
  const busy = running.has(current.id);
  const stopped = document.activeElement === $("stop") && !busy;
  $("stop").hidden = !busy;
  $("send").hidden = busy;
  if (stopped) prompt.focus();
};

const showMessages = () => {
  const conversation = current;
  const views = conversation.messages.map((message, at) => {
    if (message.role === "user") return questionView(message, (text) => change(conversation, at, text));
    const last = at === conversation.messages.length - 1;
    const view = replyView(message, last && (() => again(conversation)));
    const turn = running.get(conversation.id);
    const comes = turn?.message === message;
    if (comes) turn.view = view;
    view.update(comes);
    return view;
  });
  const icon = make("img", { src: "page/icon.svg", width: 48, height: 48, alt: "" });
  const empty = make("div", { class: "empty" }, icon, make("p", {}, "What would you like to ask?"));
  empty.append(make("p", { class: "muted" }, "Conversations stay in this browser, and go to this server alone."));
  $("messages").replaceChildren(...(views.length ? views.map((each) => each.element) : [empty]));
  toEnd();
};

const show = () => {
  showList();
  showTitle();
  showButtons();
  showMessages();
};

const open = (id) => {
  if (running.has(current.id)) running.get(current.id).view = null;
  current = store.find(id) ?? store.create($("model").value);
  pickModel();
  if ($("conversations").matches(":popover-open")) $("conversations").hidePopover();
  show();
};

// Calls `paint` soon, and so that it takes a fifth of the time at most.
const painter = (paint) => {
  let due = 0;
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    setTimeout(() => requestAnimationFrame(() => {
      waits = false;
      const begun = performance.now();
      paint();
      due = performance.now() + 4 * (performance.now() - begun);
    }), Math.max(0, due - performance.now()));
  };
};

// what is asked

const KEPT_EVERY = 1000;  // milliseconds
const LEAST_TIME = 0.05;  // seconds that say something about speed: pieces may come several at a time

const requestOf = ({ settings: { system, ...chosen }, messages }) => {
  const sent = messages.filter(({ role, content, reasoning }) => role === "user" || content || reasoning);
  return {
    ...chosen,
    model: $("model").value,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...sent.map(({ role, content, reasoning }) => ({ role, content, ...(reasoning && { reasoning_content: reasoning }) })),
    ],
  };
};

// Times and counts of a reply as its pieces come.
class Watch {
  begun = performance.now();
  pieces = 0;

  piece() {
    this.pieces += 1;
    this.last = performance.now();
    this.first ??= this.last;
  }

  figures(usage) {
    if (!this.pieces && !usage) return undefined;
    const tokens = usage?.completion_tokens ?? this.pieces;
    const seconds = (this.last - this.first) / 1000;
    return {
      tokens,
      about: !usage,
      speed: tokens > 1 && seconds > LEAST_TIME ? (tokens - 1) / seconds : undefined,
      first: this.pieces ? (this.first - this.begun) / 1000 : undefined,
      prompt: usage?.prompt_tokens,
      cached: usage && (usage.prompt_tokens_details?.cached_tokens ?? 0),
    };
  }
}

const ask = async (conversation) => {
  const asked = requestOf(conversation);
  const message = { role: "assistant", content: "", model: asked.model };
  const stopper = new AbortController();
  const turn = { message, stopper, view: null };
  conversation.model = asked.model;
  conversation.messages.push(message);
  running.set(conversation.id, turn);
  keep(conversation);
  show();
  say("The reply comes.");

  const watch = new Watch();
  let usage;
  let kept = performance.now();
  const paint = painter(() => {
    if (running.get(conversation.id) !== turn) return;
    message.figures = watch.figures(usage);
    const followed = atEnd();
    turn.view?.update(true);
    if (turn.view && followed) toEnd();
  });
  const take = ({ content, reasoning_content: thought }) => {
    if (!content && !thought) return;
    watch.piece();
    if (thought) message.reasoning = (message.reasoning ?? "") + thought;
    if (content && message.reasoning) message.seconds ??= (performance.now() - watch.first) / 1000;
    message.content += content ?? "";
    paint();
    if (performance.now() - kept < KEPT_EVERY) return;
    kept = performance.now();
    keep(conversation);
  };
  turn.done = (async () => {
    try {
      for await (const chunk of reply(asked, stopper.signal)) {
        usage = chunk.usage ?? usage;
        for (const { delta, finish_reason: reason } of chunk.choices) {
          take(delta);
          if (reason === "length") message.ended = "Cut off: the reply has as many tokens as it may have, or the context is full.";
        }
      }
    } catch (error) {
      message.ended = error.name === "AbortError" ? "Stopped." : said(error);
    }
    message.figures = watch.figures(usage);
    running.delete(conversation.id);
    if (store.find(conversation.id) === conversation) keep(conversation);
    const followed = atEnd();
    turn.view?.update(false);
    if (turn.view && followed) toEnd();
    showButtons();
    if (conversation === current) say([turn.view?.text(), message.ended].filter(Boolean).join(" "));
  })();
  await turn.done;
  if (message.ended && message.ended !== "Stopped.") loadModels();
};

const stop = async (id) => {
  running.get(id)?.stopper.abort();
  await running.get(id)?.done;
};

const send = async () => {
  const text = prompt.value;
  if (!text.trim() || running.has(current.id)) return;
  if (!$("model").value && !(await loadModels())) return;
  prompt.value = "";
  fit(prompt);
  complain("");
  add(current, text);
};

const add = (conversation, text) => {
  conversation.title ||= text.trim().split("\n")[0].slice(0, 80);
  conversation.changed = Date.now();
  conversation.messages.push({ role: "user", content: text });
  history.replaceState(null, "", `#${conversation.id}`);
  ask(conversation);
};

// Asks again from a message on, with another text.
const change = async (conversation, at, text) => {
  while (running.has(conversation.id)) await stop(conversation.id);
  conversation.messages.length = at;
  if (at === 0) conversation.title = "";
  add(conversation, text);
  prompt.focus();
};

const again = (conversation) => {
  conversation.messages.pop();
  ask(conversation);
  prompt.focus();
};

const remove = async (id) => {
  if (!(await isSure(`Delete \u201c${store.find(id)?.title}\u201d? This cannot be undone.`))) return;
  await drop(id);
  $("new").focus();
};

const drop = async (id) => {
  store.forget(id);
  await stop(id);
  if (id === current.id) location.hash = "";
  else showList();
};

// settings

const form = $("settings");
const fields = [...form.querySelectorAll("[name]")];

const openSettings = () => {
  for (const field of fields) field.value = current.settings[field.name] ?? "";
  form.showModal();
};

const takeSetting = ({ target }) => {
  if (!target.validity.valid) return;
  const { settings } = current;
  if (target.value === "") delete settings[target.name];
  else settings[target.name] = target.type === "number" ? target.valueAsNumber : target.value;
  store.keepSettings(settings);
  if (current.messages.length) keep(current);
};

// events

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", () => fit(prompt));
prompt.addEventListener("keydown", (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => stop(current.id));
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open], :popover-open")) return;
  stop(current.id);
});
$("problem").querySelector("button").addEventListener("click", loadModels);
$("model").addEventListener("change", () => {
  current.model = $("model").value;
  if (current.messages.length) keep(current);
});
$("settings-button").addEventListener("click", openSettings);
form.addEventListener("input", takeSetting);
$("forget-all").addEventListener("click", async () => {
  if (!(await isSure("Delete all conversations? This cannot be undone."))) return;
  for (const { id } of store.conversations()) await drop(id);
  form.close();
});
$("yes").addEventListener("click", () => $("sure").close("yes"));
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  $("key").close("given");
});
for (const each of document.querySelectorAll("[data-close]")) {
  each.addEventListener("click", () => each.closest("dialog").close());
}
$("new").addEventListener("click", (event) => {
  event.preventDefault();
  history.pushState(null, "", "#");
  open("");
  prompt.focus();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) loadModels();  // the server may have got others
});
addEventListener("hashchange", () => open(location.hash.slice(1)));
matchMedia("(max-width: 50rem)").addEventListener("change", () => $("conversations").hidePopover());
addEventListener("pagehide", () => {
  for (const [id, { message }] of running) {
    message.ended = "Stopped: the page was closed.";
    keep(store.find(id));
  }
});
store.whenOthersChange((id) => {
  if (id === current.id && !running.has(id)) open(id);
  else showList();
});

open(location.hash.slice(1));
loadModels();
