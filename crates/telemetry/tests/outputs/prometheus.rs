use std::collections::{BTreeMap, BTreeSet};

use baton_proto::v1::{GetStatusResponse, Step};
use baton_telemetry::prometheus::text;

use crate::sample;

#[derive(Debug, PartialEq)]
struct Series {
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

/// Parses a page, and panics if it violates the grammar: every series must belong to the family whose HELP and TYPE are
/// directly above it.
fn parse(page: &str) -> Vec<Series> {
    let mut all = Vec::new();
    let mut families = BTreeSet::new();
    let mut family = String::new();
    let mut lines = page.lines().peekable();
    assert!(page.is_empty() || page.ends_with('\n'));
    while let Some(line) = lines.next() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').unwrap();
            assert!(!help.is_empty() && !help.contains('\\'), "{line}");
            let kind = lines.next().unwrap().strip_prefix(&format!("# TYPE {name} ")).unwrap();
            assert!(["gauge", "counter"].contains(&kind), "{kind}");
            assert_eq!(kind == "counter", name.ends_with("_total"), "{name}");
            assert!(families.insert(name.to_owned()), "{name} twice");
            assert!(lines.peek().is_some_and(|line| line.starts_with(name)), "{name} is empty");
            family = name.to_owned();
        } else {
            let series = parse_series(line);
            assert_eq!(series.name, family, "{line}");
            let same =
                |other: &&Series| (&other.name, &other.labels) == (&series.name, &series.labels);
            assert_eq!(all.iter().find(same), None, "{line} twice");
            all.push(series);
        }
    }
    all
}

fn parse_series(line: &str) -> Series {
    let is_name = |name: &str| {
        let mut chars = name.chars();
        chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
            && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let end = line.find(['{', ' ']).unwrap();
    let (name, mut rest) = line.split_at(end);
    assert!(is_name(name), "{line}");
    let mut labels = BTreeMap::new();
    if let Some(mut inner) = rest.strip_prefix('{') {
        loop {
            let (label, quoted) = inner.split_once("=\"").unwrap();
            assert!(is_name(label), "{line}");
            let mut value = String::new();
            let mut chars = quoted.chars();
            loop {
                match chars.next().unwrap() {
                    '"' => break,
                    '\\' => value.push(match chars.next().unwrap() {
                        'n' => '\n',
                        c @ ('\\' | '"') => c,
                        c => panic!("\\{c} in {line}"),
                    }),
                    c => value.push(c),
                }
            }
            assert_eq!(labels.insert(label.to_owned(), value), None, "{line}");
            match chars.next().unwrap() {
                ',' => inner = chars.as_str(),
                '}' => break rest = chars.as_str(),
                c => panic!("{c} in {line}"),
            }
        }
    }
    let value: f64 = rest.strip_prefix(' ').unwrap().parse().unwrap();
    assert!(value.is_finite(), "{line}");
    Series { name: name.to_owned(), labels, value }
}

fn values(all: &[Series], name: &str) -> Vec<f64> {
    all.iter().filter(|series| series.name == name).map(|series| series.value).collect()
}

#[test]
fn a_full_status_as_a_page() {
    let page = text(&sample::status());

    parse(&page);
    insta::assert_snapshot!(page);
}

#[test]
fn an_empty_status_has_no_series_for_absent_values() {
    let all = parse(&text(&GetStatusResponse::default()));

    for name in ["baton_step", "baton_train_loss", "baton_checkpoint_step", "baton_spent_dollars"] {
        assert_eq!(values(&all, name), [0.0; 0], "{name}");
    }
    assert_eq!(values(&all, "baton_ranks"), [0.0]);
}

#[test]
fn labels_are_escaped() {
    let all = parse(&text(&sample::status()));

    let info = all.iter().find(|series| series.name == "baton_info").unwrap();
    assert_eq!(info.labels["name"], "digits \"cpu\"\\\n");
}

#[test]
fn exactly_one_phase_is_the_current_one() {
    let all = parse(&text(&sample::status()));

    let phases = values(&all, "baton_phase");
    assert_eq!((phases.len(), phases.iter().sum::<f64>()), (11, 1.0));
    let current =
        all.iter().find(|series| series.name == "baton_phase" && series.value == 1.0).unwrap();
    assert_eq!(current.labels["phase"], "training");
}

#[test]
fn values_that_are_not_finite_have_no_series() {
    let latest = Step { loss: f64::NAN, lr: f64::INFINITY, top1: 0.5, ..Step::default() };
    let all = parse(&text(&GetStatusResponse { latest: Some(latest), ..Default::default() }));

    assert_eq!(values(&all, "baton_train_loss"), [0.0; 0]);
    assert_eq!(values(&all, "baton_learning_rate"), [0.0; 0]);
    assert_eq!(values(&all, "baton_train_top1_ratio"), [0.5]);
}

#[test]
fn too_many_ranks_have_only_aggregates() {
    let mut status = sample::status();
    status.ranks = (0..1_024).map(sample::rank).collect();
    let all = parse(&text(&status));
    assert_eq!(values(&all, "baton_rank_slowdown_ratio").len(), 1_024);

    status.ranks.push(sample::rank(1_024));
    let all = parse(&text(&status));

    assert!(!all.iter().any(|series| series.name.starts_with("baton_rank_")));
    assert!(!all.iter().any(|series| series.name.starts_with("baton_gpu_")));
    assert_eq!(values(&all, "baton_ranks_slowdown_ratio"), [513.0, 257.0]);
    assert_eq!(values(&all, "baton_ranks"), [1_025.0]);
    assert!(!values(&all, "baton_node_cpu_ratio").is_empty());
}

#[test]
fn a_counter_that_cannot_be_computed_has_no_series() {
    let mut status = sample::status();
    assert_eq!(values(&parse(&text(&status)), "baton_recoveries_planned_total"), [1.0]);

    status.recoveries_total = 3;

    assert_eq!(values(&parse(&text(&status)), "baton_recoveries_planned_total"), [0.0; 0]);
}
