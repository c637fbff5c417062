//! `baton aws`: runs a job on EC2, from launch to removal.
//!
//! Everything it creates is one CloudFormation stack, from `deploy/aws/baton.yaml`. The template is compiled into this
//! program, so the command and the template always match. AWS is called through the user's `aws` program, see
//! `docs/decisions/0016-aws-through-its-cli.md`.
//!
//! | module | content |
//! |---|---|
//! | `api` | calls `aws` and explains its errors |
//! | `market` | spot prices, and the choice of availability zones |
//! | `recipe` | the recipe as the machines need it |
//! | `bundle` | the files that machines run |
//! | `stack` | the CloudFormation stack |
//! | `fleet` | the machines, and what they report |
//! | `volume` | the EBS volumes, which outlive the stack |
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

use crate::{api::AwsCli, stack::Job};

/// Run a job on AWS spot machines: launch it, watch it, connect to it, remove it
#[derive(Debug, Subcommand)]
#[expect(missing_docs, reason = "the help text of each command is at its arguments")]
pub enum Command {
    Up(up::Args),
    Status(status::Args),
    Logs(logs::Args),
    Connect(connect::Args),
    Down(down::Args),
}

/// Runs the command and returns its exit code if it succeeded.
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

/// Flags that select the AWS region and profile.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct AwsFlags {
    /// AWS region [default: the profile's]
    #[arg(long, value_name = "REGION")]
    region: Option<String>,
    /// AWS CLI profile whose account pays [default: the CLI's default profile]
    #[arg(long, value_name = "NAME")]
    profile: Option<String>,
}

impl AwsFlags {
    fn api(&self) -> AwsCli {
        AwsCli::new(self.region.as_deref(), self.profile.as_deref())
    }

    /// The flags as text for a printed command: a space before each, nothing if none is given.
    fn text(&self) -> String {
        let flags = [("--region", &self.region), ("--profile", &self.profile)];
        let given = flags.into_iter().filter_map(|(flag, value)| Some((flag, value.as_ref()?)));
        given.fold(String::new(), |text, (flag, value)| format!("{text} {flag} {value}"))
    }
}

/// Flags of the commands about a launched job.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct JobFlags {
    /// Job name, if there are several jobs
    #[arg(long, value_name = "NAME")]
    name: Option<Job>,
    #[command(flatten)]
    aws: AwsFlags,
}

impl JobFlags {
    /// The job given by `--name`, or else the only job of the region.
    fn job(&self, api: &impl api::Api) -> Result<Job, Failure> {
        if let Some(job) = &self.name {
            return Ok(job.clone());
        }
        let mut jobs = stack::jobs(api)?;
        match jobs.len() {
            0 => Err(bad_input(
                "there is no job in this region: launch one with `baton aws up RECIPE`, or give --region or --name",
            )),
            1 => Ok(jobs.remove(0)),
            _ => {
                let names: Vec<&str> = jobs.iter().map(Job::name).collect();
                Err(bad_input(format!(
                    "there are several jobs: choose one with --name ({})",
                    names.join(", ")
                )))
            }
        }
    }
}
