//! The commands, one file each.

mod bar;
mod cert;
pub(crate) mod checkpoint;
mod completion;
mod control;
mod data;
pub(crate) mod doctor;
mod dtype;
mod events;
mod follow;
mod logs;
mod metrics;
mod model;
mod plan;
mod profile;
pub(crate) mod recipe;
mod recoveries;
mod status;
mod submit;
mod watch;
mod worker;

use std::num::NonZeroUsize;

use baton_job::exit::Failure;
use clap::{Parser, Subcommand};

use crate::{sweep, top, up};

/// Trains on machines that may be interrupted: start a job, watch it, control it.
#[derive(Debug, Parser)]
#[command(name = "baton", version = baton_build_info::VERSION, max_term_width = 100, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Examples:
  baton up recipes/digits_cpu.toml --ranks 2     train here; run it again to resume
  baton sweep digits_cpu --set seed=0..4         train with many settings, and compare them
  baton status                                   the job's current status
  baton top                                      a live dashboard with keys
  baton logs --follow                            the ranks' logs
  baton pause                                    pause training; `baton resume` continues it
  baton drain                                    save after the current step and stop
  baton recipe show digits_cpu                   every setting, and the resulting run
  baton plan resnet50_p4d_60ep                   memory, images/s, time and cost

A command uses the first of these coordinators that is set: --coordinator URL, the coordinator of
--run-dir DIR, the one that the checkpoint store of --store STORE names, the environment variable
BATON_COORDINATOR, the coordinator of the newest run below runs/, http://127.0.0.1:29600.

Exit codes:
  0    success; for `baton up`: all epochs are done
  1    failed, a retry may help; for `baton recipe diff` and `baton checkpoint diff`: they differ
  2    bad input (a recipe, a file, a flag), training that diverges, or another coordinator has
       taken over the checkpoint store; a retry without a change does not help
  3    `baton up`: stopped by `baton stop`, without a save
  4    `baton up`: saved and stopped because limits.max_hours or limits.max_dollars is reached; raise it
  75   `baton up`: saved and stopped; the same command resumes. Its last line says what could not be saved in time
  130  `baton up`: stopped immediately by a second Ctrl-C";

/// The commands in the order of the help: starting a job, watching it, controlling it, its checkpoints, preparation.
#[derive(Debug, Subcommand)]
enum Command {
    Up(up::Args),
    Sweep(sweep::Args),
    Submit(submit::Args),
    Status(status::Args),
    Top(top::Args),
    Watch(watch::Args),
    Events(events::Args),
    Metrics(metrics::Args),
    Logs(logs::Args),
    Recoveries(recoveries::Args),
    Profile(profile::Args),
    Track(follow::TrackArgs),
    Alert(follow::AlertArgs),
    #[command(flatten)]
    Control(control::Command),
    #[command(subcommand)]
    Checkpoint(checkpoint::Command),
    #[command(subcommand)]
    Recipe(recipe::Command),
    Plan(plan::Args),
    #[command(subcommand)]
    Aws(baton_aws::Command),
    #[command(subcommand)]
    Data(data::Command),
    #[command(subcommand)]
    Model(model::Command),
    Eval(worker::EvalArgs),
    Predict(worker::PredictArgs),
    Generate(worker::GenerateArgs),
    Doctor(doctor::Args),
    Cert(cert::Args),
    Completion(completion::Args),
}

