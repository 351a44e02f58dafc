// Arrays as the API sends them, {dtype, shape, axes, data}: their numbers, and frames as pictures on canvases.
import {h} from "./dom.js";
import {figure} from "./format.js";
import {spark} from "./histogram.js";

const KINDS = {
  b1: Uint8Array, u1: Uint8Array, i1: Int8Array, u2: Uint16Array, i2: Int16Array, u4: Uint32Array, i4: Int32Array, u8: BigUint64Array,
  i8: BigInt64Array, f4: Float32Array, f8: Float64Array,
};
const LEAST_SIDE = 8; // smaller ones are not pictures
const MOST_FRAMES = 16;
const MOST_NUMBERS = 8;
const MOST_POINTS = 400;

/** The numbers of an array in C order; null if the type is unknown. */
export function numbers({dtype, data}) {
  const kind = dtype.slice(1);
  if (dtype[0] === ">") return null;
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  if (kind === "f2") return halves(new Uint16Array(bytes.buffer));
  return KINDS[kind] ? Array.from(new KINDS[kind](bytes.buffer), Number) : null;
}

/** float16 as numbers. */
function halves(words) {
  return Array.from(words, (word) => {
    const [exponent, part] = [(word >> 10) & 31, word & 1023];
    const size = exponent === 31 ? (part ? NaN : Infinity) : exponent ? (1 + part / 1024) * 2 ** (exponent - 15) : (part / 1024) * 2 ** -14;
    return word >> 15 ? -size : size;
  });
}

/**
 * Layout of an array as pictures: {frames, height, width, channels, at(frame, row, column, channel)}, or null. The last two or three
 * axes of a column may be height and width, with colours behind or before; channels other than 1 and 3 are frames of their own.
 */
function pictureOf({dtype, shape, axes}) {
  if (!["|u1", "|b1", "<f4", "<f8", "<f2"].includes(dtype)) return null;
  const own = shape.slice(axes);
  const isSide = (size) => size >= LEAST_SIDE;
  const lead = shape.slice(0, axes).reduce((product, size) => product * size, 1);
  if (own.length === 2 && own.every(isSide)) {
    const [height, width] = own;
    return {frames: lead, height, width, channels: 1, at: (f, y, x) => (f * height + y) * width + x};
  }
  if (own.length !== 3) return null;
  if (own[2] <= 16 && isSide(own[0]) && isSide(own[1])) return channelsLast(lead, ...own);
  if (own[0] <= 16 && isSide(own[1]) && isSide(own[2])) return channelsFirst(lead, ...own);
  return null;
}

function channelsLast(lead, height, width, depth) {
  const size = height * width * depth;
  if (depth === 3) return {frames: lead, height, width, channels: 3, at: (f, y, x, c) => f * size + (y * width + x) * 3 + c};
  const at = (f, y, x) => Math.floor(f / depth) * size + (y * width + x) * depth + (f % depth);
  return {frames: lead * depth, height, width, channels: 1, at};
}

function channelsFirst(lead, depth, height, width) {
  const plane = height * width;
  if (depth === 3) return {frames: lead, height, width, channels: 3, at: (f, y, x, c) => (f * 3 + c) * plane + y * width + x};
  return {frames: lead * depth, height, width, channels: 1, at: (f, y, x) => f * plane + y * width + x};
}

/** Pictures of an array's frames, the oldest first, with what they are in words; null if the array is no picture. */
export function pictures(name, array) {
  const picture = pictureOf(array);
  const values = picture && picture.frames > 0 && numbers(array);
  if (!values) return null;
  const scale = scaleOf(array.dtype, values);
  const shown = Math.min(picture.frames, MOST_FRAMES);
  const {frames, height, width, channels} = picture;
  const kind = `${width} × ${height}${channels === 3 ? " in colours" : ""}`;
  const text = frames > 1 ? `${frames} frames of ${kind}${shown < frames ? `, the first ${shown}` : ", the oldest first"}` : `one frame of ${kind}`;
  const strip = Array.from({length: shown}, (_, frame) => draw(picture, values, frame, scale, `${name}, frame ${frame + 1} of ${frames}`));
  return h("figure.frames", h("figcaption", h("b.mono", name), h("span.quiet", text)), h("div.strip", {tabindex: "0", role: "group", "aria-label": `${name}: ${text}`}, strip));
}

/** A function from values to brightness: bytes as they are, other numbers scaled from the least to the greatest. */
function scaleOf(dtype, values) {
  if (dtype === "|u1") return (value) => value;
  const known = values.filter(Number.isFinite);
  const low = known.reduce((least, value) => Math.min(least, value), Infinity);
  const span = known.reduce((most, value) => Math.max(most, value), -Infinity) - low || 1;
  return (value) => ((value - low) / span) * 255;
}

function draw({height, width, channels, at}, values, frame, scale, label) {
  const canvas = h("canvas", {width, height, role: "img", "aria-label": label});
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  let place = 0;
  for (let y = 0; y < height; y += 1) {
    for (let x = 0; x < width; x += 1) {
      for (let channel = 0; channel < 3; channel += 1) {
        image.data[place + channel] = scale(values[at(frame, y, x, channels === 3 ? channel : 0)]);
      }
      image.data[place + 3] = 255;
      place += 4;
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** An array in a cell of a table: its numbers if they are few, else a line through them. */
export function inBrief(name, array) {
  if (!array) return "–";
  const values = numbers(array);
  if (!values) return h("span.quiet", `${array.dtype} ${shapeOf(array)}`);
  if (array.dtype === "|b1") return values.length > MOST_NUMBERS ? `${values.filter(Boolean).length} of ${values.length} true` : values.map((value) => (value ? "true" : "false")).join(", ");
  if (values.length <= MOST_NUMBERS) return values.map(figure).join(", ") || "empty";
  const every = Math.ceil(values.length / MOST_POINTS);
  const known = values.filter(Number.isFinite);
  const [low, high] = [known.reduce((a, b) => Math.min(a, b), Infinity), known.reduce((a, b) => Math.max(a, b), -Infinity)];
  const line = spark(values.filter((_, at) => at % every === 0).map((value) => (Number.isFinite(value) ? value : null)), `${name}, ${values.length} values`, 24);
  return h("div.brief", line, h("span.quiet", `${figure(low)} … ${figure(high)}${known.length < values.length ? `, ${values.length - known.length} not finite` : ""}`));
}

/** (4, 84, 84) */
export const shapeOf = ({shape}) => `(${shape.join(", ")}${shape.length === 1 ? "," : ""})`;
