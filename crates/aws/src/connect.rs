//! `baton aws connect`

use std::{
    collections::BTreeMap,
    env, fs, io,
    net::{Ipv4Addr, TcpListener},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use baton_console::{
    failure::{bad_input, failed},
    json, output,
};
use baton_job::exit::{self, Failure};
use rustix::process::{Pid, Signal, kill_process_group};
use serde::Serialize;
use tokio::{
    io::AsyncReadExt,
    net::TcpStream,
    process::{Child, Command},
    time::Instant,
};

use crate::{
    JobFlags,
    api::{Api, AwsCli, Error},
    fleet::Fleet,
    stack::{self, Job},
};

/// Connect to a job's coordinator: open a Session Manager tunnel and run a command through it
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  baton aws connect -- status           the current status, over gRPC
  baton aws connect -- top
  baton aws connect -- checkpoint now
  baton aws connect                     keep the tunnel open, also for a browser; Ctrl-C closes it
  baton aws connect --port 29700

No port of the machine is open: AWS forwards the connection for users with the permission
`ssm:StartSession`, and logs each session. Needs the Session Manager plugin of the AWS CLI.")]
pub struct Args {
    #[command(flatten)]
    flags: JobFlags,
    /// Local port [default: 29600 without a command, a free port with one]
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,
    /// Print one JSON object once the tunnel is open; a command has its own --json
    #[arg(long, conflicts_with = "command")]
    json: bool,
    /// `baton` command to run, with its flags
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Port of a coordinator on its machine.
const COORDINATOR_PORT: u16 = 29600;
/// Maximum wait for the tunnel.
const TUNNEL_TIMEOUT: Duration = Duration::from_secs(40);

pub(super) async fn run(args: &Args) -> Result<u8, Failure> {
    let port = match (args.port, args.command.is_empty()) {
        (Some(port), _) => port,
        (None, true) => COORDINATOR_PORT,
        (None, false) => {
            free_port().map_err(|error| failed(format!("no port is free: {error}")))?
        }
    };
    check_is_free(port)?;
    let api = args.flags.aws.api();
    let (instance, credentials) = find(&api, &args.flags)?;
    let environment = environment(port, credentials.as_ref());
    let mut tunnel = Tunnel::open(session(&api, &instance, port), &instance, port).await?;
    if args.command.is_empty() {
        output::note(format_args!("connected to {instance}; in another terminal:"));
        json::print(args.json, &OpenTunnel { instance: &instance, environment }, export);
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            reason = tunnel.ended() => return Err(reason),
        }
        return Ok(exit::OK);
    }
    let program = env::current_exe()
        .map_err(|error| failed(format!("cannot find this program's file: {error}")))?;
    let mut command =
        Command::new(program).args(&args.command).envs(environment).kill_on_drop(true).spawn();
    let command = command.as_mut().map_err(|error| failed(format!("cannot start: {error}")))?;
    loop {
        tokio::select! {
            // The terminal sends the signal to the command too, which handles it.
            _ = tokio::signal::ctrl_c() => {}
            ended = command.wait() => {
                let code = ended.ok().and_then(|status| status.code());
                return Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(exit::FAILED));
            }
        }
    }
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct OpenTunnel<'a> {
    /// Instance id of the coordinator's machine.
    instance: &'a str,
    /// Environment variables with which `baton` commands use the tunnel.
    environment: BTreeMap<&'static str, String>,
}

/// The environment variables as commands of a shell.
fn export(tunnel: &OpenTunnel<'_>) -> String {
    let export = |(name, value): (&&str, &String)| format!("export {name}={value}");
    tunnel.environment.iter().map(export).collect::<Vec<_>>().join("\n")
}

/// The machine with the coordinator, and the credentials that the coordinator requires.
fn find(api: &impl Api, flags: &JobFlags) -> Result<(String, Option<Credentials>), Failure> {
    let job = flags.job(api)?;
    let stack = stack::get(api, &job)?;
    let fleet = Fleet::query(api, &job)?;
    let Some(machine) = fleet.coordinator(&stack) else {
        return Err(bad_input(format!(
            "no machine of {job} is running: `baton aws status --name {job}` shows its last report, `baton aws up` resumes it"
        )));
    };
    let credentials =
        if stack.has_several_nodes() { Some(Credentials::fetch(api, &job)?) } else { None };
    Ok((machine.instance.clone(), credentials))
}

