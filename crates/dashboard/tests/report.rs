//! The report as one file.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use baton_dashboard::report::html;
use baton_telemetry::report::{Report, json};
use serde_json::Value;

#[allow(dead_code)]
#[path = "../../telemetry/tests/outputs/sample.rs"]
mod sample;

const HOSTILE: &str = "</script><script>alert('a & \"b\"')</script><!--";

fn report() -> Report {
    Report {
        status: sample::status(),
        points: sample::points(),
        events: sample::events(),
        recipe_toml: "name = \"digits\"\n".to_owned(),
    }
}

/// The data in the page, and the page around it.
fn parted(page: &str) -> (Value, String) {
    let (before, rest) = page.split_once("id=\"report\">").unwrap();
    let (data, after) = rest.split_once("</script>").unwrap();
    (serde_json::from_str(data).unwrap(), [before, after].concat())
}

#[test]
fn the_page_holds_the_same_data_as_the_json() {
    let (data, _) = parted(&html(&report()).unwrap());

    assert_eq!(data, serde_json::from_str::<Value>(&json(&report()).unwrap()).unwrap());
    assert_eq!(data["points"].as_array().unwrap().len(), report().points.len());
}

#[test]
fn the_page_needs_nothing_from_outside() {
    let (_, page) = parted(&html(&report()).unwrap());

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
fn text_of_others_ends_no_element() {
    let mut report = report();
    report.status.name = HOSTILE.to_owned();
    report.events[0].message = HOSTILE.to_owned();
    report.recipe_toml = HOSTILE.to_owned();

    let (data, page) = parted(&html(&report).unwrap());

    assert_eq!(data["status"]["name"], HOSTILE);
    assert_eq!(page, parted(&html(&Report::default()).unwrap()).1);
}
