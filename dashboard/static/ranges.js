// Ranges of time that charts show.

export const RANGES = [["300", "5 minutes"], ["3600", "1 hour"], ["86400", "1 day"], ["604800", "1 week"], ["all", "the whole run"]];

/** {since, until} for a state of a page: a stretch that was chosen, or the newest so many seconds. */
export function spanOf({since, until, range = "300"}, stream) {
  if (since) return {since, until};
  if (range === "all") return {since: 0};
  return {since: Math.max(0, (stream.newest?.time ?? Date.now() / 1000) - Number(range))};
}
