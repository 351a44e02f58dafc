// Whether values rise, fall or stay level. Neighbours on a smoothed curve are alike, and count for fewer than they are.
const FEW = 10;
const SURE = 2.5; // standard errors that the slope of a level curve seldom reaches
const ALIKE = 0.99;

/** "rising", "falling" or "level": the slope of the newest two thirds of the values; "" where few are known. */
export function trendOf(values) {
  const recent = values.slice(-Math.floor((values.length * 2) / 3));
  if (recent.length < FEW) return "";
  const middle = (recent.length - 1) / 2;
  const mean = sum(recent) / recent.length;
  const spread = sum(recent.map((_, at) => (at - middle) ** 2));
  const slope = sum(recent.map((value, at) => (at - middle) * value)) / spread;
  const rest = recent.map((value, at) => value - mean - slope * (at - middle));
  const squares = sum(rest.map((value) => value ** 2));
  const alike = squares > 0 ? Math.min(ALIKE, Math.max(0, sum(rest.slice(1).map((value, at) => value * rest[at])) / squares)) : 0;
  const error = Math.sqrt((squares / (recent.length - 2) / spread) * ((1 + alike) / (1 - alike)));
  if (Math.abs(slope) <= SURE * error) return "level";
  return slope > 0 ? "rising" : "falling";
}

const sum = (values) => values.reduce((all, value) => all + value, 0);
