//! The programs that `baton up` starts, and what it tells them.

use std::{
    ffi::OsString,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use baton_console::programs::find;
use baton_job::exit::Failure;
use tokio::process::Command;

use super::Args;

/// Where the programs are.
#[derive(Debug)]
pub(super) struct Programs {
    coordinator: PathBuf,
    worker: PathBuf,
}

impl Programs {
    pub(super) fn find() -> Result<Self, Failure> {
        Ok(Self { coordinator: find("baton-coordinator")?, worker: find("baton-worker")? })
    }

    /// The coordinator of a run.
    pub(super) fn coordinator(&self, arguments: &[OsString]) -> Command {
        let mut command = Command::new(&self.coordinator);
        command.arg("serve").args(arguments);
        command
    }

    /// The agent of a run.
    pub(super) fn agent(&self, arguments: &[OsString]) -> Command {
        let mut command = Command::new(&self.worker);
        command.arg("agent").args(arguments);
        command
    }
}

/// Whether the coordinator begins a run or takes up its own again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// As the user wishes: `--resume` and `--no-auto-resume` are obeyed.
    First,
    /// After a crash: they must not be, or what was trained since would be lost.
    Again,
}

/// What the coordinator is told.
pub(super) fn coordinator_arguments(
    args: &Args,
    run_dir: &Path,
    listen: SocketAddr,
    start: Start,
) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec![
        "--recipe".into(),
        args.recipe.clone().into(),
        "--run-dir".into(),
        run_dir.into(),
        "--listen".into(),
        listen.to_string().into(),
        "--exit-with-parent".into(),
    ];
    for entry in &args.overrides {
        arguments.extend(["--set".into(), entry.into()]);
    }
    if args.insecure {
        arguments.push("--insecure".into());
    }
    if let Some(collector) = &args.otlp_endpoint {
        arguments.extend(["--otlp-endpoint".into(), collector.into()]);
    }
    for (flag, file) in args.serves.to_arguments() {
        arguments.extend([flag.into(), file.into()]);
    }
    if start == Start::First {
        if let Some(checkpoint) = &args.resume {
            arguments.extend(["--resume".into(), checkpoint.into()]);
        }
        if args.no_auto_resume {
            arguments.push("--no-auto-resume".into());
        }
        if args.allow_recipe_change {
            arguments.push("--allow-recipe-change".into());
        }
    }
    arguments
}

/// What the agent is told.
pub(super) fn agent_arguments(args: &Args, run_dir: &Path, coordinator: &str) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec![
        "--coordinator".into(),
        coordinator.into(),
        "--run-dir".into(),
        run_dir.into(),
        "--exit-with-parent".into(),
        "--host".into(),
        args.host.clone().unwrap_or_else(|| args.listen.ip().to_string()).into(),
    ];
    if let Some(ranks) = args.ranks {
        arguments.extend(["--ranks".into(), ranks.to_string().into()]);
    }
    arguments
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

    fn coordinator(flags: &[&str], start: Start) -> String {
        let listen = "127.0.0.1:7".parse().unwrap();
        let words = coordinator_arguments(&parse(flags), Path::new("runs/a"), listen, start);
        words.join(" ".as_ref()).into_string().unwrap()
    }

    #[test]
    fn only_the_first_coordinator_is_told_to_begin_anew() {
        let common = "--recipe r.toml --run-dir runs/a --listen 127.0.0.1:7 --exit-with-parent";
        let anew = ["--no-auto-resume"];
        assert_eq!(coordinator(&anew, Start::First), format!("{common} --no-auto-resume"));
        assert_eq!(coordinator(&anew, Start::Again), common);
        let resume = ["--resume", "step-9"];
        assert_eq!(coordinator(&resume, Start::First), format!("{common} --resume step-9"));
        assert_eq!(coordinator(&resume, Start::Again), common);
    }

    #[test]
    fn changes_to_the_recipe_hold_for_every_coordinator() {
        let flags = ["--set", "seed=1", "--set", "train.epochs=3"];
        for start in [Start::First, Start::Again] {
            assert!(coordinator(&flags, start).ends_with("--set seed=1 --set train.epochs=3"));
        }
    }

    #[test]
    fn an_agent_without_a_number_of_ranks_decides_itself() {
        let words = |flags: &[&str]| {
            agent_arguments(&parse(flags), Path::new("runs/a"), "http://127.0.0.1:7")
                .join(" ".as_ref())
                .into_string()
                .unwrap()
        };
        let common = "--coordinator http://127.0.0.1:7 --run-dir runs/a --exit-with-parent --host";
        assert_eq!(words(&[]), format!("{common} 127.0.0.1"));
        assert_eq!(words(&["--ranks", "2"]), format!("{common} 127.0.0.1 --ranks 2"));
        // By what address others reach the coordinator they reach the ranks beside it.
        let served = ["--listen", "10.0.0.5:29600"];
        assert_eq!(words(&served), format!("{common} 10.0.0.5"));
        assert_eq!(words(&["--listen", "0.0.0.0:1", "--host", "n1"]), format!("{common} n1"));
    }
}
