use baton_proto::v1::{
    Accuracy, EvaluatedStep, Fit, GetStatusResponse, Spending, stream_metrics_response::Metrics,
};
use baton_telemetry::report::{Report, html, json};

use crate::sample;

const HOSTILE: &str = "<script>alert('a & \"b\"')</script>";

fn report() -> Report {
    Report {
        status: sample::status(),
        points: sample::points(),
        events: sample::events(),
        recipe_toml: "name = \"digits\"\n".to_owned(),
    }
}

/// Checks that every tag is closed in order, so that no text became a tag.
fn tags_are_balanced(page: &str) {
    let mut open = Vec::new();
    for piece in page.split('<').skip(1) {
        let (tag, _) = piece.split_once('>').unwrap_or_else(|| panic!("no end: {piece}"));
        let name = tag.trim_start_matches('/').split([' ', '/', '\n']).next().unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "{tag}");
        } else if !tag.ends_with('/') && !["!doctype", "meta"].contains(&name) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn a_report_has_all_its_parts() {
    let page = html(&report());

    tags_are_balanced(&page);
    for title in ["Evaluations", "Recoveries", "Divergences", "Events", "Ranks", "Recipe"] {
        assert!(page.contains(&format!("<h2>{title}</h2>")), "{title}");
    }
    assert_eq!(page.matches("<svg class=\"curves\" role=\"img\"").count(), 4);
    assert!(page.contains("<dt>Goodput</dt><dd>90.6 %</dd>"));
    assert!(page.contains("<dt>Cost</dt><dd>$6.50</dd>"));
    assert!(page.contains("<dt>Interruptions</dt><dd>7 min 30 s, $0.41</dd>"));
    assert!(page.contains("<dt>Recoveries</dt><dd>2</dd>"));
    assert!(page.contains("<dt>Median recovery</dt><dd>5.1 s</dd>"));
    // In each drawing, but for a beginning before the first update.
    assert_eq!(page.matches("<title>generation 2 from step 700</title>").count(), 4);
}

#[test]
fn a_report_needs_nothing_from_outside() {
    let page = html(&report());

    for asset in
        ["<script", "<link", "<img", "src=", "href=", "url(", "@import", "http://", "https://"]
    {
        assert!(!page.contains(asset), "{asset}");
    }
}

#[test]
fn hostile_text_stays_text() {
    let mut report = report();
    let status = &mut report.status;
    for text in
        [&mut status.name, &mut status.reason, &mut status.job_id, &mut status.coordinator_version]
    {
        *text = HOSTILE.to_owned();
    }
    status.outcome = None;
    status.ranks[0].node_id = HOSTILE.to_owned();
    status.ranks[0].state = HOSTILE.to_owned();
    status.ranks[0].gpu.as_mut().unwrap().name = HOSTILE.to_owned();
    status.recoveries[0].cause = HOSTILE.to_owned();
    status.incidents[0].cause = HOSTILE.to_owned();
    status.incidents[0].remedy = HOSTILE.to_owned();
    report.events[0].message = HOSTILE.to_owned();
    report.recipe_toml = HOSTILE.to_owned();

    let page = html(&report);

    tags_are_balanced(&page);
    assert!(!page.contains("<script"));
    let escaped = "&lt;script&gt;alert(&#39;a &amp; &quot;b&quot;&#39;)&lt;/script&gt;";
    // The name twice, and the nine others and the recipe once.
    assert_eq!(page.matches(escaped).count(), 13);
}

#[test]
fn a_job_without_anything_has_a_report() {
    let page = html(&Report::default());

    tags_are_balanced(&page);
    assert_eq!(page.matches("nothing to show").count(), 4);
    assert!(!page.contains("NaN") && !page.contains("Goodput"));
    json(&Report::default()).unwrap();
}

#[test]
fn only_the_newest_events_are_shown_and_that_is_said() {
    let mut report = report();
    let event = report.events[0].clone();
    report.events = (1..=201)
        .map(|id| {
            let mut event = event.clone();
            event.message = format!("event no. {id};");
            event
        })
        .collect();

    let page = html(&report);

    assert!(page.contains("The newest 200 of 201."));
    assert!(!page.contains("event no. 1;") && page.contains("event no. 201;"));
}

#[test]
fn a_regression_is_told_by_its_fit() {
    let fit = Some(Fit { mae: 0.25, pearson: 0.5, spearman: 0.75 });
    let accuracy = Some(Accuracy { loss: 0.125, fit, ..Accuracy::default() });
    let evaluated = EvaluatedStep { step: 9, accuracy, ..EvaluatedStep::default() };
    let status = GetStatusResponse { best: Some(evaluated), ..GetStatusResponse::default() };
    let points = vec![sample::point(9, 1, Metrics::Evaluation(evaluated))];

    let page = html(&Report { status, points, ..Report::default() });

    assert!(page.contains("<dt>Best Spearman</dt><dd>0.75 at step 9</dd>"));
    assert!(page.contains("<title>Correlation</title>") && !page.contains("Top-1 accuracy"));
    assert!(page.contains("<td>0.125</td><td>0.75</td><td>0.25</td>"));
}

#[test]
fn a_job_that_was_interrupted_all_the_time_has_no_goodput() {
    let spending = Some(Spending { hours: 1.0, interruption_hours: 2.0, ..Spending::default() });
    let status = GetStatusResponse { spending, ..GetStatusResponse::default() };

    assert!(html(&Report { status, ..Report::default() }).contains("<dd>0.0 %</dd>"));
}

#[test]
fn the_json_has_the_same_data() {
    let report = report();

    let read: serde_json::Value = serde_json::from_str(&json(&report).unwrap()).unwrap();

    assert_eq!(read["status"]["phase"], "training");
    assert_eq!(read["points"].as_array().unwrap().len(), report.points.len());
    assert_eq!(read["points"][0]["began_at"], 0);
    assert_eq!(read["events"][2]["kind"], "rank_failed");
    assert_eq!(read["recipe_toml"], report.recipe_toml);
}
