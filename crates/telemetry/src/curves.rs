//! Curves as SVG, to be put into an HTML page: text to text, nothing else.
//!
//! Colours are the page's: it styles the classes `curves`, `grid`, `frame`, `mark` and, for each series, `s0`, `s1`,
//! `s2`.

use std::fmt::Write;

/// The most points of one drawn series.
const MOST_POINTS: usize = 500;

/// The most marks that are drawn.
const MOST_MARKS: usize = 100;

/// The whole drawing; it is scaled to the page's width.
const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 280.0;

/// Where the curves are.
const LEFT: f64 = 58.0;
const RIGHT: f64 = WIDTH - 22.0;
const TOP: f64 = 46.0;
const BOTTOM: f64 = HEIGHT - 44.0;

/// Beyond, differences overflow.
const LARGEST: f64 = 1e300;

/// Where something is to be drawn, in its own units.
pub type Point = (f64, f64);

/// What is left to draw of a series, after its number and name.
type Drawn<'a> = (usize, &'a str, Vec<Point>);

/// One curve.
#[derive(Debug, Clone, Default)]
pub struct Series {
    /// What it is.
    pub name: String,
    /// By rising x; points that are no finite numbers are passed over.
    pub points: Vec<Point>,
}

/// A vertical mark.
#[derive(Debug, Clone)]
pub struct Mark {
    /// Where.
    pub x: f64,
    /// What for, shown under the pointer.
    pub title: String,
}

/// A drawing.
#[derive(Debug, Clone, Default)]
pub struct Chart {
    /// What it shows.
    pub title: String,
    /// What goes to the right.
    pub x_title: String,
    /// What goes up, with its unit.
    pub y_title: String,
    /// At most three.
    pub series: Vec<Series>,
    /// The newest 100 within the curves are drawn.
    pub marks: Vec<Mark>,
    /// Whether y is logarithmic if it is positive and spans more than two decades.
    pub logarithmic_if_wide: bool,
}

/// Puts text where HTML or SVG has text or a quoted attribute.
#[must_use]
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            // No character of HTML or XML.
            c if c.is_control() && !c.is_whitespace() => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// The drawing.
#[must_use]
pub fn svg(chart: &Chart) -> String {
    let series: Vec<Drawn<'_>> = (0..)
        .zip(&chart.series)
        .map(|(number, series)| (number, series.name.as_str(), finite(&series.points)))
        .filter(|(_, _, points)| !points.is_empty())
        .collect();
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write!(
        text,
        "<svg class=\"curves\" role=\"img\" viewBox=\"0 0 {WIDTH} {HEIGHT}\">\n<title>{}</title>\n<desc>{}</desc>\n\
         <text class=\"head\" x=\"{LEFT}\" y=\"16\">{}</text>\n",
        escape(&chart.title),
        escape(&description(&series)),
        escape(&chart.title),
    );
    let points = || series.iter().flat_map(|(_, _, points)| points);
    let (Some(x), Some(y)) = (extent(points().map(|p| p.0)), extent(points().map(|p| p.1))) else {
        let _ = writeln!(
            text,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">nothing to show</text>\n</svg>",
            WIDTH / 2.0,
            HEIGHT / 2.0
        );
        return text;
    };
    let x = Axis::exact(x, (LEFT, RIGHT));
    let y = if chart.logarithmic_if_wide && y.0 > 0.0 && y.1 / y.0 > 100.0 {
        Axis::logarithmic(y, (BOTTOM, TOP))
    } else {
        Axis::rounded(y, (BOTTOM, TOP))
    };
    axes(&mut text, chart, &x, &y);
    let within = |mark: &&Mark| x.low <= mark.x && mark.x <= x.high;
    for mark in chart.marks.iter().rev().filter(within).take(MOST_MARKS) {
        let at = x.place(mark.x);
        let _ = writeln!(
            text,
            "<line class=\"mark\" x1=\"{at:.1}\" y1=\"{TOP}\" x2=\"{at:.1}\" y2=\"{BOTTOM}\"><title>{}</title></line>",
            escape(&mark.title)
        );
    }
    let mut legend = LEFT;
    for (number, name, points) in &series {
        curve(&mut text, *number, points, (&x, &y));
        let _ = writeln!(
            text,
            "<line class=\"s{number}\" x1=\"{legend:.1}\" y1=\"31\" x2=\"{:.1}\" y2=\"31\"/>\
             <text x=\"{:.1}\" y=\"35\">{}</text>",
            legend + 18.0,
            legend + 23.0,
            escape(name)
        );
        legend += 40.0 + 6.5 * name.chars().count() as f64;
    }
    text.push_str("</svg>\n");
    text
}

