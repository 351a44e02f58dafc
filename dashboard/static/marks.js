// What is drawn on a chart beside its lines: stretches in which nobody looked, upright marks, ticks at the foot, the goal.
import {colour} from "./theme.js";

const MOST_TICKS = 120;
const TINTS = {bad: "--bad", good: "--good", notice: "--notice", run: "--accent"};

/** Draw within the lines' rectangle alone, in pixels of the screen. */
function within(chart, work) {
  const {ctx, bbox} = chart;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  work(ctx, bbox, devicePixelRatio);
  ctx.restore();
}

/** Shade where nobody looked. */
export function shadeAway(chart) {
  within(chart, (ctx, {top, height}) => {
    ctx.fillStyle = colour("--sunk");
    for (const [from, to] of chart.extras?.away ?? []) {
      const left = chart.valToPos(from, "x", true);
      ctx.fillRect(left, top, Math.max(1, chart.valToPos(to, "x", true) - left), height);
    }
  });
}

/** An upright line with a head at each mark. */
export function drawMarks(chart) {
  within(chart, (ctx, {top, height}, unit) => {
    for (const {x, kind} of chart.extras.marks) {
      const left = Math.round(chart.valToPos(x, "x", true)) + 0.5;
      ctx.strokeStyle = ctx.fillStyle = colour(TINTS[kind] ?? "--quiet");
      ctx.lineWidth = unit;
      ctx.setLineDash([3 * unit, 3 * unit]);
      ctx.beginPath();
      ctx.moveTo(left, top);
      ctx.lineTo(left, top + height);
      ctx.stroke();
      ctx.beginPath();
      ctx.moveTo(left - 4 * unit, top);
      ctx.lineTo(left + 4 * unit, top);
      ctx.lineTo(left, top + 6 * unit);
      ctx.fill();
    }
  });
}

/** Short ticks at the foot: as many as are told apart. */
export function drawTicks(chart) {
  const {ticks} = chart.extras;
  const every = Math.max(1, Math.ceil(ticks.length / MOST_TICKS));
  within(chart, (ctx, {top, height}, unit) => {
    ctx.fillStyle = colour("--line-5");
    ticks.forEach((x, at) => at % every === 0 && ctx.fillRect(chart.valToPos(x, "x", true), top + height - 6 * unit, unit, 6 * unit));
  });
}

/** A level line with its value above it, or below where there is no room. */
export function drawGoal(chart, format) {
  const {goal} = chart.extras;
  if (goal === null || goal === undefined) return;
  within(chart, (ctx, {left, top, width}, unit) => {
    const y = Math.round(chart.valToPos(goal, "y", true)) + 0.5;
    ctx.strokeStyle = ctx.fillStyle = colour("--good");
    ctx.lineWidth = 1.5 * unit;
    ctx.setLineDash([7 * unit, 5 * unit]);
    ctx.beginPath();
    ctx.moveTo(left, y);
    ctx.lineTo(left + width, y);
    ctx.stroke();
    ctx.font = `600 ${12 * unit}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    const isBelow = y - top < 18 * unit;
    ctx.textBaseline = isBelow ? "top" : "bottom";
    ctx.fillText(`goal ${format(goal)}`, left + width - 4 * unit, isBelow ? y + 4 * unit : y - 3 * unit);
  });
}
