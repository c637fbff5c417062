// The charts of a job, for the dashboard and the report.

import { Chart } from "./chart.js";
import { decimal, percent } from "./format.js";

const VALIDATED = ["training", "validation", "averaged weights"];
const step = (read) => (history) => history.curve(read);
const validation = (read) => (history) => history.evaluated(read);
const averaged = (read) => (history) => history.evaluated(({ ema }) => (ema ? read(ema) : NaN));

/** Each function in `curves` reads a curve from the history. */
const CHARTS = [
  {
    title: "Loss", series: VALIDATED, format: (it) => decimal(it), canLog: true,
    curves: [step((it) => it.loss), validation((it) => it.loss), averaged((it) => it.loss)],
  },
  {
    title: "Learning rate", series: ["learning rate"], format: (it) => decimal(it, 4), fromZero: true,
    curves: [step((it) => it.lr)],
  },
  {
    title: "Samples per second", series: ["samples per second"], format: (it) => decimal(it, 0), fromZero: true,
    curves: [step((it) => it.samples_per_second)],
  },
];

/** The chart of a metric. Training steps may lack a value of the metric. */
const metricChart = ({ name, is_fraction: isFraction }) => {
  const read = ({ metrics }) => metrics.find((it) => it.name === name)?.value;
  const trained = (history) => history.curve(read).filter(([, value]) => Number.isFinite(value));
  return {
    title: name, series: VALIDATED, format: (it) => (isFraction ? percent(it) : decimal(it)), fromZero: true,
    curves: [trained, validation(read), averaged(read)],
  };
};

/** Adds the charts to the page. Returns a function that draws a history, and adds a chart for each new metric in it. */
export const addCharts = (parent) => {
  const add = (chart) => ({ ...chart, drawn: new Chart(parent, chart) });
  const charts = CHARTS.map(add);
  const hasChart = (name) => name === "loss" || charts.some(({ title }) => title === name);
  return (history) => {
    for (const metric of history.metrics().filter(({ name }) => !hasChart(name))) {
      const chart = add(metricChart(metric));
      // Insert it after the loss chart.
      charts[1].drawn.figure.before(chart.drawn.figure);
      charts.push(chart);
    }
    for (const { drawn, curves } of charts) {
      drawn.draw(curves.map((curve) => curve(history)), history.marks);
    }
  };
};
