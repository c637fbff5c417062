// A chart of values over steps, as SVG: axes, values under the pointer or by arrow keys, and marks where training
// resumed.

import { whole } from "./format.js";
import { element, setText, show } from "./page.js";

const HEIGHT = 200;
const MARGIN = { top: 10, right: 26, bottom: 26 };
/** Width of a digit of an axis label at a font size of 12 px, in px. */
const DIGIT_WIDTH = 7;
/** Values with a larger ratio of maximum to minimum get a logarithmic scale by default. */
const LOG_SCALE_RATIO = 100;

const svg = (tag, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

/** Round numbers between two others; their distance is 1, 2 or 5 times a power of ten. */
const ticksBetween = (low, high, count) => {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const width = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / width); tick * width <= high * (1 + 1e-9) && ticks.length < 50; tick += 1) {
    ticks.push(tick * width);
  }
  return ticks;
};

const powersBetween = (low, high) => {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of [1, 2, 5]) ticks.push(factor * 10 ** power);
  }
  const inside = ticks.filter((tick) => tick >= low && tick <= high);
  return inside.length > 6 ? inside.filter((tick) => Math.abs(Math.log10(tick) % 1) < 1e-9) : inside;
};

/** Minimum and maximum. `Math.min(...values)` would overflow the stack for long lists. */
const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

/** An axis label without trailing zeros: 0.4 instead of 0.4000. */
const short = (text) => text.replace(/^([^.]*)\.(\d*?)0+(\D*)$/, (_, before, after, unit) =>
  `${before}${after && "."}${after}${unit}`);

/** At most about `limit` points: minimum and maximum of equal intervals, so that no spike is lost, and the last point. */
const thinned = (points, limit) => {
  if (points.length <= limit) return points;
  const size = Math.ceil((2 * points.length) / limit);
  const kept = [];
  for (let start = 0; start < points.length; start += size) {
    const interval = points.slice(start, start + size).filter(([, value]) => Number.isFinite(value));
    const low = interval.reduce((a, b) => (b[1] < a[1] ? b : a), interval[0]);
    const high = interval.reduce((a, b) => (b[1] > a[1] ? b : a), interval[0]);
    // Without a finite value, there is a gap in the curve.
    if (interval.length === 0) kept.push([points[start][0], NaN]);
    else if (low === high) kept.push(low);
    else kept.push(...(low[0] < high[0] ? [low, high] : [high, low]));
  }
  const last = points[points.length - 1];
  return kept[kept.length - 1] === last ? kept : [...kept, last];
};

export class Chart {
  /** `format` formats a value; `series` are the names of the curves; `canLog` adds a switch for a log scale. */
  constructor(parent, { title, series, format, canLog = false, fromZero = false }) {
    Object.assign(this, { title, names: series, format, fromZero, isLog: false, at: null, shown: [] });
    this.keys = series.map((name, index) =>
      element("li", {}, element("span", { class: `key series-${index}`, "aria-hidden": "true" }), name));
    this.plot = element("div", {
      class: "plot",
      tabindex: "0",
      role: "group",
      "aria-label": `${title}: use arrow keys to read the values`,
    });
    this.reading = element("output", { class: "reading" });
    const caption = element("figcaption", {}, element("h3", {}, title));
    if (series.length > 1) caption.append(element("ul", { class: "legend" }, ...this.keys));
    if (canLog) {
      this.box = element("input", { type: "checkbox" });
      this.box.addEventListener("change", () => {
        this.hasUserChoice = true;
        this.isLog = this.box.checked;
        this.redraw();
      });
      caption.append(element("label", { class: "switch" }, this.box, " log scale"));
    }
    this.figure = element("figure", { class: "chart" }, caption, this.plot, this.reading);
    parent.append(this.figure);
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.read(null));
    this.plot.addEventListener("blur", () => this.read(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.redraw()).observe(this.plot);
  }

  /** `curves` are lists of [step, value], one for each series; `marks` are {step, generation}. */
  draw(curves, marks) {
    this.curves = curves;
    this.marks = marks;
    curves.forEach((curve, index) => show(this.keys[index], curve.length > 0));
    if (this.box && !this.hasUserChoice) {
      const values = curves.flat().map(([, value]) => value).filter(Number.isFinite);
      const [low, high] = extent(values);
      this.box.checked = this.isLog = low > 0 && high > LOG_SCALE_RATIO * low;
    }
    this.redraw();
  }