impl Cli {
    /// Runs the command and returns its exit code if it succeeded.
    pub(crate) async fn run(self) -> Result<u8, Failure> {
        let done = match self.command {
            Command::Up(args) => return up::run(args).await,
            Command::Sweep(args) => return sweep::run(args).await,
            Command::Submit(args) => submit::run(args).await,
            Command::Status(args) => status::run(args).await,
            Command::Top(args) => top::run(args).await,
            Command::Watch(args) => watch::run(args).await,
            Command::Events(args) => events::run(args).await,
            Command::Metrics(args) => metrics::run(args).await,
            Command::Logs(args) => logs::run(args).await,
            Command::Recoveries(args) => recoveries::run(args).await,
            Command::Profile(args) => profile::run(args).await,
            Command::Track(args) => Err(follow::track(&args)),
            Command::Alert(args) => Err(follow::alert(&args)),
            Command::Control(command) => control::run(command).await,
            Command::Checkpoint(command) => return checkpoint::run(command).await,
            Command::Recipe(command) => return recipe::run(&command).await,
            Command::Aws(command) => return baton_aws::run(&command).await,
            Command::Plan(args) => plan::run(&args),
            // They may read a bucket, which blocks.
            Command::Data(command) => {
                checkpoint::folder::blocking(move || data::run(command)).await
            }
            Command::Model(command) => model::run(&command),
            Command::Eval(args) => Err(worker::eval(&args)),
            Command::Predict(args) => Err(worker::predict(&args)),
            Command::Generate(args) => Err(worker::generate(&args)),
            Command::Doctor(args) => doctor::run(&args).await,
            Command::Cert(args) => cert::run(&args),
            Command::Completion(args) => completion::run(&args),
        };
        done.map(|()| baton_job::exit::OK)
    }
}

/// Most threads of a command: far more than any machine has cores, and few enough for any system to start.
const MAX_THREADS: usize = 1_024;

/// Parses a number of threads.
fn threads(text: &str) -> Result<NonZeroUsize, String> {
    let number = text.parse::<usize>().map_err(|_| format!("must be 1 to {MAX_THREADS}"))?;
    match NonZeroUsize::new(number) {
        None => Err("must be at least 1".to_owned()),
        Some(number) if number.get() > MAX_THREADS => Err(format!("must be at most {MAX_THREADS}")),
        Some(number) => Ok(number),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Commands without `--json`, with the reason.
    const WITHOUT_JSON: [(&str, &str); 7] = [
        ("baton alert", "runs until the job ends and prints no result"),
        ("baton completion", "prints a script for a shell"),
        ("baton eval", "passes --json on to baton-worker"),
        ("baton generate", "passes --json on to baton-worker"),
        ("baton predict", "passes --json on to baton-worker"),
        ("baton top", "is a dashboard on a terminal"),
        ("baton track", "runs until the job ends and prints no result"),
    ];

    /// All commands that have no subcommands, by their names.
    fn leaves(path: &str, command: &clap::Command) -> Vec<(String, bool)> {
        let path = format!("{path} {}", command.get_name());
        if command.has_subcommands() {
            return command.get_subcommands().flat_map(|below| leaves(&path, below)).collect();
        }
        let has_json = command.get_arguments().any(|flag| flag.get_long() == Some("json"));
        vec![(path.trim_start().to_owned(), has_json)]
    }

    #[test]
    fn every_command_that_prints_a_result_has_json_and_is_in_the_documentation() {
        let documentation = include_str!("../../../../docs/watching.md");
        let mut without: Vec<String> = Vec::new();
        for (command, has_json) in leaves("", &Cli::command()) {
            if has_json {
                let name = command.trim_start_matches("baton ");
                assert!(
                    documentation.contains(&format!("`{name}`")),
                    "the section JSON of docs/watching.md has no `{name}`"
                );
            } else {
                without.push(command);
            }
        }
        without.sort_unstable();
        assert_eq!(without, WITHOUT_JSON.map(|(command, _)| command));
    }

    #[test]
    fn every_command_has_an_example() {
        fn check(command: &clap::Command) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let has_example = help.contains(&format!("{} ", command.get_name()))
                || help.contains(&format!("{}\n", command.get_name()))
                || help.ends_with(command.get_name());
            let is_group = command.get_subcommands().next().is_some();
            assert!(is_group || has_example, "{} has no example: {help:?}", command.get_name());
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }
}
