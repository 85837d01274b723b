// Conversations and settings, kept in the browser's local storage: each conversation by itself, so that tabs do not undo
// what others keep.
//
// A conversation has `id`, `title`, `changed` (milliseconds since 1970), `model`, `settings` and `messages`. A message has
// `role` and `content`; one of the assistant may have `reasoning`, `seconds` of reasoning, `model`, `figures`, and
// `ended`, which says in words how it ended if that was before its end.

const PREFIX = "llama-npu2-conversation-";
const SETTINGS = "llama-npu2-settings";

const NAMES = ["system", "temperature", "top_p", "max_completion_tokens", "seed"];

const known = new Map();

const parsed = (text) => {
  try { return JSON.parse(text); } catch { return null; }
};
const isMessage = (value) => typeof value?.content === "string" && ["user", "assistant"].includes(value.role);
const isConversation = (value) => {
  return typeof value?.id === "string" && Array.isArray(value.messages) && value.messages.every(isMessage);
};

const settingsOf = (value) => Object.fromEntries(NAMES.filter((name) => value?.[name] != null).map((name) => [name, value[name]]));

// Reads a conversation anew.
const read = (name) => {
  const found = parsed(localStorage.getItem(name));
  if (!isConversation(found) || PREFIX + found.id !== name) return;
  known.set(found.id, { ...found, title: String(found.title ?? ""), settings: settingsOf(found.settings) });
};

try {
  Object.keys(localStorage).filter((name) => name.startsWith(PREFIX)).forEach(read);
} catch { /* the browser keeps nothing: conversations are there until the tab is closed */ }

// Returns the conversations, the one that changed last first.
export const conversations = () => [...known.values()].sort((one, other) => (other.changed ?? 0) - (one.changed ?? 0));

export const find = (id) => known.get(id);

const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (each) => each.toString(16).padStart(2, "0")).join("");

export const create = (model) => {
  return { id: newId(), title: "", changed: Date.now(), model, settings: lastSettings(), messages: [] };
};

// Returns whether the browser has kept it. It is there until the tab is closed in any case.
export const keep = (conversation) => {
  known.set(conversation.id, conversation);
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
};

export const forget = (id) => {
  known.delete(id);
  try { localStorage.removeItem(PREFIX + id); } catch { /* it was not kept */ }
};

export const lastSettings = () => {
  try { return settingsOf(parsed(localStorage.getItem(SETTINGS))); } catch { return {}; }
};

export const keepSettings = (settings) => {
  try { localStorage.setItem(SETTINGS, JSON.stringify(settings)); } catch { /* they hold for this conversation */ }
};

// Calls a function with the id of each conversation that another tab changes or deletes.
export const whenOthersChange = (then) => {
  addEventListener("storage", ({ key, newValue }) => {
    if (key === null) {  // all is deleted
      const ids = [...known.keys()];
      known.clear();
      ids.forEach(then);
    }
    if (!key?.startsWith(PREFIX)) return;
    const id = key.slice(PREFIX.length);
    if (newValue === null) known.delete(id);
    else read(key);
    then(id);
  });
};