/// What somebody hears who cannot see it.
fn description(series: &[Drawn<'_>]) -> String {
    let said = series.iter().filter_map(|(_, name, points)| {
        let ((from, first), (to, last)) = (points.first()?, points.last()?);
        Some(format!("{name}: {} at {from}, {} at {to}", short(*first), short(*last)))
    });
    said.collect::<Vec<_>>().join("; ")
}

fn axes(text: &mut String, chart: &Chart, x: &Axis, y: &Axis) {
    for (at, label) in &y.ticks {
        let _ = writeln!(
            text,
            "<line class=\"grid\" x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{RIGHT}\" y2=\"{at:.1}\"/>\
             <text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            LEFT - 6.0,
            at + 4.0
        );
    }
    for (at, label) in &x.ticks {
        let _ = writeln!(
            text,
            "<line class=\"frame\" x1=\"{at:.1}\" y1=\"{BOTTOM}\" x2=\"{at:.1}\" y2=\"{}\"/>\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
            BOTTOM + 4.0,
            BOTTOM + 18.0
        );
    }
    let middle = f64::midpoint(TOP, BOTTOM);
    let _ = writeln!(
        text,
        "<path class=\"frame\" d=\"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}\"/>\n\
         <text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n\
         <text x=\"13\" y=\"{middle}\" text-anchor=\"middle\" transform=\"rotate(-90 13 {middle})\">{}</text>",
        f64::midpoint(LEFT, RIGHT),
        HEIGHT - 8.0,
        escape(&chart.x_title),
        escape(&chart.y_title),
    );
}

fn curve(text: &mut String, number: usize, points: &[Point], (x, y): (&Axis, &Axis)) {
    // A line needs two ends.
    if let [(only_x, only_y)] = points {
        let (cx, cy) = (x.place(*only_x), y.place(*only_y));
        let _ =
            writeln!(text, "<circle class=\"s{number}\" cx=\"{cx:.1}\" cy=\"{cy:.1}\" r=\"2\"/>");
        return;
    }
    let places = thinned(points, MOST_POINTS)
        .into_iter()
        .map(|point| format!("{:.1},{:.1}", x.place(point.0), y.place(point.1)));
    let places = places.collect::<Vec<_>>().join(" ");
    let _ = writeln!(text, "<polyline class=\"s{number}\" points=\"{places}\"/>");
}

fn finite(points: &[Point]) -> Vec<Point> {
    let good = |number: f64| number.abs() < LARGEST;
    points.iter().copied().filter(|&(x, y)| good(x) && good(y)).collect()
}

/// The least and the greatest.
fn extent(numbers: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    numbers.fold(None, |extent, number| {
        let (low, high) = extent.unwrap_or((number, number));
        Some((low.min(number), high.max(number)))
    })
}

/// At most so many points, and at least 4: the first, the last, and the lowest and the highest of each of equal
/// stretches between, so that no spike is lost.
#[must_use]
pub fn thinned(points: &[Point], most: usize) -> Vec<Point> {
    let (most, [first, between @ .., last]) = (most.max(4), points) else {
        return points.to_vec();
    };
    if points.len() <= most {
        return points.to_vec();
    }
    let stretches = (most - 2) / 2;
    let mut kept = vec![*first];
    for stretch in between.chunks(between.len().div_ceil(stretches)) {
        let by_y = |a: &&Point, b: &&Point| a.1.total_cmp(&b.1);
        let (Some(low), Some(high)) = (stretch.iter().min_by(by_y), stretch.iter().max_by(by_y))
        else {
            continue;
        };
        if low == high {
            kept.push(*low);
        } else if low.0 < high.0 {
            kept.extend([*low, *high]);
        } else {
            kept.extend([*high, *low]);
        }
    }
    kept.push(*last);
    kept
}

/// One, two or five times a power of ten, so that at most about `most` of them fit.
fn nice_step(low: f64, high: f64, most: f64) -> f64 {
    let least = (high - low) / most;
    let power = 10_f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= least * 0.999);
    factor.unwrap_or(10.0) * power
}

