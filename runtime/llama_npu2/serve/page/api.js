// The server's API, which is OpenAI's: the models, and replies as they come.

const KEY = "llama-npu2-key";

// What went wrong, in words for the person who asked.
export class Problem extends Error {}

let key = "";
try { key = sessionStorage.getItem(KEY) ?? ""; } catch { /* then it is asked for after each reload */ }
let asking = null;
let askForKey = async () => null;

// Says how the key is asked for: by a function that returns it, or null. It gets whether the one before was refused.
export const whenKeyIsWanted = (ask) => { askForKey = ask; };

const replaceKey = (refused) => {
  // Several requests may be refused at the same time.
  asking ??= askForKey(refused !== "").then((given) => {
    if (given === null) throw new Problem("The server wants a key: try again to enter it.");
    key = given;
    try { sessionStorage.setItem(KEY, key); } catch { /* as above */ }
  }).finally(() => { asking = null; });
  return asking;
};

const problemOf = async (response) => {
  const said = await response.json().then((body) => body.error.message, () => "");
  if (response.status === 429) return new Problem(`The server is busy: ${said || "too many replies are under way"}.`);
  if (!said) return new Problem(`The server answers with status ${response.status}.`);
  return new Problem(`${response.status < 500 ? "The server refuses this" : "The server has failed"}: ${said}.`);
};

const request = async (path, options = {}) => {
  for (;;) {
    const sent = key;
    const headers = { ...options.headers, ...(sent && { Authorization: `Bearer ${sent}` }) };
    let response;
    try {
      response = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Problem("The server cannot be reached. Is it still running?");
    }
    if (response.ok) return response;
    if (response.status !== 401) throw await problemOf(response);
    if (sent === key) await replaceKey(sent);
  }
};

// Returns the models, as objects with `id`.
export const models = async () => (await (await request("v1/models")).json()).data;

// Yields the data of events, in their order.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

const BROKEN = "The connection broke before the reply was complete.";

// Yields the chunks of a reply. Throws a Problem, and an AbortError once the signal is given.
export async function* reply(asked, signal) {
  const body = JSON.stringify({ ...asked, stream: true, stream_options: { include_usage: true } });
  const headers = { "Content-Type": "application/json" };
  const response = await request("v1/chat/completions", { method: "POST", headers, body, signal });
  let finished = false;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Problem(`The server has ended the reply: ${chunk.error.message}.`);
      finished ||= chunk.choices.some((each) => each.finish_reason);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Problem || error.name === "AbortError") throw error;
    throw new Problem(BROKEN);
  }
  if (!finished) throw new Problem(BROKEN);
}
