//! `baton pause`, `resume`, `drain`, `stop` and `checkpoint now`: requests that change the job.

use baton_job::exit::Failure;
use clap::Subcommand;

use crate::{
    connect::{Coordinator, CoordinatorFlags},
    json::{self, ControlledJob},
};

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Pause training after the current step; `baton resume` continues it
    #[command(after_help = "\
Examples:
  baton pause
  baton pause --reason \"the GPUs are needed for an hour\"

The state stays in the memory of the ranks, so they resume immediately with bit-identical state. The machines keep \
running and cost money; `baton drain` frees them.")]
    Pause {
        #[command(flatten)]
        target: CoordinatorFlags,
        /// Reason, shown in status and events
        #[arg(long, value_name = "TEXT", default_value = "`baton pause`")]
        reason: String,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Resume training after `baton pause`
    #[command(after_help = "\
Examples:
  baton resume
  baton resume --coordinator http://10.0.0.7:29600

A job that was saved and stopped is resumed with `baton up`.")]
    Resume {
        #[command(flatten)]
        target: CoordinatorFlags,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Save after the current step and stop; the same `baton up` resumes
    #[command(after_help = "\
Examples:
  baton drain
  baton drain --reason \"the machine is needed until noon\"")]
    Drain {
        #[command(flatten)]
        target: CoordinatorFlags,
        /// Reason, shown in status and events
        #[arg(long, value_name = "TEXT", default_value = "`baton drain`")]
        reason: String,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Stop immediately, without saving; work since the last checkpoint is lost
    #[command(after_help = "\
Examples:
  baton stop
  baton drain      saves first")]
    Stop {
        #[command(flatten)]
        target: CoordinatorFlags,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
}

pub(super) async fn run(command: Command) -> Result<(), Failure> {
    match command {
        Command::Pause { target, reason, json } => {
            let job = send(&target, async |coordinator| coordinator.pause(reason).await).await?;
            show(json, "pause", job, "pausing after the current step; `baton resume` continues");
        }
        Command::Resume { target, json } => {
            let job = send(&target, async |coordinator| coordinator.resume().await).await?;
            show(json, "resume", job, "training resumes");
        }
        Command::Drain { target, reason, json } => {
            let job = send(&target, async |coordinator| coordinator.drain(reason).await).await?;
            let follows = "saving after the current step, then stopping; `baton status --watch` shows the progress";
            show(json, "drain", job, follows);
        }
        Command::Stop { target, json } => {
            let job = send(&target, async |coordinator| coordinator.stop().await).await?;
            let follows =
                "stopping; `baton up` with the same recipe resumes from the last checkpoint";
            show(json, "stop", job, follows);
        }
    }
    Ok(())
}

/// `baton checkpoint now`
pub(super) async fn checkpoint(target: &CoordinatorFlags, json: bool) -> Result<(), Failure> {
    let job = send(target, async |coordinator| coordinator.trigger_checkpoint().await).await?;
    let follows = "saving after the current step; `baton watch` shows when it is durable";
    show(json, "checkpoint", job, follows);
    Ok(())
}

/// Prints which job was changed and, as text, what follows.
fn show(as_json: bool, request: &'static str, job: String, follows: &str) {
    let controlled = ControlledJob { request, job };
    json::print(as_json, &controlled, |controlled| format!("{}: {follows}", controlled.job));
}

/// Sends a request, and returns the job's name and address, so that the user sees which job was changed.
async fn send(
    target: &CoordinatorFlags,
    request: impl AsyncFnOnce(&mut Coordinator) -> Result<(), Failure>,
) -> Result<String, Failure> {
    let mut coordinator = Coordinator::find(target)?;
    let job = coordinator.name().await?;
    request(&mut coordinator).await?;
    Ok(job)
}
