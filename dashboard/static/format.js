// Texts of figures. An unknown value is a dash, never a zero.

export const NONE = "–";
const whole = new Intl.NumberFormat("en", {maximumFractionDigits: 0});
const brief = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 3});
const exact = new Intl.NumberFormat("en", {maximumSignificantDigits: 3});
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** 1,234,567 */
export const count = (value) => (isNumber(value) ? whole.format(value) : NONE);

/** 3.14, 5,123 or 1.23M: what fits on an axis or a tile. */
export function figure(value) {
  if (!isNumber(value)) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  if (size >= 10_000) return brief.format(value);
  return size < 100 ? exact.format(value) : whole.format(value);
}

/** 1.23 MB, 12.3 MB, 123 MB */
export function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  const digits = unit ? Math.max(0, 2 - Math.floor(Math.log10(Math.max(1, Math.abs(value))))) : 0;
  return `${value.toFixed(digits)} ${units[unit]}`;
}

/** 93 % */
export const share = (value) => (isNumber(value) ? `${exact.format(Math.round(value * 1000) / 10)} %` : NONE);

/** 340 ms, 12.3 s, 4 min, 3.1 h, 2.4 days */
export function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 1) return `${exact.format(Math.round(seconds * 10_000) / 10)} ms`;
  if (seconds < 90) return `${seconds < 10 ? seconds.toFixed(1) : whole.format(seconds)} s`;
  if (seconds < 5400) return `${seconds < 600 ? exact.format(Math.round(seconds / 6) / 10) : whole.format(seconds / 60)} min`;
  if (seconds < 172_800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86_400).toFixed(1)} days`;
}

/** "in 3.1 h"; `already` if no time is left, "not foreseen" for null. */
export const until = (seconds, already) => (seconds === null ? "not foreseen" : seconds > 0 ? `in ${duration(seconds)}` : already);

/** 12 s ago, or "just now" */
export function ago(time, now) {
  if (!isNumber(time) || !isNumber(now)) return NONE;
  return now - time < 1 ? "just now" : `${duration(now - time)} ago`;
}

/** 14:03:22, with the date if it is not today's */
export function clock(time) {
  if (!isNumber(time)) return NONE;
  const date = new Date(time * 1000);
  const hours = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? hours : `${date.toLocaleDateString("en-CA")} ${hours}`;
}

const IS_TIME = /^(time|since|began)$|_(seen|cache)$/;
const IS_COUNT = /bytes|credit|chunk|limit|inline|steps|samples|lines|caches|entries|episodes|given|lost|applied|stale/;

/** Text of a value that a node reports, by the kind that its name suggests. */
export function raw(name, value) {
  if (value === null || value === undefined || value === "") return NONE;
  if (typeof value !== "number") return String(value);
  if (IS_TIME.test(name) && value > 1e9) return clock(value > 1e15 ? value / 1e9 : value); // the lives of servers are in nanoseconds
  if (!Number.isInteger(value)) return String(Number(value.toPrecision(6)));
  return IS_COUNT.test(name) ? count(value) : String(value);
}

const KINDS = {f: "float", i: "int", u: "uint", c: "complex"};

/** "float32" for "<f4". */
export function typeName(type) {
  const [, kind, size] = /^[<>|=]?([fiuc])(\d+)$/.exec(type) ?? [];
  return kind ? `${KINDS[kind]}${8 * Number(size)}` : type === "|b1" ? "bool" : type;
}

/** "sample_age_median" -> "sample age median" */
export const words = (name) => name.replaceAll("_", " ");