/// How numbers become places.
struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
    /// The places of `low` and `high`.
    places: (f64, f64),
    /// Places and labels.
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// From the least to the greatest.
    fn exact((low, high): (f64, f64), places: (f64, f64)) -> Self {
        let (low, high) = widened(low, high);
        Self::linear((low, high), nice_step(low, high, 6.0), places)
    }

    /// From a tick to a tick.
    fn rounded((low, high): (f64, f64), places: (f64, f64)) -> Self {
        let (low, high) = widened(low, high);
        let step = nice_step(low, high, 5.0);
        let extent = ((low / step + 1e-9).floor() * step, (high / step - 1e-9).ceil() * step);
        Self::linear(extent, step, places)
    }

    fn linear((low, high): (f64, f64), step: f64, places: (f64, f64)) -> Self {
        let mut axis = Self { low, high, logarithmic: false, places, ticks: Vec::new() };
        let (first, last) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
        // Few by how the step was chosen; a step too small for the numbers must not mean many.
        for number in 0..(last - first + 1.0).clamp(0.0, 20.0) as u32 {
            let value = (first + f64::from(number)) * step;
            axis.ticks.push((axis.place(value), tick_label(value, step)));
        }
        axis
    }

    /// From a power of ten to a power of ten.
    fn logarithmic((low, high): (f64, f64), places: (f64, f64)) -> Self {
        let (first, last) = ((low.log10() + 1e-9).floor(), (high.log10() - 1e-9).ceil());
        let (low, high) = (10_f64.powf(first), 10_f64.powf(last));
        let mut axis = Self { low, high, logarithmic: true, places, ticks: Vec::new() };
        let step = ((last - first) / 6.0).ceil().max(1.0) as usize;
        for exponent in (first as i32..=last as i32).step_by(step) {
            let value = 10_f64.powi(exponent);
            axis.ticks.push((axis.place(value), short(value)));
        }
        axis
    }

    fn place(&self, value: f64) -> f64 {
        let scale = |value: f64| if self.logarithmic { value.log10() } else { value };
        let (low, high) = (scale(self.low), scale(self.high));
        self.places.0 + (scale(value) - low) / (high - low) * (self.places.1 - self.places.0)
    }
}

/// An axis has a length.
fn widened(low: f64, high: f64) -> (f64, f64) {
    // Also where the difference is lost in rounding.
    if high - low > high.abs().max(low.abs()) * 1e-9 {
        return (low, high);
    }
    let more = (low.abs() * 0.1).max(1e-3);
    (low - more, high + more)
}

fn tick_label(value: f64, step: f64) -> String {
    let (unit, suffix) = match step {
        1e6..1e12 => (1e6, "M"),
        1e3..1e6 => (1e3, "k"),
        1e-4..1e3 => (1.0, ""),
        _ => return if value == 0.0 { "0".to_owned() } else { short(value) },
    };
    let decimals = (-(step / unit).log10()).ceil().max(0.0) as usize;
    // Nothing is less than nothing.
    let value = if value.abs() < step / 2.0 { 0.0 } else { value / unit };
    if value == 0.0 { "0".to_owned() } else { format!("{value:.decimals$}{suffix}") }
}

