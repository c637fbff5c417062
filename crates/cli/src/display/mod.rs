//! How `baton up` shows a job while it runs.

mod json;
mod plain;
mod terminal;

use baton_job::Time;
use baton_proto::v1::{GetStatusResponse, WatchEventsResponse};

use crate::{output, render::Paint};

/// One way of showing.
pub(crate) trait Display {
    /// Something happened in the job.
    fn event(&mut self, event: &WatchEventsResponse);
    /// The job's status, asked for several times a second.
    fn status(&mut self, now: Time, status: &GetStatusResponse);
    /// Something that `baton up` itself did.
    fn note(&mut self, text: &str);
    /// The last word: how the job stood, and that in words.
    fn end(&mut self, exit_code: u8, status: Option<&GetStatusResponse>, words: &str);
}

/// The way that fits: JSON if asked for, bars on a terminal, else lines.
pub(crate) fn new(json: bool) -> Box<dyn Display> {
    if json {
        Box::new(json::Json::default())
    } else if output::is_terminal() {
        Box::new(terminal::Terminal::new(Paint::detect()))
    } else {
        Box::new(plain::Plain::default())
    }
}
