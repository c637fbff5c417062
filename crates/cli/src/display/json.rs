//! JSON lines for scripts. Keys are a promise: adding is allowed, renaming is not.

use baton_job::Time;
use baton_proto::v1::{GetStatusResponse, WatchEventsResponse};

use super::{Display, plain::ProgressLimiter};
use crate::{
    json::{self, UpLine},
    output,
};

#[derive(Default)]
pub(super) struct JsonDisplay {
    limiter: ProgressLimiter,
}

impl Display for JsonDisplay {
    fn event(&mut self, event: &WatchEventsResponse) {
        print(&UpLine::Event(event));
    }

    fn status(&mut self, now: Time, status: &GetStatusResponse) {
        if self.limiter.is_due(now, status) {
            print(&UpLine::Progress(status));
        }
    }

    fn note(&mut self, text: &str) {
        print(&UpLine::Note { message: text });
    }

    fn end(&mut self, exit_code: u8, status: Option<&GetStatusResponse>, _text: &str) {
        print(&UpLine::End { exit_code, status });
    }
}

fn print(line: &UpLine<'_>) {
    output::job_line(json::line(line));
}
