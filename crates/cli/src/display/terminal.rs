//! Progress bars on a terminal; events scroll above them.

use baton_job::Time;
use baton_proto::v1::{GetStatusResponse, WatchEventsResponse};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::Display;
use crate::{
    human, output,
    render::{self, Day, Paint, Position},
};

pub(super) struct TerminalDisplay {
    paint: Paint,
    bars: MultiProgress,
    phase: ProgressBar,
    epoch: ProgressBar,
    job: ProgressBar,
    step: ProgressBar,
    evaluation: ProgressBar,
    checkpoint: ProgressBar,
}

/// Length of the job's bar: it counts thousandths of the job.
const JOB_BAR_LENGTH: u64 = 1_000;

impl TerminalDisplay {
    pub(super) fn new(paint: Paint) -> Self {
        let bars = MultiProgress::with_draw_target(ProgressDrawTarget::stdout());
        let bar_template = match paint {
            Paint::Colours => "  {prefix:11} {bar:32.green/dim} {wide_msg}",
            Paint::Plain => "  {prefix:11} {bar:32} {wide_msg}",
        };
        let add = |template: &str, prefix: &'static str, length: u64| {
            // The templates are constants; if one were invalid, the default style would do.
            let style = ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar())
                .progress_chars("█▉▊▋▌▍▎▏░");
            bars.add(ProgressBar::new(length).with_style(style).with_prefix(prefix))
        };
        let phase = add("{wide_msg}", "", 0);
        let epoch = add(bar_template, "epoch", 1);
        let job = add(bar_template, "job", JOB_BAR_LENGTH);
        let text = "  {prefix:11} {wide_msg}";
        let step = add(text, "step", 0);
        let evaluation = add(text, "evaluation", 0);
        let checkpoint = add(text, "checkpoint", 0);
        phase.set_message("starting");
        Self { paint, bars, phase, epoch, job, step, evaluation, checkpoint }
    }

    fn print(&self, text: &str) {
        let _ = self.bars.println(text);
    }
}

impl Display for TerminalDisplay {
    fn event(&mut self, event: &WatchEventsResponse) {
        self.print(&render::event(event, Day::Hidden, self.paint));
    }

    fn status(&mut self, _now: Time, status: &GetStatusResponse) {
        self.phase.set_message(render::phase_line(status, self.paint));
        if let Some(step) = &status.latest {
            let position = Position::new(step, status.epochs);
            self.epoch.set_length(step.steps_per_epoch);
            self.epoch.set_position(position.step_of_epoch);
            self.epoch.set_message(format!(
                "{}/{}, step {}/{}",
                position.epoch, status.epochs, position.step_of_epoch, step.steps_per_epoch
            ));
            self.job.set_position((position.share * JOB_BAR_LENGTH as f64) as u64);
            let eta = status.eta_seconds.map(|eta| format!(", {} left", human::duration(eta)));
            let eta = eta.unwrap_or_default();
            self.job.set_message(format!("step {}/{}{eta}", step.step, step.total_steps));
            self.step.set_message(render::numbers(step));
        }
        if let Some(progress) = &status.evaluating {
            self.evaluation.set_message(render::evaluating(progress));
        } else if let Some(evaluated) = &status.evaluation {
            self.evaluation.set_message(render::evaluation(evaluated));
        }
        if let Some(text) = render::checkpoint(status) {
            self.checkpoint.set_message(text);
        }
    }

    fn note(&mut self, text: &str) {
        self.print(&format!("baton: {text}"));
    }

    fn end(&mut self, _exit_code: u8, _status: Option<&GetStatusResponse>, text: &str) {
        let _ = self.bars.clear();
        output::job_line(text);
    }
}

impl Drop for TerminalDisplay {
    /// Removes the bars, also before an error message.
    fn drop(&mut self) {
        let _ = self.bars.clear();
    }
}
