//! How `baton up` shows a job while it runs.

mod json;
mod plain;
mod terminal;

use baton_job::Time;
use baton_proto::v1::{GetStatusResponse, WatchEventsResponse};

use crate::{output, render::Paint};

/// A way to show a running job.
pub(crate) trait Display {
    /// Shows an event of the job.
    fn event(&mut self, event: &WatchEventsResponse);
    /// Shows the job's status; called several times a second.
    fn status(&mut self, now: Time, status: &GetStatusResponse);
    /// Shows what `baton up` itself did.
    fn note(&mut self, text: &str);
    /// Shows the end of the job: the last status, and its description as text.
    fn end(&mut self, exit_code: u8, status: Option<&GetStatusResponse>, text: &str);
}

/// Chooses the display: JSON on request, bars on a terminal, otherwise lines.
pub(crate) fn new(json: bool) -> Box<dyn Display> {
    if json {
        Box::new(json::JsonDisplay::default())
    } else if output::is_terminal() {
        Box::new(terminal::TerminalDisplay::new(Paint::detect()))
    } else {
        Box::new(plain::PlainDisplay::default())
    }
}
