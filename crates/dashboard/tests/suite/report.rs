//! Tests of the report as one HTML file.

use baton_dashboard::report::html;
use baton_telemetry::report::{RunReport, json};
use serde_json::Value;

use crate::sample;

const HOSTILE: &str = "</script><script>alert('a & \"b\"')</script><!--";

fn report() -> RunReport {
    RunReport {
        status: sample::status(),
        points: sample::points(),
        events: sample::events(),
        recipe_toml: "name = \"digits\"\n".to_owned(),
    }
}

/// Splits a report into its data and the page without the data.
fn split(page: &str) -> (Value, String) {
    let (before, rest) = page.split_once("id=\"report\">").unwrap();
    let (data, after) = rest.split_once("</script>").unwrap();
    (serde_json::from_str(data).unwrap(), [before, after].concat())
}

#[test]
fn the_page_has_the_same_data_as_the_json() {
    let (data, _) = split(&html(&report()).unwrap());

    assert_eq!(data, serde_json::from_str::<Value>(&json(&report()).unwrap()).unwrap());
    assert_eq!(data["points"].as_array().unwrap().len(), report().points.len());
}

#[test]
fn the_page_loads_no_other_files() {
    let (_, page) = split(&html(&report()).unwrap());

    for asset in
        ["<link", "<img", "src=", "url(", "@import", "https://", "fetch(", "import ", "export "]
    {
        let lines: Vec<_> = page.lines().filter(|line| line.starts_with(asset)).collect();
        assert!(lines.is_empty(), "{lines:?}");
    }
    for asset in ["<link", "<img", " src=", "@import", "/assets/", "fetch("] {
        assert!(!page.contains(asset), "{asset}");
    }
}

#[test]
fn untrusted_text_cannot_end_an_element() {
    let mut report = report();
    report.status.name = HOSTILE.to_owned();
    report.events[0].message = HOSTILE.to_owned();
    report.recipe_toml = HOSTILE.to_owned();

    let (data, page) = split(&html(&report).unwrap());

    assert_eq!(data["status"]["name"], HOSTILE);
    assert_eq!(page, split(&html(&RunReport::default()).unwrap()).1);
}
