use baton_telemetry::report::{RunReport, json};

use crate::sample;

#[test]
fn the_json_has_status_points_events_and_recipe() {
    let report = RunReport {
        status: sample::status(),
        points: sample::points(),
        events: sample::events(),
        recipe_toml: "name = \"digits\"\n".to_owned(),
    };

    let read: serde_json::Value = serde_json::from_str(&json(&report).unwrap()).unwrap();

    assert_eq!(read["status"]["phase"], "training");
    assert_eq!(read["points"].as_array().unwrap().len(), report.points.len());
    assert_eq!(read["points"][0]["began_at"], 0);
    assert_eq!(read["events"][2]["kind"], "rank_failed");
    assert_eq!(read["recipe_toml"], report.recipe_toml);
}

#[test]
fn an_empty_job_has_a_report() {
    json(&RunReport::default()).unwrap();
}
