//! `baton track` and `baton alert`: parts of the Python package, because the services they call have Python clients.

use std::{
    env,
    ffi::OsString,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
};

use baton_job::exit::Failure;

use crate::failure::bad_input;

/// Send a job's metrics to Weights & Biases or MLflow, until it ends
#[derive(Debug, clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "Examples:\n  baton track --help\n  baton track --wandb cats"
)]
pub(crate) struct TrackArgs {
    #[command(flatten)]
    arguments: Arguments,
}

/// Tell people what happens to a job, by a webhook, Slack or e-mail, until it ends
#[derive(Debug, clap::Args)]
#[command(
    disable_help_flag = true,
    after_help = "Examples:\n  baton alert --help\n  baton alert --slack-file slack-url"
)]
pub(crate) struct AlertArgs {
    #[command(flatten)]
    arguments: Arguments,
}

/// Arguments for another program, which has its own `--help`.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// See `--help`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(super) arguments: Vec<OsString>,
}

/// The Python that has the package: that of a wheel sets it.
const PYTHON: &str = "BATON_PYTHON";
/// Where the package finds Baton's programs.
const PROGRAM_FOLDER: &str = "BATON_BIN";

pub(crate) fn track(args: &TrackArgs) -> Failure {
    become_python("track", &args.arguments)
}

pub(crate) fn alert(args: &AlertArgs) -> Failure {
    become_python("alert", &args.arguments)
}

/// Returns only if it fails.
fn become_python(command: &str, Arguments { arguments }: &Arguments) -> Failure {
    let python = env::var_os(PYTHON).unwrap_or_else(|| "python3".into());
    let name = python.to_string_lossy().into_owned();
    let mut import = Command::new(&python);
    import.args(["-c", "import baton"]).stdin(Stdio::null()).stderr(Stdio::null());
    match import.status() {
        Err(error) => {
            return bad_input(format!(
                "{name} does not start: {error}; `{PYTHON}` names another Python"
            ));
        }
        Ok(status) if !status.success() => {
            return bad_input(format!(
                "{name} has no package baton: install Baton's wheel into it, or in a checkout set PYTHONPATH to its folder python"
            ));
        }
        Ok(_) => {}
    }
    let mut program = Command::new(&python);
    program.args(["-m", "baton", command]).args(arguments);
    if let Some(folder) = env::current_exe().ok().as_deref().and_then(|program| program.parent()) {
        program.env(PROGRAM_FOLDER, folder);
    }
    let error = program.exec();
    bad_input(format!("{name} does not start: {error}"))
}
