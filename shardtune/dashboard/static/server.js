// Asks the server, with the API key where one is needed.

import {tell} from "./dom.js";

let key = "";

export class Gone extends Error {}

const headers = () => key ? {Authorization: `Bearer ${key}`} : {};

async function refused(reply) {
  const body = await reply.json().catch(() => null);
  if (reply.status === 401) {
    document.getElementById("keyform").hidden = false;
    document.getElementById("key").focus();
  }
  const message = body?.error?.message ?? `${reply.status} ${reply.statusText}`;
  return reply.status === 404 ? new Gone(message) : new Error(message);
}

export async function ask(path, parameters = {}, signal = undefined) {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of [value].flat()) if (each !== null && each !== undefined && each !== "") words.append(name, each);
  }
  const query = words.toString();
  const reply = await fetch(query ? `${path}?${query}` : path, {headers: headers(), signal});
  if (!reply.ok) throw await refused(reply);
  return reply.json();
}

// Server-sent events by fetch: EventSource can't send a key. Ends when the stream does.
export async function listen(path, signal, heard) {
  const reply = await fetch(path, {headers: headers(), signal});
  if (!reply.ok) throw await refused(reply);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event.startsWith("data: ")) heard(JSON.parse(event.slice(6)));
  }
}

// A page of the server in a tab of its own, which can't send a key.
export function open(path) {
  if (key) tell("A tab can't send the key: open report.html in the run's folder.", true);
  else window.open(path, "_blank", "noopener");
}

export const pause = (milliseconds, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, milliseconds);
  signal.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, {once: true});
});

export function onKey(again) {
  document.getElementById("keyform").addEventListener("submit", event => {
    event.preventDefault();
    const field = document.getElementById("key");
    key = field.value;
    field.value = "";
    event.target.hidden = true;
    again();
  });
}