  redraw() {
    const width = this.plot.clientWidth;
    if (!this.curves || width < 50) return;
    const right = width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const usable = (value) => Number.isFinite(value) && (!this.isLog || value > 0);
    this.shown = this.curves.map((curve) => thinned(
      curve.map(([step, value]) => [step, usable(value) ? value : NaN]),
      Math.max(50, Math.floor(width / 2)),
    ));
    const points = this.shown.flat();
    const values = points.map(([, value]) => value).filter(usable);
    const picture = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img" });
    picture.setAttribute("aria-label", this.summary());
    this.line = svg("line", { class: "cursor", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
    if (values.length === 0) {
      picture.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "no values yet"));
      this.x = null;
      this.plot.replaceChildren(picture);
      return;
    }

    const steps = points.map(([step]) => step).concat(this.marks.map((mark) => mark.step));
    let [first, last] = extent(steps);
    last = Math.max(last, first + 1);
    let [low, high] = extent(values);
    if (this.fromZero) low = Math.min(0, low);
    if (high - low <= Math.abs(high) * 1e-9) {
      [low, high] = this.isLog ? [low / 2, high * 2] : [low - Math.abs(low) * 0.1 - 1e-9, high + Math.abs(high) * 0.1 + 1e-9];
    }
    const scale = this.isLog ? Math.log10 : (value) => value;
    const ticks = (this.isLog ? powersBetween(low, high) : ticksBetween(low, high, 4))
      .map((tick) => [tick, short(this.format(tick))]);
    const left = 14 + DIGIT_WIDTH * Math.max(4, ...ticks.map(([, label]) => label.length));
    this.x = (step) => left + ((step - first) / (last - first)) * (right - left);
    const y = (value) => bottom - ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (bottom - MARGIN.top);

    for (const [tick, label] of ticks) {
      picture.append(svg("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }));
      picture.append(svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, label));
    }
    for (const tick of ticksBetween(first, last, Math.max(2, width / 110)).filter(Number.isInteger)) {
      picture.append(svg("text", { x: this.x(tick), y: HEIGHT - 8, "text-anchor": "middle" }, whole(tick)));
    }
    for (const { step, generation } of this.marks) {
      const title = svg("title", {}, `generation ${generation} resumed after step ${whole(step)}`);
      const x = this.x(step);
      picture.append(svg("g", { class: "mark" }, title,
        svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: bottom }),
        svg("path", { d: `M${x - 4} ${MARGIN.top - 6}h8l-4 7z` })));
    }
    this.shown.forEach((curve, index) => {
      let path = "";
      let isPenDown = false;
      for (const [step, value] of curve) {
        if (Number.isFinite(value)) path += `${isPenDown ? "L" : "M"}${this.x(step).toFixed(1)} ${y(value).toFixed(1)}`;
        isPenDown = Number.isFinite(value);
      }
      picture.append(svg("path", { class: `curve series-${index}`, d: path }));
      // A path of one point is invisible.
      if (curve.length > 0 && curve.length < 40 && index > 0) {
        for (const [step, value] of curve) {
          if (Number.isFinite(value)) picture.append(svg("circle", { class: `dot series-${index}`, cx: this.x(step), cy: y(value), r: 3 }));
        }
      }
    });
    picture.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }), this.line);
    this.plot.replaceChildren(picture);
    this.read(this.at);
  }

  summary() {
    const texts = this.curves.map((curve, index) => {
      const values = curve.filter(([, value]) => Number.isFinite(value));
      if (values.length === 0) return `${this.names[index]}: no values`;
      const [from, to] = [values[0], values[values.length - 1]];
      return `${this.names[index]}: from ${this.format(from[1])} at step ${whole(from[0])} to ${this.format(to[1])} at step ${whole(to[0])}`;
    });
    const resumes = this.marks.filter((mark) => mark.step > 0).length;
    return `${this.title}. ${texts.join("; ")}.${resumes ? ` Training resumed ${resumes} times after an interruption.` : ""}`;
  }

  point(event) {
    if (!this.x) return;
    const pointerX = event.clientX - this.plot.getBoundingClientRect().left;
    const curve = this.shown[0].length ? this.shown[0] : this.shown[this.shown.length - 1];
    const distance = ([step]) => Math.abs(this.x(step) - pointerX);
    this.read(curve.reduce((best, point) => (distance(point) < distance(best) ? point : best))[0]);
  }

  key(event) {
    const steps = (this.shown[0]?.length ? this.shown[0] : this.shown.flat()).map(([step]) => step);
    if (steps.length === 0) return;
    const here = this.at === null ? steps.length - 1 : steps.findIndex((step) => step >= this.at);
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: steps.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.read(steps[Math.max(0, Math.min(steps.length - 1, to))]);
  }

  /** Shows the values of the curves at a step; hides them if `step` is null. */
  read(step) {
    this.at = step;
    if (step === null || !this.x) {
      this.line?.setAttribute("visibility", "hidden");
      setText(this.reading, "");
      return;
    }
    this.line.setAttribute("visibility", "visible");
    this.line.setAttribute("x1", this.x(step));
    this.line.setAttribute("x2", this.x(step));
    const values = this.shown.map((curve, index) => {
      const before = curve.filter(([at]) => at <= step);
      const name = this.names.length > 1 ? `${this.names[index]} ` : "";
      return before.length ? `${name}${this.format(before[before.length - 1][1])}` : null;
    });
    setText(this.reading, `step ${whole(step)}: ${values.filter(Boolean).join(", ")}`);
  }
}
