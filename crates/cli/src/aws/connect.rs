//! `baton aws connect`

use std::{
    env, fs, io,
    net::{Ipv4Addr, TcpListener},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use baton_job::exit::{self, Failure};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::json;
use tokio::{
    io::AsyncReadExt,
    net::TcpStream,
    process::{Child, Command},
    time::Instant,
};

use super::{
    Launched,
    api::Api,
    fleet::Fleet,
    stack::{self, Job},
};
use crate::{
    failure::{bad_input, failed},
    output,
};

/// Reach the coordinator of a job: a tunnel by Session Manager, and a command through it
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton aws connect -- status           over gRPC, this second
  baton aws connect -- top
  baton aws connect -- checkpoint now
  baton aws connect                     holds the tunnel open, for a browser too; Ctrl-C closes it
  baton aws connect --port 29700

No port of the machine is open: AWS carries the bytes, to those who may (`ssm:StartSession`), and
logs who came. Needs the Session Manager plugin of the AWS CLI.")]
pub(crate) struct Args {
    #[command(flatten)]
    launched: Launched,
    /// Port of this machine [default: 29600 to hold, a free one for a command]
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// A command of `baton`, with its flags
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Where a coordinator serves on its machine.
const PORT: u16 = 29600;
/// Longest wait for the tunnel.
const PATIENCE: Duration = Duration::from_secs(40);

pub(super) async fn run(args: &Args) -> Result<u8, Failure> {
    let api = args.launched.place.api();
    let job = args.launched.job(&api)?;
    let stack = stack::get(&api, &job)?;
    let fleet = Fleet::look(&api, &job)?;
    let Some(machine) = fleet.coordinator(&stack) else {
        return Err(bad_input(format!(
            "no machine of {job} runs: `baton aws status` shows what it told last, `baton aws up` goes on"
        )));
    };
    let keys = if stack.has_several_nodes() { Some(Keys::fetch(&api, &job)?) } else { None };
    let port = match (args.port, args.command.is_empty()) {
        (Some(port), _) => port,
        (None, true) => PORT,
        (None, false) => {
            free_port().map_err(|error| failed(format!("no port is free: {error}")))?
        }
    };
    let environment = environment(port, keys.as_ref());
    let mut tunnel = Tunnel::open(&api, &machine.instance, port).await?;
    if args.command.is_empty() {
        output::note(format_args!("connected to {}; in another terminal:", machine.instance));
        environment
            .iter()
            .for_each(|(name, value)| output::line(format_args!("export {name}={value}")));
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            why = tunnel.ended() => return Err(why),
        }
        return Ok(exit::OK);
    }
    let program =
        env::current_exe().map_err(|error| failed(format!("cannot find myself: {error}")))?;
    let mut command =
        Command::new(program).args(&args.command).envs(environment).kill_on_drop(true).spawn();
    let command = command.as_mut().map_err(|error| failed(format!("cannot start: {error}")))?;
    loop {
        tokio::select! {
            // A terminal tells the command too, which knows what to make of it.
            _ = tokio::signal::ctrl_c() => {}
            ended = command.wait() => {
                let code = ended.ok().and_then(|status| status.code());
                return Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(exit::FAILED));
            }
        }
    }
}

fn environment(port: u16, keys: Option<&Keys>) -> Vec<(&'static str, String)> {
    let scheme = if keys.is_some() { "https" } else { "http" };
    let mut variables = vec![("BATON_COORDINATOR", format!("{scheme}://127.0.0.1:{port}"))];
    if let Some(keys) = keys {
        variables.push(("BATON_TLS_CA", keys.file("ca").display().to_string()));
        variables.push(("BATON_TOKEN_FILE", keys.file("token").display().to_string()));
    }
    variables
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// What a person needs to steer a job on several nodes, in files that go when this does.
struct Keys(PathBuf);

impl Keys {
    fn fetch(api: &impl Api, job: &Job) -> Result<Self, Failure> {
        let folder = env::temp_dir().join(format!("baton-{}", uuid::Uuid::new_v4().simple()));
        let about = |error: io::Error| failed(format!("{}: {error}", folder.display()));
        fs::DirBuilder::new().mode(0o700).create(&folder).map_err(about)?;
        let keys = Self(folder.clone());
        for name in ["ca", "token"] {
            let parameter = format!("/baton/{job}/operator/{name}");
            let answer =
                api.find(&["ssm", "get-parameter", "--name", &parameter, "--with-decryption"])?;
            let text = answer.as_ref().and_then(|answer| answer["Parameter"]["Value"].as_str());
            let text = text.ok_or_else(|| {
                bad_input(
                    "the coordinator has not started yet: `baton aws status` tells what it does",
                )
            })?;
            write_secret(&keys.file(name), text).map_err(about)?;
        }
        Ok(keys)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn write_secret(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    io::Write::write_all(&mut file, text.as_bytes())
}

/// The AWS CLI with its plugin, in a group of their own, as the one does not end the other.
struct Tunnel(Child);

impl Tunnel {
    async fn open(api: &super::Program, instance: &str, port: u16) -> Result<Self, Failure> {
        let parameters =
            json!({"portNumber": [PORT.to_string()], "localPortNumber": [port.to_string()]})
                .to_string();
        let command = api.command(&[
            "ssm",
            "start-session",
            "--target",
            instance,
            "--document-name",
            "AWS-StartPortForwardingSession",
            "--parameters",
            &parameters,
        ]);
        let mut command = Command::from(command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        let child = command.spawn().map_err(|error| {
            bad_input(format!("`aws` cannot be run: {error}; install the AWS CLI"))
        })?;
        let mut tunnel = Self(child);
        let deadline = Instant::now() + PATIENCE;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_err() {
            let pause = tokio::time::sleep(Duration::from_millis(200));
            tokio::select! {
                () = pause => {}
                why = tunnel.ended() => return Err(why),
            }
            if Instant::now() > deadline {
                return Err(failed(format!(
                    "no tunnel to {instance} within {} s: is the SSM agent of the machine up yet?",
                    PATIENCE.as_secs()
                )));
            }
        }
        Ok(tunnel)
    }

    /// Why it ended.
    async fn ended(&mut self) -> Failure {
        let mut said = String::new();
        if let Some(stderr) = &mut self.0.stderr {
            let _ = stderr.read_to_string(&mut said).await;
        }
        let _ = self.0.wait().await;
        let said = said
            .trim()
            .lines()
            .rfind(|line| !line.trim().is_empty())
            .unwrap_or("it ended without a word")
            .to_owned();
        if said.contains("SessionManagerPlugin") {
            return bad_input(
                "the AWS CLI lacks the Session Manager plugin: install it \
                 (https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html)",
            );
        }
        failed(format!("the tunnel ended: {said}"))
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let group = self.0.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::TERM);
        }
    }
}
