//! JSON lines for scripts.

use baton_job::Time;
use baton_proto::v1::{GetStatusResponse, WatchEventsResponse};

use super::{Display, plain::Pace};
use crate::{
    json::{self, UpLine},
    output,
};

#[derive(Default)]
pub(super) struct Json {
    pace: Pace,
}

impl Display for Json {
    fn event(&mut self, event: &WatchEventsResponse) {
        tell(&UpLine::Event(event));
    }

    fn status(&mut self, now: Time, status: &GetStatusResponse) {
        if self.pace.is_due(now, status) {
            tell(&UpLine::Progress(status));
        }
    }

    fn note(&mut self, text: &str) {
        tell(&UpLine::Note { message: text });
    }

    fn end(&mut self, exit_code: u8, status: Option<&GetStatusResponse>, _words: &str) {
        tell(&UpLine::End { exit_code, status });
    }
}

fn tell(line: &UpLine<'_>) {
    output::tell(json::line(line));
}
