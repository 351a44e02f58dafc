// Requests to the dashboard. Addresses are relative to this file, because the dashboard may be served under any path.

const ROOT = new URL("../", import.meta.url);
const ANSWER_TIMEOUT = 30_000; // milliseconds, so that a request without an answer does not block its page

/** The full address of a path of the dashboard, such as "api/stream". */
export const at = (path) => new URL(path, ROOT).href;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Parameters as in an address; lists are repeated, empty values are left out. */
export function query(parameters = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== "" && each !== null && each !== undefined) search.append(name, each);
    }
  }
  const text = search.toString();
  return text ? `?${text}` : "";
}

/** A signal that aborts with `signal`, if there is one, and after ANSWER_TIMEOUT. */
function untilLate(signal) {
  const late = AbortSignal.timeout(ANSWER_TIMEOUT);
  return signal ? AbortSignal.any([signal, late]) : late;
}

/** The JSON from "api/...", if any; throws Refused with the reason in a sentence. */
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

/** The JSON at "api/..."; asks for a login if one is needed. Throws Refused. */
export async function get(path, parameters, signal) {
  try {
    return await ask(`${path}${query(parameters)}`, {signal: untilLate(signal), headers: {Accept: "application/json"}});
  } catch (error) {
    if (error.status === 401) document.dispatchEvent(new Event("memoire:login"));
    throw error;
  }
}

/** Log in with a token, or log out; throws Refused. */
export async function post(path, body) {
  const headers = {"Content-Type": "application/json"};
  await ask(path, {method: "POST", headers, body: JSON.stringify(body ?? {}), signal: untilLate()});
}
