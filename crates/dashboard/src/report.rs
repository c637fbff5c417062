//! The report of a job as one HTML file: the dashboard's page with the job's data in it. It needs no server, network or
//! other file, only a browser with scripts enabled. `report.json` has the same data for programs.

use baton_telemetry::report::{self, RunReport};

/// The scripts of the report, each after those that it imports. An import statement ends at the end of a line.
const MODULES: [&str; 7] = [
    include_str!("../assets/format.js"),
    include_str!("../assets/page.js"),
    include_str!("../assets/chart.js"),
    include_str!("../assets/curves.js"),
    include_str!("../assets/history.js"),
    include_str!("../assets/panels.js"),
    include_str!("../assets/report.js"),
];

/// The links in the page, which the report replaces by the content of the files.
const LINKS: &str = "<link rel=\"icon\" href=\"/favicon.svg\" type=\"image/svg+xml\">\n\
                     <link rel=\"stylesheet\" href=\"/assets/style.css\">\n\
                     <script type=\"module\" src=\"/assets/app.js\"></script>\n";
/// Content security policy: nothing but the page itself.
pub(crate) const REPORT_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'";

/// The report as an HTML page.
///
/// # Errors
///
/// The report cannot be serialized; no such case is known.
pub fn html(report: &RunReport) -> Result<String, serde_json::Error> {
    // In JSON, `<` occurs only in strings, where this escape is allowed. Then no untrusted text can end the element.
    let data = report::json(report)?.replace('<', "\\u003c");
    let inline = format!(
        "<meta http-equiv=\"Content-Security-Policy\" content=\"{REPORT_POLICY}\">\n<style>\n{style}</style>\n\
         <script type=\"application/json\" id=\"report\">{data}</script>\n\
         <script type=\"module\">\n{script}</script>\n",
        style = include_str!("../assets/style.css"),
        script = script(),
    );
    Ok(include_str!("../assets/index.html").replace(LINKS, &inline))
}

/// The modules as one script. Their top-level names are distinct.
fn script() -> String {
    let mut script = String::new();
    for module in MODULES {
        let mut lines = module.lines();
        while let Some(line) = lines.next() {
            if line.starts_with("import ") {
                let is_end = |line: &str| line.ends_with(';');
                let _ = is_end(line) || lines.any(is_end);
            } else {
                script.push_str(line.trim_start_matches("export "));
                script.push('\n');
            }
        }
    }
    script
}
