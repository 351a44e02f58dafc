// Questions to the dashboard, which may be shown under any path: addresses are relative to where this file came from.

const ROOT = new URL("../", import.meta.url);
const ANSWER_TIMEOUT = 30_000; // milliseconds: a question without an answer would keep its page as it is for ever

/** The address of something of the dashboard's, such as "api/stream". */
export const at = (path) => new URL(path, ROOT).href;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Parameters as in an address; lists are repeated, what is empty is left out. */
export function query(parameters = {}) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== "" && each !== null && each !== undefined) found.append(name, each);
    }
  }
  const text = found.toString();
  return text ? `?${text}` : "";
}

/** Aborted with `signal`, where there is one, and when an answer takes too long. */
function untilLate(signal) {
  const late = AbortSignal.timeout(ANSWER_TIMEOUT);
  return signal ? AbortSignal.any([signal, late]) : late;
}

/** The JSON that "api/..." answers, if any; throws Refused with the reason in a sentence. */
async function ask(path, options) {
  let answer, body;
  try {
    answer = await fetch(at(`api/${path}`), options);
    body = await (answer.ok && answer.status !== 204 ? answer.json() : answer.json().catch(() => ({})));
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The dashboard does not answer. Is its process running, and is this machine still connected?");
  }
  if (answer.ok) return body;
  throw new Refused(answer.status, body.error || `The dashboard answered ${answer.status}.`);
}

/** The JSON at "api/..."; asks for a login where one is needed. Throws Refused. */
export async function get(path, parameters, signal) {
  try {
    return await ask(`${path}${query(parameters)}`, {signal: untilLate(signal), headers: {Accept: "application/json"}});
  } catch (error) {
    if (error.status === 401) document.dispatchEvent(new Event("memoire:login"));
    throw error;
  }
}

/** Give the token, or forget it; throws Refused. */
export async function post(path, body) {
  const headers = {"Content-Type": "application/json"};
  await ask(path, {method: "POST", headers, body: JSON.stringify(body ?? {}), signal: untilLate()});
}
