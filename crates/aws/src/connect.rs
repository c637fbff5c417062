//! `baton aws connect`

use std::{
    env, fs, io,
    net::{Ipv4Addr, TcpListener},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use baton_console::{
    failure::{bad_input, failed},
    output,
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

use crate::{
    Launched,
    api::{Api, Error, Program},
    fleet::Fleet,
    stack::{self, Job},
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
pub struct Args {
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
    let (instance, keys) = find(&api, &args.launched)?;
    let port = match (args.port, args.command.is_empty()) {
        (Some(port), _) => port,
        (None, true) => PORT,
        (None, false) => {
            free_port().map_err(|error| failed(format!("no port is free: {error}")))?
        }
    };
    let environment = environment(port, keys.as_ref());
    let mut tunnel = Tunnel::open(session(&api, &instance, port), &instance, port).await?;
    if args.command.is_empty() {
        output::note(format_args!("connected to {instance}; in another terminal:"));
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

/// The machine with the coordinator, and what it asks of those who come.
fn find(api: &impl Api, launched: &Launched) -> Result<(String, Option<Keys>), Failure> {
    let job = launched.job(api)?;
    let stack = stack::get(api, &job)?;
    let fleet = Fleet::look(api, &job)?;
    let Some(machine) = fleet.coordinator(&stack) else {
        return Err(bad_input(format!(
            "no machine of {job} runs: `baton aws status` shows what it told last, `baton aws up` goes on"
        )));
    };
    let keys = if stack.has_several_nodes() { Some(Keys::fetch(api, &job)?) } else { None };
    Ok((machine.instance.clone(), keys))
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

const SESSION: [&str; 2] = ["ssm", "start-session"];

/// The AWS CLI that carries a port of this machine to the coordinator's.
fn session(api: &Program, instance: &str, port: u16) -> Command {
    let ports = json!({"portNumber": [PORT.to_string()], "localPortNumber": [port.to_string()]});
    let document = ["--document-name", "AWS-StartPortForwardingSession", "--parameters"];
    let call = [&SESSION[..], &["--target", instance], &document, &[&ports.to_string()]];
    Command::from(api.command(&call.concat()))
}

/// The AWS CLI with its plugin, in a group of their own, as the one does not end the other.
struct Tunnel(Child);

impl Tunnel {
    async fn open(mut command: Command, instance: &str, port: u16) -> Result<Self, Failure> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        let child = command.spawn().map_err(|error| Error::not_run(&error))?;
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
        Error::parse(&said, &SESSION).into()
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

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::testing::{Script, break_each, launched};

    fn answers() -> Script {
        let machine = json!({"InstanceId": "i-0", "State": {"Name": "running"}});
        launched("2")
            .answer("describe-auto-scaling-groups", Value::Null)
            .answer("describe-instances", json!({"Reservations": [{"Instances": [machine]}]}))
            .answer("--name /baton/digits/operator/ca", json!({"Parameter": {"Value": "a"}}))
            .answer("--name /baton/digits/operator/token", json!({"Parameter": {"Value": "b"}}))
    }

    #[test]
    fn an_error_of_any_call_ends_it_with_one_line_that_names_the_call() {
        let (instance, keys) = find(&answers(), &Launched::default()).unwrap();
        assert_eq!(instance, "i-0");
        assert_eq!(fs::read_to_string(keys.unwrap().file("token")).unwrap(), "b");
        break_each(answers, |api| find(api, &Launched::default()));
    }

    #[tokio::test]
    async fn a_session_that_cannot_begin_says_why_and_what_to_do() {
        for (said, told) in [
            (
                "An error occurred (TargetNotConnected) when calling the StartSession operation: i-0 is not connected.",
                "AWS refuses StartSession (TargetNotConnected): i-0 is not connected: the machine's SSM agent",
            ),
            (
                "SessionManagerPlugin is not found. Please refer to …",
                "session-manager-working-with",
            ),
            ("", "aws ssm start-session: it failed without a word"),
        ] {
            let mut command = Command::new("sh");
            command.args(["-c", "echo \"$1\" >&2; exit 254", "sh", said]);
            // Nobody can listen at this port.
            let opened = Tunnel::open(command, "i-0", 0).await;
            let Err(failure) = opened else { panic!("{said}") };
            assert!(failure.message.contains(told), "{failure}");
        }
        let nothing = Command::new("/nowhere/aws");
        let Err(failure) = Tunnel::open(nothing, "i-0", 0).await else { panic!() };
        assert!(failure.message.contains("install the AWS CLI"), "{failure}");
    }
}
