//! `baton completion`

use baton_job::exit::Failure;
use clap::CommandFactory;
use clap_complete::Shell;

use super::Cli;
use crate::output;

/// Print a completion script for a shell
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton completion bash > ~/.local/share/bash-completion/completions/baton
  baton completion zsh > ~/.zfunc/_baton
  baton completion fish > ~/.config/fish/completions/baton.fish")]
pub(crate) struct Args {
    /// Name of the shell
    shell: Shell,
}

pub(super) fn run(args: &Args) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "baton", &mut script);
    output::line(String::from_utf8_lossy(&script).trim_end());
    Ok(())
}
