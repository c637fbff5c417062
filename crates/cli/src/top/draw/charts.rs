//! Charts of loss, accuracy, learning rate and throughput over the job's steps.

use baton_proto::v1::Metric;
use baton_recipe::task;
use ratatui::{
    Frame,
    layout::Rect,
    style::Style,
    symbols::Marker,
    text::{Line, Span},
    widgets::{Axis, Chart, Dataset, GraphType},
};

use super::block;
use crate::{
    human,
    top::{
        state::{Pane, State},
        theme::Theme,
    },
};

/// A curve with its name for the title.
struct Curve<'a> {
    name: &'a str,
    points: &'a [(f64, f64)],
    style: Style,
    marker: Marker,
}

/// The value axis of a chart.
struct Scale {
    /// Fixed lower end; by the values if `None`.
    low: Option<f64>,
    /// Fixed upper end; by the values if `None`.
    high: Option<f64>,
    text: fn(f64) -> String,
}

/// Draws four charts into four areas.
pub(super) fn draw(frame: &mut Frame<'_>, areas: &[Rect], state: &State, theme: Theme) {
    let curves = &state.curves;
    let metric = curves.evaluation.as_ref().or(curves.batch.as_ref());
    let name = |metric: &Option<Metric>| metric.as_ref().map(|metric| metric.name.clone());
    // The batches' metric may differ from the one by which evaluations are compared.
    let same_metric =
        curves.evaluation.is_none() || name(&curves.batch) == name(&curves.evaluation);
    let score = metric.filter(|_| !same_metric);
    let score = score.map_or("validation".to_owned(), |metric| task::title(&metric.name));
    let curve = |name, points, style| Curve { name, points, style, marker: Marker::Braille };
    let mut accuracy = vec![
        curve("train", curves.batches.as_slice(), theme.dim()),
        Curve { marker: Marker::Dot, ..curve(&score, curves.score.as_slice(), theme.other()) },
    ];
    if !same_metric {
        accuracy.remove(0);
    }
    let share = match metric.is_none_or(|metric| metric.is_fraction) {
        true => Scale { low: Some(0.0), high: Some(1.0), text: human::percent },
        false => Scale { low: None, high: None, text: |score| format!("{score:.3}") },
    };
    let charts = [
        (
            vec![curve("loss", curves.loss.as_slice(), theme.accent())],
            Scale { low: None, high: None, text: |loss| format!("{loss:.3}") },
        ),
        (accuracy, share),
        (
            vec![curve("learning rate", curves.lr.as_slice(), theme.warning())],
            Scale { low: Some(0.0), high: None, text: human::rate },
        ),
        (
            vec![curve("samples/s", curves.throughput.as_slice(), theme.good())],
            Scale { low: Some(0.0), high: None, text: |rate| human::grouped(rate as u64) },
        ),
    ];
    for (area, (curves, scale)) in areas.iter().zip(&charts) {
        chart(frame, *area, state, curves, scale, theme);
    }
}

fn chart(
    frame: &mut Frame<'_>,
    area: Rect,
    state: &State,
    curves: &[Curve<'_>],
    scale: &Scale,
    theme: Theme,
) {
    let mut title = vec![Span::raw(" ")];
    for curve in curves {
        let last = curve.points.last().map_or("-".to_owned(), |(_, value)| (scale.text)(*value));
        // Distinguishes the dots from the line without colours too.
        let sign = if curve.marker == Marker::Dot { "• " } else { "" };
        title.push(Span::styled(format!("{sign}{} {last} ", curve.name), curve.style));
    }
    let block = block(Line::from(title), Some(Pane::Curves), state, theme);
    let all = || curves.iter().flat_map(|curve| curve.points);
    let Some(last) = all().map(|(at, _)| *at).reduce(f64::max) else {
        let inner = block.inner(area);
        frame.render_widget(block, area);
        frame.render_widget(Line::styled("no data yet", theme.dim()).centered(), inner);
        return;
    };
    let first = all().map(|(at, _)| *at).fold(last, f64::min);
    let (low, high) = bounds(all().map(|(_, value)| *value), scale);
    let generations = state.curves.generations.iter().filter(|at| (first..=last).contains(at));
    let marks: Vec<Vec<(f64, f64)>> = generations
        .map(|at| {
            (0..=10).map(|tenth| (*at, low + (high - low) * f64::from(tenth) / 10.0)).collect()
        })
        .collect();
    let mark = |points| {
        let style = theme.dim();
        Dataset::default().data(points).graph_type(GraphType::Scatter).style(style)
    };
    let curve = |curve: &Curve<'_>| {
        // Evaluations are few, so they are drawn as dots; a line would hide how few they are.
        let kind = if curve.marker == Marker::Dot { GraphType::Scatter } else { GraphType::Line };
        (curve.marker, kind, curve.style)
    };
    let mut datasets: Vec<Dataset<'_>> =
        marks.iter().map(|points| mark(points).marker(Marker::Braille)).collect();
    datasets.extend(curves.iter().map(|drawn| {
        let (marker, kind, style) = curve(drawn);
        Dataset::default().data(drawn.points).marker(marker).graph_type(kind).style(style)
    }));
    let steps = [first, last].map(|at| human::grouped(at as u64));
    let chart = Chart::new(datasets)
        .block(block)
        .legend_position(None)
        .x_axis(
            Axis::default().bounds([first, last.max(first + 1.0)]).labels(steps).style(theme.dim()),
        )
        .y_axis(
            Axis::default()
                .bounds([low, high])
                .labels([low, high].map(scale.text))
                .style(theme.dim()),
        );
    frame.render_widget(chart, area);
}

/// The lower and upper end of the value axis.
fn bounds(values: impl Iterator<Item = f64> + Clone, scale: &Scale) -> (f64, f64) {
    let low = scale.low.unwrap_or_else(|| values.clone().fold(f64::INFINITY, f64::min));
    let high = scale.high.unwrap_or_else(|| values.fold(f64::NEG_INFINITY, f64::max));
    // A constant curve, or one below a fixed end, still needs a range.
    if high > low { (low, high) } else { (high.min(low), high.max(low) + 1.0) }
}