/// A number to four digits.
#[must_use]
pub fn short(value: f64) -> String {
    // Rounded by way of its text; the shortest text of what that gives has no more digits.
    let rounded = format!("{value:.3e}").parse().unwrap_or(value);
    if rounded == 0.0 || (1e-3..1e7).contains(&rounded.abs()) {
        rounded.to_string()
    } else {
        format!("{rounded:e}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: &[(f64, f64)]) -> Chart {
        Chart {
            title: "Loss".to_owned(),
            x_title: "step".to_owned(),
            y_title: "loss".to_owned(),
            series: vec![Series { name: "training".to_owned(), points: points.to_vec() }],
            marks: vec![Mark { x: 50.0, title: "generation 2".to_owned() }],
            logarithmic_if_wide: true,
        }
    }

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn a_small_drawing() {
        insta::assert_snapshot!(svg(&chart(&[(0.0, 2.5), (50.0, 1.0), (100.0, 0.5)])));
    }

    #[test]
    fn ticks_are_round_numbers() {
        let place = (0.0, 100.0);
        assert_eq!(
            labels(&Axis::rounded((0.03, 0.97), place)),
            ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]
        );
        assert_eq!(labels(&Axis::rounded((-3.0, 2.0), place)), ["-3", "-2", "-1", "0", "1", "2"]);
        assert_eq!(labels(&Axis::exact((10.0, 2_000.0), place)), ["500", "1000", "1500", "2000"]);
        assert_eq!(
            labels(&Axis::exact((0.0, 450_000.0), place)),
            ["0", "100k", "200k", "300k", "400k"]
        );
        assert_eq!(
            labels(&Axis::rounded((0.0, 4e-5), place)),
            ["0", "1e-5", "2e-5", "3e-5", "4e-5"]
        );
        assert_eq!(
            labels(&Axis::logarithmic((0.004, 20.0), place)),
            ["0.001", "0.01", "0.1", "1", "10", "100"]
        );
    }

    #[test]
    fn a_constant_and_a_single_point_have_an_axis() {
        for points in
            [&[(0.0, 7.0), (10.0, 7.0)][..], &[(5.0, 0.0)], &[(5.0, -1e200), (6.0, -1e200)]]
        {
            let drawn = svg(&chart(points));
            assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
        }
    }

    #[test]
    fn a_loss_over_more_than_two_decades_is_logarithmic() {
        let wide = svg(&chart(&[(0.0, 10.0), (1.0, 0.05)]));
        assert!(wide.contains(">0.01<") && wide.contains(">10<"), "{wide}");

        let negative = svg(&chart(&[(0.0, 10.0), (1.0, -0.05)]));
        assert!(!negative.contains(">0.01<"), "{negative}");
    }

    #[test]
    fn points_that_are_no_numbers_are_passed_over() {
        let points =
            [(0.0, 1.0), (1.0, f64::NAN), (2.0, f64::INFINITY), (f64::NAN, 1.0), (4.0, 2.0)];

        assert_eq!(svg(&chart(&points)), svg(&chart(&[(0.0, 1.0), (4.0, 2.0)])));
    }

    #[test]
    fn nothing_to_show_is_said() {
        let drawn = svg(&chart(&[(0.0, f64::NAN)]));

        assert!(drawn.contains("nothing to show") && drawn.ends_with("</svg>\n"));
    }

    #[test]
    fn thinning_keeps_ends_and_spikes() {
        let mut points: Vec<_> = (0..10_000).map(|x| (f64::from(x), 1.0)).collect();
        points[4_321].1 = 9.0;
        points[8_765].1 = -9.0;

        let kept = thinned(&points, 500);

        assert!(kept.len() <= 500, "{}", kept.len());
        assert_eq!((kept[0], kept[kept.len() - 1]), (points[0], points[9_999]));
        assert!(kept.contains(&points[4_321]) && kept.contains(&points[8_765]));
        assert!(kept.is_sorted_by(|a, b| a.0 < b.0));
    }
}
