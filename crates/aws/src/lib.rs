//! `baton aws`: a job on EC2, from its launch to the tear-down.
//!
//! All that is made is one CloudFormation stack, from `deploy/aws/baton.yaml`, which is in this program; so the command
//! and the template cannot differ. AWS is called through the user's own `aws` program, see
//! `docs/decisions/0016-aws-through-its-cli.md`.
//!
//! | module | what |
//! |---|---|
//! | `api` | calls `aws`, and says what its errors mean |
//! | `market` | what spot machines cost, and in which zone to be |
//! | `recipe` | the recipe as the machines need it |
//! | `bundle` | the files that machines run |
//! | `stack` | the CloudFormation stack |
//! | `fleet` | the machines, and what they tell |
//! | `up`, `status`, `logs`, `connect`, `down` | the commands |

#![forbid(unsafe_code)]

mod api;
mod bundle;
mod connect;
mod down;
mod fleet;
mod logs;
mod market;
mod recipe;
mod stack;
mod status;
#[cfg(test)]
mod testing;
mod up;
mod volume;

use baton_console::failure::bad_input;
use baton_job::exit::Failure;
use clap::Subcommand;

use crate::{api::Program, stack::Job};

/// Run a job on AWS spot machines: launch, look, reach, tear down
#[derive(Debug, Subcommand)]
#[expect(missing_docs, reason = "a command's text for the help is at its arguments")]
pub enum Command {
    Up(up::Args),
    Status(status::Args),
    Logs(logs::Args),
    Connect(connect::Args),
    Down(down::Args),
}

/// Runs the command; the exit code of one that did what it should.
pub async fn run(command: &Command) -> Result<u8, Failure> {
    let done = match command {
        Command::Up(args) => return up::run(args),
        Command::Connect(args) => return connect::run(args).await,
        Command::Status(args) => status::run(args),
        Command::Logs(args) => logs::run(args),
        Command::Down(args) => down::run(args),
    };
    done.map(|()| baton_job::exit::OK)
}

/// Flags of every command here.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Place {
    /// Region [default: that of the profile]
    #[arg(long, value_name = "REGION")]
    region: Option<String>,
    /// Profile of the AWS CLI whose account pays [default: its default]
    #[arg(long, value_name = "NAME")]
    profile: Option<String>,
}

impl Place {
    fn api(&self) -> Program {
        Program::new(self.region.as_deref(), self.profile.as_deref())
    }
}

/// Flags of the commands about a job that was launched.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Launched {
    /// The job, if there are several
    #[arg(long, value_name = "NAME")]
    name: Option<Job>,
    #[command(flatten)]
    place: Place,
}

impl Launched {
    /// The job that is meant: the only one, unless one is named.
    fn job(&self, api: &impl api::Api) -> Result<Job, Failure> {
        if let Some(job) = &self.name {
            return Ok(job.clone());
        }
        let mut jobs = stack::jobs(api)?;
        match jobs.len() {
            0 => Err(bad_input(
                "no job runs in this region: launch one with `baton aws up RECIPE`, or give --region or --name",
            )),
            1 => Ok(jobs.remove(0)),
            _ => {
                let names: Vec<&str> = jobs.iter().map(Job::name).collect();
                Err(bad_input(format!(
                    "there are several jobs: say which with --name ({})",
                    names.join(", ")
                )))
            }
        }
    }
}
