//! The programs that `baton up` starts, and their arguments.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use baton_console::programs::find;
use baton_job::exit::Failure;
use tokio::process::Command;

use super::Args;

/// Paths of the programs.
#[derive(Debug)]
pub(super) struct Programs {
    coordinator: PathBuf,
    worker: PathBuf,
}

impl Programs {
    pub(super) fn find() -> Result<Self, Failure> {
        Ok(Self { coordinator: find("baton-coordinator")?, worker: find("baton-worker")? })
    }

    /// The command that starts the coordinator of a run.
    pub(super) fn coordinator(
        &self,
        args: &Args,
        run_dir: &Path,
        listen: SocketAddr,
        start: CoordinatorStart,
    ) -> Command {
        let mut command = Command::new(&self.coordinator);
        command.arg("serve").arg("--recipe").arg(&args.recipe).arg("--run-dir").arg(run_dir);
        command.args(["--listen", &listen.to_string(), &exit_with_this()]);
        for entry in &args.overrides {
            command.args(["--set", entry]);
        }
        if args.insecure {
            command.arg("--insecure");
        }
        // So that the checkpoint store says where it is. On the loopback only, other machines cannot use that.
        if args.host.is_some() || !args.listen.ip().is_loopback() {
            command.args(["--host", &host(args)]);
        }
        if let Some(collector) = &args.otlp_endpoint {
            command.args(["--otlp-endpoint", collector]);
        }
        for (flag, file) in args.server.to_arguments() {
            command.arg(flag).arg(file);
        }
        match start {
            CoordinatorStart::Restart { began_after } => {
                command.args(["--restarted-after", &began_after.to_string()]);
            }
            CoordinatorStart::First => {
                if let Some(checkpoint) = &args.resume {
                    command.args(["--resume", checkpoint]);
                }
                if args.no_auto_resume {
                    command.arg("--no-auto-resume");
                }
                if args.allow_recipe_change {
                    command.arg("--allow-recipe-change");
                }
            }
        }
        command
    }

    /// The command that starts the agent of a run. By the `store` it finds the job also if the coordinator has ended before it
    /// has answered.
    pub(super) fn agent(
        &self,
        args: &Args,
        run_dir: &Path,
        coordinator: &str,
        store: Option<&str>,
    ) -> Command {
        let mut command = Command::new(&self.worker);
        command.args(["agent", "--coordinator", coordinator, "--run-dir"]).arg(run_dir);
        command.args([&exit_with_this(), "--host", &host(args)]);
        if let Some(ranks) = args.ranks {
            command.args(["--ranks", &ranks.to_string()]);
        }
        if let Some(store) = store {
            command.args(["--store", store, "--standby-at-once"]);
        }
        command
    }
}

/// Whether the coordinator is started by the user or restarted after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CoordinatorStart {
    /// First start: `--resume` and `--no-auto-resume` apply.
    First,
    /// Restart after a crash: they do not apply, because the training since the first start would be lost.
    Restart {
        /// The newest generation before the first start.
        began_after: u64,
    },
}

/// Address at which other machines reach this one.
fn host(args: &Args) -> String {
    args.host.clone().unwrap_or_else(|| args.listen.ip().to_string())
}

/// The flag of children, which may be started so late that this process has ended.
fn exit_with_this() -> String {
    format!("--exit-with-parent={}", std::process::id())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        up: Args,
    }

    fn parse(flags: &[&str]) -> Args {
        Cli::try_parse_from(["up", "r.toml"].iter().chain(flags)).unwrap().up
    }

    fn programs() -> Programs {
        Programs { coordinator: "coordinator".into(), worker: "worker".into() }
    }

    fn arguments(command: &Command) -> String {
        let list: Vec<_> = command.as_std().get_args().collect();
        list.join(" ".as_ref()).into_string().unwrap()
    }

    fn coordinator(flags: &[&str], start: CoordinatorStart) -> String {
        let listen = "127.0.0.1:7".parse().unwrap();
        arguments(&programs().coordinator(&parse(flags), Path::new("runs/a"), listen, start))
    }

    fn agent(flags: &[&str]) -> String {
        let run_dir = Path::new("runs/a");
        arguments(&programs().agent(&parse(flags), run_dir, "http://127.0.0.1:7", None))
    }

    #[test]
    fn only_the_first_coordinator_starts_from_fresh_weights() {
        let parent = exit_with_this();
        let common =
            format!("serve --recipe r.toml --run-dir runs/a --listen 127.0.0.1:7 {parent}");
        let fresh = ["--no-auto-resume"];
        assert_eq!(
            coordinator(&fresh, CoordinatorStart::First),
            format!("{common} --no-auto-resume")
        );
        let restart = CoordinatorStart::Restart { began_after: 3 };
        let restarted = format!("{common} --restarted-after 3");
        assert_eq!(coordinator(&fresh, restart), restarted);
        let resume = ["--resume", "step-9"];
        assert_eq!(
            coordinator(&resume, CoordinatorStart::First),
            format!("{common} --resume step-9")
        );
        assert_eq!(coordinator(&resume, restart), restarted);
    }

    #[test]
    fn a_coordinator_that_other_machines_reach_tells_its_address() {
        let hosts = |flags: &[&str]| {
            let command = coordinator(flags, CoordinatorStart::First);
            command.split_once(" --host ").map(|(_, rest)| rest.to_owned())
        };
        assert_eq!(hosts(&[]), None);
        assert_eq!(hosts(&["--listen", "10.0.0.5:29600"]).unwrap(), "10.0.0.5");
        assert_eq!(hosts(&["--listen", "0.0.0.0:1", "--host", "n1"]).unwrap(), "n1");
    }

    #[test]
    fn changes_to_the_recipe_apply_to_every_coordinator() {
        let flags = ["--set", "seed=1", "--set", "train.epochs=3"];
        for start in [CoordinatorStart::First, CoordinatorStart::Restart { began_after: 0 }] {
            assert!(coordinator(&flags, start).contains("--set seed=1 --set train.epochs=3"));
        }
    }

    #[test]
    fn an_agent_finds_the_job_by_a_store_outside_of_the_run_folder() {
        let run_dir = Path::new("runs/a");
        let command =
            programs().agent(&parse(&[]), run_dir, "http://127.0.0.1:7", Some("s3://b/r"));
        assert!(arguments(&command).ends_with(" --store s3://b/r --standby-at-once"));
    }

    #[test]
    fn an_agent_without_a_number_of_ranks_chooses_it() {
        let parent = exit_with_this();
        let common =
            format!("agent --coordinator http://127.0.0.1:7 --run-dir runs/a {parent} --host");
        assert_eq!(agent(&[]), format!("{common} 127.0.0.1"));
        assert_eq!(agent(&["--ranks", "2"]), format!("{common} 127.0.0.1 --ranks 2"));
        // Other machines reach the ranks at the same address as the coordinator.
        let listen = ["--listen", "10.0.0.5:29600"];
        assert_eq!(agent(&listen), format!("{common} 10.0.0.5"));
        assert_eq!(agent(&["--listen", "0.0.0.0:1", "--host", "n1"]), format!("{common} n1"));
    }
}