/// Environment variables with which `baton` commands use the tunnel.
fn environment(port: u16, credentials: Option<&Credentials>) -> BTreeMap<&'static str, String> {
    let scheme = if credentials.is_some() { "https" } else { "http" };
    let url = format!("{scheme}://127.0.0.1:{port}");
    let mut variables = BTreeMap::from([("BATON_COORDINATOR", url)]);
    if let Some(credentials) = credentials {
        variables.insert("BATON_TLS_CA", credentials.file("ca").display().to_string());
        variables.insert("BATON_TOKEN_FILE", credentials.file("token").display().to_string());
    }
    variables
}

fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// Checks that no program has the port: it would be mistaken for the tunnel, for instance another job's coordinator.
fn check_is_free(port: u16) -> Result<(), Failure> {
    match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            Err(bad_input(format!("port {port} is in use: --port chooses another one")))
        }
        Err(error) => Err(bad_input(format!("port {port}: {error}: --port chooses another one"))),
    }
}

/// Credentials of an operator of a job on several nodes, in a folder that is removed on drop.
struct Credentials(PathBuf);

impl Credentials {
    fn fetch(api: &impl Api, job: &Job) -> Result<Self, Failure> {
        let folder = env::temp_dir().join(format!("baton-{}", uuid::Uuid::new_v4().simple()));
        let file_error = |error: io::Error| failed(format!("{}: {error}", folder.display()));
        fs::DirBuilder::new().mode(0o700).create(&folder).map_err(file_error)?;
        let credentials = Self(folder.clone());
        for name in ["ca", "token"] {
            let parameter = format!("/baton/{job}/operator/{name}");
            let answer =
                api.find(&["ssm", "get-parameter", "--name", &parameter, "--with-decryption"])?;
            let text = answer.as_ref().and_then(|answer| answer["Parameter"]["Value"].as_str());
            let text = text.ok_or_else(|| {
                bad_input(format!(
                    "the coordinator has not started yet: `baton aws status --name {job}` shows what it is doing"
                ))
            })?;
            write_secret(&credentials.file(name), text).map_err(file_error)?;
        }
        Ok(credentials)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Credentials {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn write_secret(path: &Path, text: &str) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    io::Write::write_all(&mut file, text.as_bytes())
}

const SESSION: [&str; 2] = ["ssm", "start-session"];

/// The AWS CLI command that forwards a local port to the coordinator's.
fn session(api: &AwsCli, instance: &str, port: u16) -> Command {
    let ports = serde_json::json!({"portNumber": [COORDINATOR_PORT.to_string()], "localPortNumber": [port.to_string()]});
    let document = ["--document-name", "AWS-StartPortForwardingSession", "--parameters"];
    let call = [&SESSION[..], &["--target", instance], &document, &[&ports.to_string()]];
    Command::from(api.command(&call.concat()))
}

/// The AWS CLI and its plugin, in their own process group, because the CLI does not end the plugin.
struct Tunnel {
    child: Child,
    /// What it has printed to standard error.
    stderr: Vec<u8>,
}

impl Tunnel {
    async fn open(mut command: Command, instance: &str, port: u16) -> Result<Self, Failure> {
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).process_group(0);
        let child = command.spawn().map_err(|error| Error::not_started(&error))?;
        let mut tunnel = Self { child, stderr: Vec::new() };
        let deadline = Instant::now() + TUNNEL_TIMEOUT;
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.is_err() {
            let pause = tokio::time::sleep(Duration::from_millis(200));
            tokio::select! {
                () = pause => {}
                reason = tunnel.ended() => return Err(reason),
            }
            if Instant::now() > deadline {
                return Err(failed(format!(
                    "no tunnel to {instance} within {} s: wait until the machine's SSM agent has started, then try again",
                    TUNNEL_TIMEOUT.as_secs()
                )));
            }
        }
        Ok(tunnel)
    }

    /// Waits until the tunnel ends and returns the reason. Cancel-safe: what was read until then is kept.
    async fn ended(&mut self) -> Failure {
        if let Some(stderr) = &mut self.child.stderr {
            while stderr.read_buf(&mut self.stderr).await.is_ok_and(|bytes| bytes > 0) {}
        }
        let _ = self.child.wait().await;
        Error::parse(&String::from_utf8_lossy(&self.stderr), &SESSION).into()
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let group = self.child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        if let Some(group) = group {
            let _ = kill_process_group(group, Signal::TERM);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::testing::{ScriptedApi, break_each, launched_answers};

    fn answers() -> ScriptedApi {
        let machine = json!({"InstanceId": "i-0", "State": {"Name": "running"}});
        launched_answers("2")
            .answer("describe-auto-scaling-groups", Value::Null)
            .answer("describe-instances", json!({"Reservations": [{"Instances": [machine]}]}))
            .answer("--name /baton/digits/operator/ca", json!({"Parameter": {"Value": "a"}}))
            .answer("--name /baton/digits/operator/token", json!({"Parameter": {"Value": "b"}}))
    }

    #[test]
    fn an_error_of_any_call_ends_it_with_one_line_that_names_the_call() {
        let (instance, credentials) = find(&answers(), &JobFlags::default()).unwrap();
        assert_eq!(instance, "i-0");
        assert_eq!(fs::read_to_string(credentials.unwrap().file("token")).unwrap(), "b");
        break_each(answers, |api| find(api, &JobFlags::default()));
    }

    #[test]
    fn an_open_tunnel_is_shown_as_exports_or_as_json() {
        let tunnel = OpenTunnel { instance: "i-0", environment: environment(29600, None) };
        assert_eq!(export(&tunnel), "export BATON_COORDINATOR=http://127.0.0.1:29600");
        let expected = json!({
            "instance": "i-0",
            "environment": {"BATON_COORDINATOR": "http://127.0.0.1:29600"},
        });
        assert_eq!(serde_json::to_value(&tunnel).unwrap(), expected);
    }

    #[test]
    fn a_port_that_another_program_has_is_not_used() {
        let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = other.local_addr().unwrap().port();
        let failure = check_is_free(port).unwrap_err();
        let expected = format!("port {port} is in use: --port chooses another one");
        assert_eq!(failure.message, expected);
        check_is_free(0).unwrap();
    }

    #[tokio::test]
    async fn a_session_that_cannot_start_fails_with_reason_and_remedy() {
        for (stderr, expected) in [
            (
                "An error occurred (TargetNotConnected) when calling the StartSession operation: i-0 is not connected.",
                "AWS refuses StartSession (TargetNotConnected): i-0 is not connected: the machine's SSM agent",
            ),
            (
                "SessionManagerPlugin is not found. Please refer to …",
                "session-manager-working-with",
            ),
            ("", "aws ssm start-session: it failed without a message"),
        ] {
            let mut command = Command::new("sh");
            command.args(["-c", "echo \"$1\" >&2; exit 254", "sh", stderr]);
            // No program can listen on port 0.
            let opened = Tunnel::open(command, "i-0", 0).await;
            let Err(failure) = opened else { panic!("{stderr}") };
            assert!(failure.message.contains(expected), "{failure}");
        }
        // Its message comes in two parts, while the port is polled several times.
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "printf 'An error occurred (TargetNotConnected) when calling ' >&2; sleep 0.7; \
             echo 'the StartSession operation: i-0 is not connected.' >&2; exit 254",
        ]);
        let Err(failure) = Tunnel::open(command, "i-0", 0).await else { panic!() };
        assert!(failure.message.contains("StartSession (TargetNotConnected): i-0"), "{failure}");
        let nothing = Command::new("/nowhere/aws");
        let Err(failure) = Tunnel::open(nothing, "i-0", 0).await else { panic!() };
        assert!(failure.message.contains("install the AWS CLI"), "{failure}");
    }
}
